"""Notices: workers of a real run are informed that their node will leave, and use the remaining time."""

from __future__ import annotations

import json
import os
import signal

import pytest

from kit.jobs import Runner

# Runs until there is a notice, then exits; ignores SIGTERM.
TRAINS = """
    import json, os, signal, sys, time
    from tenax import preemption
    from worker_kit import *

    ignore("SIGTERM")
    note("before", json.dumps([preemption.notice() is None, preemption.generation()]))
    ready()
    while not (notice := preemption.notice()):
        time.sleep(0.002)
    left = notice.seconds_left
    note("notice", json.dumps([notice.host, notice.is_this_host, notice.why, left]))
    if left is None or left > STAYS_IF_MORE_THAN_S:
        stay()
"""


def noticed(runner: Runner, rank: int) -> tuple[str, bool, str, float | None]:
    host, is_this_host, why, left = json.loads(runner.note("notice", rank))
    return host, is_this_host, why, left


def test_workers_get_a_notice_when_their_agent_is_stopped(runner: Runner) -> None:
    """Every rank, within the grace period. Workers that exit in time are not killed, and the run is cancelled."""
    script = runner.script(TRAINS.replace("STAYS_IF_MORE_THAN_S", "1e9"))
    job = runner.start("--nproc-per-node", "2", "--shutdown-timeout", "25", script)
    runner.pids(2)
    assert [json.loads(runner.note("before", rank)) for rank in range(2)] == [[True, 1], [True, 1]]
    job.send(signal.SIGTERM)
    done = job.wait()
    assert done.code == 143, done
    for rank in range(2):
        host, is_this_host, why, left = noticed(runner, rank)
        assert (host, is_this_host, why) == (os.uname().nodename, True, "the agent received SIGTERM")
        assert left is not None
        assert 0 < left <= 25
    assert not any("killing" in line for line in done.messages), done


def test_an_advance_notice_stops_no_worker(runner: Runner) -> None:
    """``--notice-signals``: only the stop signal that follows does."""
    script = runner.script(TRAINS.replace("STAYS_IF_MORE_THAN_S", "60"))
    job = runner.start(
        *("--nproc-per-node", "2", "--shutdown-timeout", "1"),
        *("--notice-signals", "SIGUSR1", "--notice-seconds", "120", script),
    )
    runner.pids(2)
    job.send(signal.SIGUSR1)
    for rank in range(2):
        host, is_this_host, why, left = noticed(runner, rank)
        assert (host, is_this_host, why) == (os.uname().nodename, True, "its agent received SIGUSR1")
        assert left is not None
        assert 60 < left <= 120
    assert job.process.poll() is None
    job.until_printed("this node is leaving (up to 2 min)")
    job.send(signal.SIGTERM)
    assert job.wait().code == 143


@pytest.mark.parametrize("log_dir", ["logs", os.devnull])
def test_without_a_log_folder_there_are_no_notices(runner: Runner, log_dir: str) -> None:
    """``preemption.notice()`` returns None."""
    script = runner.script(
        """
        import os, signal
        from tenax import preemption
        from worker_kit import *

        def on_sigterm(number, frame):
            note("answer", f"{'TENAX_NOTICE_FILE' in os.environ} {preemption.notice() is not None}")
            raise SystemExit(0)

        signal.signal(signal.SIGTERM, on_sigterm)
        ready()
        stay()
        """
    )
    job = runner.start("--log-dir", log_dir, script)
    runner.pids(1)
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    kept = log_dir != os.devnull
    assert runner.note("answer") == f"{kept} {kept}"


def test_a_notice_is_for_its_generation_only(runner: Runner) -> None:
    script = runner.script(
        """
        import sys, time
        from tenax import preemption
        from worker_kit import *

        note("generation", f"{preemption.generation()} {preemption.notice() is None}")
        ready()
        if ATTEMPT == 0:
            while not preemption.notice():
                time.sleep(0.002)
            sys.exit(1)
        """
    )
    job = runner.start("--max-restarts", "1", "--notice-signals", "SIGUSR2", script)
    runner.pids(1)
    job.send(signal.SIGUSR2)
    assert job.wait().code == 0
    assert [runner.note("generation", attempt=attempt) for attempt in range(2)] == ["1 True", "2 True"]
