"""Real agents, real workers, real hangs: the odd one out is named first, on every node."""

from __future__ import annotations

import os
import signal
import time

import pytest

from .kit import MUCH_PATIENCE_S, Job, hang_report, lines_of

pytestmark = pytest.mark.process

SECONDS = "1"
REPORT = ("--on-hang", "report", "--hang-after", SECONDS)
RESTART = ("--on-hang", "restart", "--hang-after", SECONDS)
RHYTHM_S = 2.0  # longer than that, so that the job is known


def test_a_job_that_sleeps_is_reported_on_every_node_and_goes_on(job: Job) -> None:
    """One worker of four waits for something else, and the others for it. When it goes on, so does the job."""
    agents = job.start(*REPORT, nodes=2)
    members = job.hub.meet(4)
    job.hub.steps_for(RHYTHM_S, members)
    job.hub.step(members, {3: "p"})
    for agent in agents:
        agent.until_said("no action is taken")
    told = [hang_report(agent) for agent in agents]
    assert told[0] == told[1]
    first, caption, odd, others, follows = told[0]
    assert first.startswith("generation 1 seems to hang: no activity on 2 nodes for ")
    assert "all workers are asleep" in first
    assert caption == "where its 4 workers are, the odd one out first:"
    assert odd.startswith(f"  rank 3 (pid {members[3].pid} on ")
    assert odd.endswith("in park")
    assert others.startswith("  ranks 0 to 2: at ")
    assert others.endswith("in exchange")
    assert follows == "no action is taken (--on-hang report)"

    job.hub.gather(members[:3])
    members[3].tell(".")
    job.hub.gather(members[3:])
    for member in members:
        member.tell(".")
    while any("generation 1 is active again and continues" not in agent.err for agent in agents):
        job.hub.step(members)
    job.hub.finish(members)
    for agent in agents:
        assert agent.wait().code == 0


def test_a_restart_ends_the_hang_and_the_job_succeeds(job: Job) -> None:
    """The generation ends as a failure of the odd one, and the next one does its work."""
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
    """The report says who, why and where; the exit code is that of a failed run, not of our signal."""
    (agent,) = job.start(*RESTART, "--max-restarts", "0", steps=True)
    members = job.hub.meet(2)
    job.hub.steps_for(1.5, members)
    job.hub.step(members, {1: "e"})
    done = agent.wait()
    assert done.code == 1, done
    assert "hung: no activity on 1 node for" in done.report
    assert "in wait_for_nothing" in done.report


def test_a_job_that_spins_is_found_too(job: Job) -> None:
    """As a collective that polls: everybody uses a whole processor, and nothing happens."""
    # Looks are far apart: three that spin keep everybody waiting, and who looks too late knows nothing.
    (agent,) = job.start("--on-hang", "report", "--hang-after", "3", workers=3)
    members = job.hub.meet(3)
    job.hub.step(members, dict.fromkeys(range(3), "s"))
    job.hub.steps_for(5.0, members)
    job.hub.step(members, {1: "x"})
    agent.until_said("no action is taken", MUCH_PATIENCE_S)
    told = hang_report(agent)
    assert "all workers are spinning" in told[0]
    assert told[2].startswith(f"  rank 1 (pid {members[1].pid} on ")
    assert told[2].endswith("in spin")
    assert told[3].startswith("  ranks 0, 2: at ")
    assert told[3].endswith("in poll")
    agent.send(signal.SIGTERM)
    assert agent.wait().code == 128 + signal.SIGTERM


