"""Stopping: every way to ask a job to end, and what is left of it afterwards, which is nothing."""

from __future__ import annotations

import os
import signal
import time

import pytest

from kit.jobs import TENAX, Bench, is_alive, until

SLEEPS = "from worker_kit import ready, stay; ready(); stay()"
DEAF = "from worker_kit import *; ignore('SIGTERM', 'SIGINT', 'SIGHUP', 'SIGQUIT', 'SIGUSR1'); ready(); stay()"
TELLS = """
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
def test_a_signal_is_passed_on_and_ends_the_job(bench: Bench, name: str) -> None:
    """Workers get the same signal, may tidy up, and the exit code is 128 + n although they exit with 0."""
    job = bench.start("--nproc-per-node", "2", "--max-restarts", "3", bench.script(TELLS))
    bench.pids(2)
    number = getattr(signal, name)
    job.send(number)
    done = job.wait()
    assert done.code == 128 + number
    assert [bench.note("got", rank, timeout_s=1) for rank in range(2)] == [name, name]
    assert f"train.py was cancelled by {name}" in done.report
    assert "Stopped by us, not failed: ranks 0, 1" in done.report
    assert "First cause" not in done.report
    assert not bench.noted("ready", attempt=1), "a cancelled job does not restart"


def test_the_console_tells_cause_before_effect(bench: Bench) -> None:
    """What was asked of the workers stands above what they say about it."""
    job = bench.start("--nproc-per-node", "2", bench.script(SLEEPS))
    bench.pids(2)
    job.send(signal.SIGINT)
    err = job.wait().err
    facts = [err.index("received SIGINT"), err.index("stopping all workers"), err.index("KeyboardInterrupt")]
    assert facts == sorted(facts), err


def test_workers_that_do_nothing_about_it(bench: Bench) -> None:
    """Plain workers die of the signal at once; nobody waits for the grace period."""
    job = bench.start("--nproc-per-node", "2", bench.script(SLEEPS))
    bench.pids(2)
    began = time.monotonic()
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    assert time.monotonic() - began < 5


def test_another_signal_can_be_chosen(bench: Bench) -> None:
    """'--signals-to-handle SIGUSR1' stops the job in an orderly way; others then have their own meaning."""
    job = bench.start("--signals-to-handle", "SIGUSR1", bench.script(TELLS))
    bench.pids(1)
    job.send(signal.SIGUSR1)
    assert job.wait().code == 128 + signal.SIGUSR1
    assert bench.note("got") == "SIGUSR1"


def test_a_signal_that_is_not_handled_kills_the_launcher_and_with_it_the_job(bench: Bench) -> None:
    """Whatever ends the launcher, nothing outlives it."""
    job = bench.start("--signals-to-handle", "SIGUSR1", "--nproc-per-node", "2", bench.script(DEAF))
    pids = bench.pids(2)
    job.send(signal.SIGTERM)
    assert job.wait().code == -signal.SIGTERM
    until(lambda: not any(map(is_alive, pids)), "the workers' end", timeout_s=1)


# --- the grace period -------------------------------------------------------------------------------------------------


def test_the_shutdown_timeout_is_honoured_on_a_signal(bench: Bench) -> None:
    """Workers that do not listen are killed when their time is up, not earlier and not much later."""
    job = bench.start("--nproc-per-node", "2", "--shutdown-timeout", "1", bench.script(DEAF))
    bench.pids(2)
    began = time.monotonic()
    job.send(signal.SIGTERM)
    done = job.wait()
    assert done.code == 143
    assert 0.9 < time.monotonic() - began < 4
    assert any("1 s of grace" in line for line in done.said)
    assert any("the grace period is over" in line for line in done.said)


def test_the_shutdown_timeout_is_honoured_when_a_peer_fails_and_on_a_restart(bench: Bench) -> None:
    """A deaf worker costs each generation its grace period and no more; then the next one starts."""
    script = bench.script(
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
    done = bench.run("--nproc-per-node", "2", "--shutdown-timeout", "1", "--max-restarts", "1", script)
    assert done.code == 5
    assert 1.9 < time.monotonic() - began < 8
    assert not is_alive(bench.pids(2, attempt=0)[1])
    assert "Stopped by us, not failed: rank 1" in done.report


def test_no_grace_at_all(bench: Bench) -> None:
    """'--shutdown-timeout 0' kills at once."""
    job = bench.start("--shutdown-timeout", "0", bench.script(DEAF))
    bench.pids(1)
    began = time.monotonic()
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    assert time.monotonic() - began < 3


def test_what_a_worker_leaves_behind_is_ended_too(bench: Bench) -> None:
    """A worker that succeeds but leaves a daemon: the daemon goes, the run succeeds, without waiting for the grace."""
    began = time.monotonic()
    done = bench.run(bench.script("from worker_kit import daemon; daemon('daemon'); print('done')"))
    assert done.code == 0, done
    assert not is_alive(int(bench.note("daemon")))
    assert time.monotonic() - began < 10


def test_a_grandchild_in_the_workers_group_gets_the_grace_period(bench: Bench) -> None:
    """A data loader of a worker that was asked to end may tidy up before everything is killed."""
    script = bench.script(
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
    job = bench.start(script)
    bench.pids(1)
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    assert bench.noted("tidied")


def test_a_stopped_worker_can_be_ended(bench: Bench) -> None:
    """A worker under SIGSTOP is woken up to obey."""
    job = bench.start(bench.script(TELLS))
    (pid,) = bench.pids(1)
    os.kill(pid, signal.SIGSTOP)
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    assert bench.note("got") == "SIGTERM"


# --- insisting --------------------------------------------------------------------------------------------------------


def test_a_second_interrupt_is_final(bench: Bench) -> None:
    """Deaf workers and 30 s of grace: the second SIGINT kills at once, and the report still comes."""
    job = bench.start("--nproc-per-node", "2", bench.script(DEAF))
    pids = bench.pids(2)
    job.send(signal.SIGINT)
    job.until_said("received SIGINT")
    assert all(map(is_alive, pids))
    began = time.monotonic()
    job.send(signal.SIGINT)
    done = job.wait()
    assert done.code == 130
    assert time.monotonic() - began < 5
    assert "train.py was cancelled by SIGINT" in done.report


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_hammering_costs_neither_the_report_nor_the_exit_code(bench: Bench, name: str) -> None:
    """However many signals come, until the very end: one report, the code of the first, no stack of ours."""
    job = bench.start("--nproc-per-node", "2", bench.script(SLEEPS))
    bench.pids(2)
    number = getattr(signal, name)

    def hammered_to_the_end() -> bool:
        job.send(number)
        return job.process.poll() is not None

    until(hammered_to_the_end, "the end")
    done = job.wait()
    assert done.code == 128 + number, done
    assert done.report.count("train.py was cancelled by") == 1
    assert done.err.endswith(done.report)
    assert "tenax/" not in done.err[: -len(done.report)].replace(str(bench.home), "")


def test_a_signal_after_the_failure_does_not_hide_it(bench: Bench) -> None:
    """The job is failing already when somebody presses Ctrl-C: the report still names the failed worker."""
    script = bench.script(
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
    job = bench.start("--nproc-per-node", "2", "--max-restarts", "1", script)
    job.until_said("stopping all workers")
    job.send(signal.SIGINT)
    job.until_said("the workers are already being stopped; Ctrl-C again kills them now")
    job.send(signal.SIGINT)
    done = job.wait()
    assert done.code == 130
    assert "RuntimeError: this was first" in done.report
    assert not bench.noted("ready", attempt=1)


# --- at every moment --------------------------------------------------------------------------------------------------


# How many moments of the start are tried with each signal. 1,000 take some minutes.
START_SIGNALS = int(os.environ.get("TENAX_TEST_START_SIGNALS", "10"))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_at_any_moment_of_the_start_leaves_nothing(bench: Bench, name: str) -> None:
    """From the first instruction to the first worker: one signal ends the job, and everything is gone soon after."""
    script = bench.script(DEAF)
    number = getattr(signal, name)
    began = time.monotonic()
    job = bench.start("--nproc-per-node", "2", "--shutdown-timeout", "0", script)
    bench.pids(2)
    start_s = time.monotonic() - began
    for moment in range(START_SIGNALS):
        job.send(number)
        done = job.wait(10)
        # Python answers an interrupt during its own initialization with a traceback and 1.
        is_python_s = number == signal.SIGINT and "KeyboardInterrupt" in done.err and "tenax:" not in done.err
        assert done.code in (128 + number, -number, *([1] if is_python_s else [])), done
        until(lambda: not bench.alive(), f"the end of everything after signal {moment}", timeout_s=1)
        job = bench.start("--nproc-per-node", "2", "--shutdown-timeout", "0", script)
        # Not to hide a race but to aim at one: each round hits another moment of the start.
        time.sleep(start_s * moment / START_SIGNALS)
    job.send(number)
    job.wait(10)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signals_while_restarting(bench: Bench, name: str) -> None:
    """A job that fails and restarts all the time stops when it is told to, at whatever moment that is."""
    script = bench.script("from worker_kit import ready; ready(); raise SystemExit(7)")
    number = getattr(signal, name)
    for attempt in (0, 2, 5):
        for note in bench.notes.iterdir():
            note.unlink()
        job = bench.start("--nproc-per-node", "2", "--max-restarts", "100000", script)
        bench.pids(2, attempt)
        job.send(number)
        done = job.wait()
        assert done.code == 128 + number, done
        assert f"cancelled by {name}" in done.report
        assert not bench.alive()


# --- hang-ups ---------------------------------------------------------------------------------------------------------


def test_nohup(bench: Bench) -> None:
    """'nohup tenax run': the job goes on after the hang-up, and its workers ignore it too."""
    script = bench.script("from worker_kit import *; ready(); wait_for('go'); print('finished')")
    job = bench.start(script, program=["nohup", *TENAX, "run"])
    (pid,) = bench.pids(1)
    job.send(signal.SIGHUP)
    os.kill(pid, signal.SIGHUP)
    bench.tell("go")
    done = job.wait()
    assert (done.code, done.out) == (0, "finished\n"), done


def test_nohup_still_obeys_other_signals(bench: Bench) -> None:
    """Only the hang-up is ignored."""
    job = bench.start(bench.script(SLEEPS), program=["nohup", *TENAX, "run"])
    bench.pids(1)
    job.send(signal.SIGTERM)
    assert job.wait().code == 143


def test_in_the_background_of_a_script(bench: Bench) -> None:
    """'tenax run … &' in a script starts with SIGINT ignored, as every such program; SIGTERM ends it."""
    script = bench.script(SLEEPS)
    shell = f"{' '.join(TENAX)} run {script} & echo $! > pid; wait $!; echo $? > code"
    job = bench.start(program=["sh", "-c", shell])
    (worker,) = bench.pids(1)
    pid = int((bench.home / "pid").read_text())
    os.kill(pid, signal.SIGINT)
    os.kill(worker, signal.SIGINT)
    assert is_alive(pid)
    assert is_alive(worker)
    os.kill(pid, signal.SIGTERM)
    job.wait()
    assert (bench.home / "code").read_text() == "143\n"
