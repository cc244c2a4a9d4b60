"""Real agents, workers and hangs: every node reports the odd rank first."""

from __future__ import annotations

import os
import signal
import time

import pytest

from .kit import LONG_TIMEOUT_S, Job, hang_report, lines_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(2 * LONG_TIMEOUT_S)]

SECONDS = "1"
REPORT = ("--on-hang", "report", "--hang-after", SECONDS)
RESTART = ("--on-hang", "restart", "--hang-after", SECONDS)
RHYTHM_S = 2.0  # longer than SECONDS, so that the rhythm is learned


def test_a_sleeping_job_is_reported_on_every_node_and_can_continue(job: Job) -> None:
    """One worker of four waits for something else, the others wait for it."""
    agents = job.start(*REPORT, nodes=2)
    members = job.hub.meet(4)
    job.hub.steps_for(RHYTHM_S, members)
    job.hub.step(members, {3: "p"})
    for agent in agents:
        agent.until_printed("no action is taken", LONG_TIMEOUT_S)
    reports = [hang_report(agent) for agent in agents]
    assert reports[0] == reports[1]
    first, caption, odd, others, follows = reports[0]
    assert first.startswith("generation 1 seems to hang: no activity on 2 nodes for ")
    assert "all workers are asleep" in first
    assert caption == "where its 4 workers are, the odd one out first:"
    assert odd.startswith(f"  rank 3 (pid {members[3].pid} on ")
    assert odd.endswith("in park")
    assert others.startswith("  ranks 0 to 2: at ")
    assert others.endswith("in exchange")
    assert follows == "no action is taken (--on-hang report)"

    job.hub.gather(members[:3])
    members[3].send(".")
    job.hub.gather(members[3:])
    for member in members:
        member.send(".")
    while any("generation 1 does not hang any more: rank " not in agent.err for agent in agents):
        job.hub.step(members)
    job.hub.finish(members)
    for agent in agents:
        assert agent.wait().code == 0


def test_a_restart_ends_the_hang_and_the_job_succeeds(job: Job) -> None:
    """The generation ends as a failure of the odd rank, and the next one succeeds."""
    agents = job.start(*RESTART, "--max-restarts", "1", "--shutdown-timeout", "20", nodes=2, steps=True)
    members = job.hub.meet(4)
    job.hub.steps_for(1.5, members)
    job.hub.step(members, {1: "e"})
    again = job.hub.meet(4, generation=2)
    job.hub.step(again)
    job.hub.finish(again)
    for agent in agents:
        done = agent.wait()
        assert done.code == 0, done
        assert "no worker reports steps any more" in hang_report(agent)[0]
        assert hang_report(agent)[2].startswith(f"  rank 1 (pid {members[1].pid} on ")
        assert "in wait_for_nothing, in threading.py:" in hang_report(agent)[2]
        assert " hung" in done.err
        assert "generation 2 (restart 1 of 1)" in done.err


def test_a_hang_without_a_restart_left_is_a_failure_with_a_reason(job: Job) -> None:
    """The report has rank, reason and location; the exit code is 1, not that of tenax's signal."""
    (agent,) = job.start(*RESTART, "--max-restarts", "0", steps=True)
    members = job.hub.meet(2)
    job.hub.steps_for(1.5, members)
    job.hub.step(members, {1: "e"})
    done = agent.wait(LONG_TIMEOUT_S)
    assert done.code == 1, done
    assert "hung: no activity on 1 node for" in done.field("ended")
    assert "in wait_for_nothing" in done.report


