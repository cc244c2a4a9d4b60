"""Notices: real workers of a real run learn that their machine is going to be taken, and use the time they have."""

from __future__ import annotations

import json
import os
import signal

import pytest

from kit.jobs import Bench

# Trains until there is a notice, then saves and ends; SIGTERM alone does not impress it.
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


def noticed(bench: Bench, rank: int) -> tuple[str, bool, str, float | None]:
    host, is_this_host, why, left = json.loads(bench.note("notice", rank))
    return host, is_this_host, why, left


def test_workers_see_that_their_node_was_asked_to_stop(bench: Bench) -> None:
    """Every rank, before its grace is over; who ends by itself in time was not killed, and the run was cancelled."""
    script = bench.script(TRAINS.replace("STAYS_IF_MORE_THAN_S", "1e9"))
    job = bench.start("--nproc-per-node", "2", "--shutdown-timeout", "25", script)
    bench.pids(2)
    assert [json.loads(bench.note("before", rank)) for rank in range(2)] == [[True, 1], [True, 1]]
    job.send(signal.SIGTERM)
    done = job.wait()
    assert done.code == 143, done
    for rank in range(2):
        host, is_this_host, why, left = noticed(bench, rank)
        assert (host, is_this_host, why) == (os.uname().nodename, True, "the agent received SIGTERM")
        assert left is not None
        assert 0 < left <= 25
    assert not any("killing" in line for line in done.said), done


def test_a_notice_in_advance_ends_nothing(bench: Bench) -> None:
    """'--notice-signals': the workers know, and go on; the signal that follows is what ends them."""
    script = bench.script(TRAINS.replace("STAYS_IF_MORE_THAN_S", "60"))
    job = bench.start(
        *("--nproc-per-node", "2", "--shutdown-timeout", "1"),
        *("--notice-signals", "SIGUSR1", "--notice-seconds", "120", script),
    )
    bench.pids(2)
    job.send(signal.SIGUSR1)
    for rank in range(2):
        host, is_this_host, why, left = noticed(bench, rank)
        assert (host, is_this_host, why) == (os.uname().nodename, True, "its agent received SIGUSR1")
        assert left is not None
        assert 60 < left <= 120
    assert job.process.poll() is None
    job.until_said("this node is leaving (up to 120 s)")
    job.send(signal.SIGTERM)
    assert job.wait().code == 143


@pytest.mark.parametrize("log_dir", ["logs", os.devnull])
def test_where_nothing_is_kept_there_are_no_notices(bench: Bench, log_dir: str) -> None:
    """Without a folder for the run there is no file, and a script that asks is told None, as anywhere else."""
    script = bench.script(
        """
        import os, signal
        from tenax import preemption
        from worker_kit import *

        def asked(number, frame):
            note("answer", f"{'TENAX_NOTICE_FILE' in os.environ} {preemption.notice() is not None}")
            raise SystemExit(0)

        signal.signal(signal.SIGTERM, asked)
        ready()
        stay()
        """
    )
    job = bench.start("--log-dir", log_dir, script)
    bench.pids(1)
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    kept = log_dir != os.devnull
    assert bench.note("answer") == f"{kept} {kept}"


def test_the_next_generation_starts_without_the_notice(bench: Bench) -> None:
    """What was announced to one is not told to the next; its number has grown."""
    script = bench.script(
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
    job = bench.start("--max-restarts", "1", "--notice-signals", "SIGUSR2", script)
    bench.pids(1)
    job.send(signal.SIGUSR2)
    assert job.wait().code == 0
    assert [bench.note("generation", attempt=attempt) for attempt in range(2)] == ["1 True", "2 True"]
