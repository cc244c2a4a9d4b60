"""Stopping: every way to stop a job, and that no process is left."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from kit.jobs import TENAX, Runner, is_alive, until

SLEEPS = "from worker_kit import ready, stay; ready(); stay()"
IGNORES_SIGNALS = (
    "from worker_kit import *; ignore('SIGTERM', 'SIGINT', 'SIGHUP', 'SIGQUIT', 'SIGUSR1'); ready(); stay()"
)
NOTES_SIGNALS = """
    import signal, sys
    from worker_kit import *

    def on_signal(number, frame):
        note("got", signal.Signals(number).name)
        sys.exit(0)

    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"):
        signal.signal(getattr(signal, name), on_signal)
    ready()
    stay()
"""


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_a_signal_is_forwarded_to_workers_and_ends_the_job(runner: Runner, name: str) -> None:
    """The exit code is 128 + n although the workers exit with 0."""
    job = runner.start("--nproc-per-node", "2", "--max-restarts", "3", runner.script(NOTES_SIGNALS))
    runner.pids(2)
    number = getattr(signal, name)
    job.send(number)
    done = job.wait()
    assert done.code == 128 + number
    assert [runner.note("got", rank, timeout_s=1) for rank in range(2)] == [name, name]
    assert f"train.py was cancelled by {name}" in done.report
    assert "Stopped by tenax, not failed: ranks 0, 1" in done.report
    assert "First cause" not in done.report
    assert not runner.noted("ready", attempt=1), "a cancelled job does not restart"


def test_the_console_shows_the_stop_before_the_output_it_causes(runner: Runner) -> None:
    job = runner.start("--nproc-per-node", "2", runner.script(SLEEPS))
    runner.pids(2)
    job.send(signal.SIGINT)
    err = job.wait().err
    assert err.index("stopping all workers because the agent received SIGINT") < err.index("KeyboardInterrupt"), err
    shown = re.findall(r"^(rank \d): KeyboardInterrupt in \w+ \(.+worker_kit.py, line \d+\)$", err, re.M)
    assert sorted(shown) == ["rank 0", "rank 1"], err
    assert "Traceback" not in err


def test_workers_without_handlers_die_at_once(runner: Runner) -> None:
    """Without waiting for the grace period."""
    job = runner.start("--nproc-per-node", "2", runner.script(SLEEPS))
    runner.pids(2)
    began = time.monotonic()
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    assert time.monotonic() - began < 5


def test_signals_to_handle_selects_the_stop_signals(runner: Runner) -> None:
    job = runner.start("--signals-to-handle", "SIGUSR1", runner.script(NOTES_SIGNALS))
    runner.pids(1)
    job.send(signal.SIGUSR1)
    assert job.wait().code == 128 + signal.SIGUSR1
    assert runner.note("got") == "SIGUSR1"


def test_an_unhandled_signal_kills_the_agent_and_the_workers(runner: Runner) -> None:
    job = runner.start("--signals-to-handle", "SIGUSR1", "--nproc-per-node", "2", runner.script(IGNORES_SIGNALS))
    pids = runner.pids(2)
    job.send(signal.SIGTERM)
    assert job.wait().code == -signal.SIGTERM
    until(lambda: not any(map(is_alive, pids)), "the workers' end", timeout_s=1)


# --- the grace period -------------------------------------------------------------------------------------------------


def test_workers_that_ignore_the_signal_are_killed_after_the_shutdown_timeout(runner: Runner) -> None:
    job = runner.start("--nproc-per-node", "2", "--shutdown-timeout", "1", runner.script(IGNORES_SIGNALS))
    runner.pids(2)
    began = time.monotonic()
    job.send(signal.SIGTERM)
    done = job.wait()
    assert done.code == 143
    assert 0.9 < time.monotonic() - began < 4
    assert any("1 s grace" in line for line in done.messages)
    assert any("the grace period is over" in line for line in done.messages)


def test_the_shutdown_timeout_applies_to_each_restart(runner: Runner) -> None:
    script = runner.script(
        """
        import sys
        from worker_kit import *
        ignore("SIGTERM")
        ready()
        if RANK == 0:
            sys.exit(5)
        stay()
        """
    )
    began = time.monotonic()
    done = runner.run("--nproc-per-node", "2", "--shutdown-timeout", "1", "--max-restarts", "1", script)
    assert done.code == 5
    assert 1.9 < time.monotonic() - began < 8
    assert not is_alive(runner.pids(2, attempt=0)[1])
    assert "Stopped by tenax, not failed: rank 1" in done.report


def test_a_shutdown_timeout_of_zero_kills_at_once(runner: Runner) -> None:
    job = runner.start("--shutdown-timeout", "0", runner.script(IGNORES_SIGNALS))
    runner.pids(1)
    began = time.monotonic()
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    assert time.monotonic() - began < 3


def test_a_daemon_of_a_successful_worker_is_killed(runner: Runner) -> None:
    """Without waiting for the grace period, and the run succeeds."""
    began = time.monotonic()
    done = runner.run(runner.script("from worker_kit import daemon; daemon('daemon'); print('done')"))
    assert done.code == 0, done
    assert not is_alive(int(runner.note("daemon")))
    assert time.monotonic() - began < 10


def test_children_in_the_process_group_of_a_worker_get_the_grace_period(runner: Runner) -> None:
    script = runner.script(
        """
        import os, signal, sys
        from worker_kit import *
        if os.fork() == 0:
            def tidy(*_):
                note("tidied")
                os._exit(0)
            signal.signal(signal.SIGTERM, tidy)
            note("child")
            while True:
                signal.pause()
        wait_for("child")
        ready()
        stay()
        """
    )
    job = runner.start(script)
    runner.pids(1)
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    assert runner.noted("tidied")


def test_a_worker_under_sigstop_receives_the_stop_signal(runner: Runner) -> None:
    job = runner.start(runner.script(NOTES_SIGNALS))
    (pid,) = runner.pids(1)
    os.kill(pid, signal.SIGSTOP)
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    assert runner.note("got") == "SIGTERM"


# --- repeated signals -------------------------------------------------------------------------------------------------


def test_a_second_sigint_kills_at_once(runner: Runner) -> None:
    """And the report is still printed."""
    job = runner.start("--nproc-per-node", "2", runner.script(IGNORES_SIGNALS))
    pids = runner.pids(2)
    job.send(signal.SIGINT)
    job.until_printed("received SIGINT")
    assert all(map(is_alive, pids))
    began = time.monotonic()
    job.send(signal.SIGINT)
    done = job.wait()
    assert done.code == 130
    assert time.monotonic() - began < 5
    assert "train.py was cancelled by SIGINT" in done.report
    assert re.fullmatch(r"\d+ % of .* was training.*", done.field("time")), done


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_repeated_signals_keep_the_report_and_the_exit_code(runner: Runner, name: str) -> None:
    """One report, the exit code of the first signal, no traceback of tenax."""
    job = runner.start("--nproc-per-node", "2", runner.script(SLEEPS))
    runner.pids(2)
    number = getattr(signal, name)

    def sent_until_the_end() -> bool:
        job.send(number)
        return job.process.poll() is not None

    until(sent_until_the_end, "the end")
    done = job.wait()
    assert done.code == 128 + number, done
    assert done.report.count("train.py was cancelled by") == 1
    assert done.err.endswith(done.report)
    assert "tenax/" not in done.err[: -len(done.report)].replace(str(runner.home), "")


def test_a_signal_after_a_failure_does_not_hide_it(runner: Runner) -> None:
    script = runner.script(
        """
        import sys
        from worker_kit import *
        ignore("SIGTERM", "SIGINT")
        ready()
        if RANK == 0:
            raise RuntimeError("this was first")
        stay()
        """
    )
    job = runner.start("--nproc-per-node", "2", "--max-restarts", "1", script)
    job.until_printed("stopping all workers")
    job.send(signal.SIGINT)
    job.until_printed("the workers are already being stopped; Ctrl-C again kills them now")
    job.send(signal.SIGINT)
    done = job.wait()
    assert done.code == 130
    assert "RuntimeError: this was first" in done.report
    assert not runner.noted("ready", attempt=1)


# --- at any time ------------------------------------------------------------------------------------------------------


# Number of times during the start that are tried, with both signals in turn. 1,000 take some minutes.
START_SIGNALS = int(os.environ.get("TENAX_TEST_START_SIGNALS", "11"))


def test_a_signal_at_any_time_of_the_start_leaves_no_process(runner: Runner) -> None:
    script = runner.script(IGNORES_SIGNALS)
    began = time.monotonic()
    job = runner.start("--nproc-per-node", "2", "--shutdown-timeout", "0", script)
    runner.pids(2)
    start_s = time.monotonic() - began
    for moment in range(START_SIGNALS):
        number = (signal.SIGTERM, signal.SIGINT)[moment % 2]
        job.send(number)
        done = job.wait(10)
        # SIGINT during the initialization of Python gives a traceback and exit code 1.
        is_from_python = number == signal.SIGINT and "KeyboardInterrupt" in done.err and "tenax:" not in done.err
        assert done.code in (128 + number, -number, *([1] if is_from_python else [])), done
        until(lambda: not runner.alive(), f"the end of everything after signal {moment}", timeout_s=1)
        job = runner.start("--nproc-per-node", "2", "--shutdown-timeout", "0", script)
        # To aim at races: each round hits another time of the start.
        time.sleep(start_s * moment / START_SIGNALS)
    job.send(signal.SIGTERM)
    job.wait(10)


def test_a_signal_stops_a_job_that_restarts_all_the_time(runner: Runner) -> None:
    script = runner.script("from worker_kit import ready; ready(); raise SystemExit(7)")
    for attempt, number in ((0, signal.SIGTERM), (2, signal.SIGINT), (5, signal.SIGTERM)):
        for note in runner.notes.iterdir():
            note.unlink()
        job = runner.start("--nproc-per-node", "2", "--max-restarts", "100000", script)
        runner.pids(2, attempt)
        job.send(number)
        done = job.wait()
        assert done.code == 128 + number, done
        assert f"cancelled by {number.name}" in done.report
        assert not runner.alive()


# --- nohup ------------------------------------------------------------------------------------------------------------


def test_nohup_ignores_sighup(runner: Runner) -> None:
    """Workers inherit that."""
    script = runner.script("from worker_kit import *; ready(); wait_for('go'); print('finished')")
    job = runner.start(script, program=["nohup", *TENAX, "run"])
    (pid,) = runner.pids(1)
    job.send(signal.SIGHUP)
    os.kill(pid, signal.SIGHUP)
    runner.leave_note("go")
    done = job.wait()
    assert (done.code, done.out) == (0, "finished\n"), done


def test_nohup_does_not_ignore_other_signals(runner: Runner) -> None:
    job = runner.start(runner.script(SLEEPS), program=["nohup", *TENAX, "run"])
    runner.pids(1)
    job.send(signal.SIGTERM)
    assert job.wait().code == 143


def test_in_the_background_of_a_script_sigint_is_ignored(runner: Runner) -> None:
    """As for every background process of a shell script; SIGTERM ends it."""
    script = runner.script(SLEEPS)
    shell = f"{' '.join(TENAX)} run {script} & echo $! > pid; wait $!; echo $? > code"
    job = runner.start(program=["sh", "-c", shell])
    (worker,) = runner.pids(1)
    pid = int((runner.home / "pid").read_text())
    os.kill(pid, signal.SIGINT)
    os.kill(worker, signal.SIGINT)
    assert is_alive(pid)
    assert is_alive(worker)
    os.kill(pid, signal.SIGTERM)
    job.wait()
    assert (runner.home / "code").read_text() == "143\n"