def test_a_thread_that_logs_does_not_hide_a_hang(job: Job) -> None:
    """The main threads are blocked, so its lines are not progress."""
    script = job.runner.script(
        """
        import os, threading, time
        def log():
            while True:
                print("still here", flush=True)
                time.sleep(0.02)
        threading.Thread(target=log, daemon=True).start()
        data = os.open(os.devnull, os.O_WRONLY)
        for _ in range(200):  # not for some time: on a busy machine the agent takes its samples late, too
            os.write(data, b"x")
            time.sleep(0.01)
        def wait_forever():
            threading.Event().wait()
        wait_forever()
        """
    )
    agent = job.runner.start("--nproc-per-node", "2", "--hang-after", "1", "--redirects", "3", script)
    agent.until_printed("no action is taken", LONG_TIMEOUT_S)
    reports = hang_report(agent)
    assert "all workers are asleep" in reports[0]
    assert any("in wait_forever, in threading.py:" in line for line in reports)
    agent.send(signal.SIGTERM)
    assert agent.wait().code == 128 + signal.SIGTERM


def test_a_stopped_worker_is_reported_and_not_continued(job: Job) -> None:
    """It may be stopped on purpose, so it gets no SIGCONT to dump its stacks."""
    (agent,) = job.start(*REPORT)
    members = job.hub.meet(2)
    job.hub.steps_for(RHYTHM_S, members)
    os.kill(members[1].pid, signal.SIGSTOP)
    try:
        job.hub.gather(members[:1])
        members[0].send(".")
        agent.until_printed("no action is taken", LONG_TIMEOUT_S)
    finally:
        os.kill(members[1].pid, signal.SIGCONT)
    reports = hang_report(agent)
    assert reports[2].startswith(f"  rank 1 (pid {members[1].pid} on ")
    assert "stopped by SIGSTOP or a debugger; SIGCONT resumes it" in reports[2]
    job.hub.gather(members[1:])
    members[1].send(".")
    while "generation 1 does not hang any more: rank " not in agent.err:
        job.hub.step(members)
    job.hub.finish(members)
    assert agent.wait().code == 0


def test_a_program_without_python_is_reported_without_stacks(job: Job) -> None:
    """Its hang is still detected."""
    fifo = job.runner.home / "fifo"
    os.mkfifo(fifo)
    agent = job.runner.start("--no-python", *REPORT, "cat", str(fifo))
    with fifo.open("wb", buffering=0) as pipe:
        until = time.monotonic() + RHYTHM_S
        while time.monotonic() < until:
            pipe.write(b"line\n" * 1000)  # blocks until it is read
        agent.until_printed("no action is taken", LONG_TIMEOUT_S)
    reports = hang_report(agent)
    assert "not known: it is not a Python program prepared for stack dumps" in reports[2]
    assert agent.wait().code == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_computing_job_without_output_is_not_a_hang(job: Job, workers: int) -> None:
    """It never did I/O or reported steps, so there is no rhythm."""
    script = job.runner.script(
        """
        import time
        until = time.monotonic() + 1
        while time.monotonic() < until:
            sum(i * i for i in range(1000))
        """
    )
    done = job.runner.run(
        "--nproc-per-node", str(workers), "--on-hang", "restart", "--hang-after", "0.2", "--max-restarts", "1", script
    )
    assert done.code == 0
    assert "seems to hang" not in done.err


def test_a_phase_is_not_a_hang(job: Job) -> None:
    """However long it takes."""
    script = job.runner.script(
        """
        import time
        from tenax import progress
        for n in range(100):
            time.sleep(0.01)
            progress.step(n)
        with progress.phase("checkpoint"):
            time.sleep(2.5)
        """
    )
    done = job.runner.run("--on-hang", "restart", "--hang-after", "0.5", "--max-restarts", "1", script)
    assert done.code == 0
    assert "seems to hang" not in done.err


def test_hang_detection_can_be_turned_off(job: Job) -> None:
    """A job without progress is not sampled and not reported."""
    (agent,) = job.start("--on-hang", "off", "--hang-after", "0.2")
    members = job.hub.meet(2)
    job.hub.steps_for(1.0, members)
    job.hub.step(members, {1: "p"})
    assert job.hub.is_silent_for(1.0, members[1])
    members[1].send(".")
    job.hub.finish(members)
    assert agent.wait().code == 0
    assert not [line for line in lines_of(agent) if "hang" in line]