def test_scopes_that_are_missing_tell_of_a_hang_that_cannot_be_seen(job: Job) -> None:
    """A thread that logs a heartbeat keeps both workers from looking still; but they entered a scope at every step."""
    script = job.bench.script(
        """
        import os, threading, time
        from tenax import timer
        client = timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"])
        def log():
            while True:
                print("still here", flush=True)
                time.sleep(0.02)
        threading.Thread(target=log, daemon=True).start()
        until = time.monotonic() + 2
        while time.monotonic() < until:
            with timer.expires(after=60, scope="step", client=client):
                time.sleep(0.01)
        def wait_for_ever():
            threading.Event().wait()
        wait_for_ever()
        """
    )
    words = ("--nproc-per-node", "2", "--on-hang", "report", "--hang-after", "0.3", "--redirects", "3", script)
    agent = job.bench.start(*words, env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    agent.until_said("no action is taken", MUCH_PATIENCE_S)
    told = hang_report(agent)
    assert "no worker enters or leaves a watchdog scope any more" in told[0]
    assert told[2].startswith("  ranks 0, 1: at ")
    agent.send(signal.SIGTERM)
    assert agent.wait().code == 128 + signal.SIGTERM


def test_a_worker_that_was_stopped_is_named_and_left_alone(job: Job) -> None:
    """Whoever stopped it may want it so: it is not woken to ask where it is."""
    (agent,) = job.start(*REPORT)
    members = job.hub.meet(2)
    job.hub.steps_for(RHYTHM_S, members)
    os.kill(members[1].pid, signal.SIGSTOP)
    try:
        job.hub.gather(members[:1])
        members[0].tell(".")
        agent.until_said("no action is taken")
    finally:
        os.kill(members[1].pid, signal.SIGCONT)
    told = hang_report(agent)
    assert told[2].startswith(f"  rank 1 (pid {members[1].pid} on ")
    assert "it is stopped, by SIGSTOP or a debugger; SIGCONT lets it go on" in told[2]
    job.hub.gather(members[1:])
    members[1].tell(".")
    while "it goes on" not in agent.err:
        job.hub.step(members)
    job.hub.finish(members)
    assert agent.wait().code == 0


def test_a_program_that_is_not_python_has_no_stacks_and_that_is_said(job: Job) -> None:
    """It is found all the same."""
    fifo = job.bench.home / "fifo"
    os.mkfifo(fifo)
    agent = job.bench.start("--no-python", *REPORT, "cat", str(fifo))
    with fifo.open("wb", buffering=0) as pipe:
        until = time.monotonic() + RHYTHM_S
        while time.monotonic() < until:
            pipe.write(b"line\n" * 1000)  # waits until it is read
        agent.until_said("no action is taken")
    told = hang_report(agent)
    assert "not known: it is not a Python program prepared for stack dumps" in told[2]
    assert agent.wait().code == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_that_computes_in_silence_is_no_hang(job: Job, workers: int) -> None:
    """Nothing is read, written or said for many times as long as a hang takes, and it was never otherwise."""
    script = job.bench.script(
        """
        import time
        until = time.monotonic() + 2
        while time.monotonic() < until:
            sum(i * i for i in range(1000))
        """
    )
    done = job.bench.run(
        "--nproc-per-node", str(workers), "--on-hang", "restart", "--hang-after", "0.5", "--max-restarts", "1", script
    )
    assert done.code == 0
    assert "seems to hang" not in done.err


def test_a_phase_is_no_hang(job: Job) -> None:
    """Whoever says what it does may take its time for it."""
    script = job.bench.script(
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
    done = job.bench.run("--on-hang", "restart", "--hang-after", "0.5", "--max-restarts", "1", script)
    assert done.code == 0
    assert "seems to hang" not in done.err


def test_nobody_looks_unless_asked_to(job: Job) -> None:
    """Off is off: a job that stands still for long is not even looked at, and nothing is said of it."""
    (agent,) = job.start("--hang-after", "0.2")
    members = job.hub.meet(2)
    job.hub.steps_for(1.0, members)
    job.hub.step(members, {1: "p"})
    assert job.hub.is_silent_for(2.0, members[1])
    members[1].tell(".")
    job.hub.finish(members)
    assert agent.wait().code == 0
    assert not [line for line in lines_of(agent) if "hang" in line]
