"""An agent that does not respond has not exited: commands report it and what to do."""

from __future__ import annotations

import signal
from pathlib import Path

from kit.cluster import Agent
from kit.jobs import TENAX, Done, until

from .kit import Operator


def stop(agent: Agent) -> str:
    """Stop it as Ctrl-Z does, and return the expected message."""
    agent.send(signal.SIGSTOP)
    stat = Path(f"/proc/{agent.process.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the agent to stop")
    pid = agent.process.pid
    why = f"it is stopped (Ctrl-Z, SIGSTOP or a debugger); to continue it: kill -CONT {pid}"
    return f"(pid {pid}) does not respond: {why}\n"


def at_once(operator: Operator, *commands: tuple[str, ...]) -> list[Done]:
    """Run the commands in parallel, since each waits for an answer."""
    return [running.wait() for running in [operator.runner.start(*words, program=TENAX, env={}) for words in commands]]


def test_every_command_names_a_stopped_agent(operator: Operator) -> None:
    (agent,) = operator.cluster.start(nodes=(1, 1), run_id="stuck", backend="local")
    workers = operator.cluster.hub.generation(1)
    operator.until_found(agent)
    problem = stop(agent)
    commands = [
        ("status",),
        ("status", "stuck"),
        ("status", str(agent.process.pid)),
        ("logs", "stuck"),
        ("stop", "--yes"),
        ("restart", "stuck", "--yes"),
        ("drain", "0", "stuck", "--yes"),
    ]
    for words, done in zip(commands, at_once(operator, *commands), strict=True):
        assert (done.code, done.out) == (1, ""), words
        assert done.err == f"tenax {words[0]}: the agent of the run 'stuck' {problem}"
    agent.send(signal.SIGCONT)
    assert operator.tenax("status").code == 0
    operator.cluster.finish(workers)


def test_ps_names_the_run_of_a_silent_agent(operator: Operator) -> None:
    (agent,) = operator.cluster.start(nodes=(1, 1), run_id="stuck", backend="local")
    workers = operator.cluster.hub.generation(1)
    operator.until_found(agent)
    problem = stop(agent)
    listed, as_json = at_once(operator, ("ps",), ("ps", "--json"))
    assert (listed.code, as_json.code) == (0, 0)
    _, row = listed.out.splitlines()
    assert row.split()[:6] == ["stuck", "worker_main.py", "silent", "?", "?", "?"]
    assert str(agent.process.pid) in row.split()
    assert listed.err == f"tenax ps: the agent of the run 'stuck' {problem}"
    assert problem.strip() in as_json.out
    agent.send(signal.SIGCONT)
    operator.cluster.finish(workers)


def test_a_silent_agent_counts_when_the_run_must_be_named(operator: Operator) -> None:
    for run_id in ("well", "stuck"):
        operator.until_found(*operator.cluster.start(nodes=(1, 1), run_id=run_id, backend="local"))
    workers = operator.cluster.hub.all(2)
    stuck = operator.cluster.agents[1]
    stop(stuck)
    any_run, well, no_run = at_once(operator, ("stop", "--yes"), ("status", "well"), ("status", "other"))
    silent = f"'stuck' (agent {stuck.process.pid} does not respond)"
    assert any_run.code == 1
    assert f"2 runs on this host; give the id of one: 'well', {silent}" in any_run.err
    assert well.code == 0
    assert f"no run 'other' on this host (your runs: 'well', {silent}); " in no_run.err
    stuck.send(signal.SIGCONT)
    operator.cluster.finish(workers)


def test_another_agent_of_the_run_on_this_host_answers(operator: Operator) -> None:
    serving, other = operator.cluster.start_in_order(2, conf={"keep_alive_interval": 30})
    operator.until_found(serving, other)
    workers = operator.cluster.hub.generation(2)
    stop(other)
    shown, listed = operator.tenax("status", "run"), operator.json("ps")
    # By phase: either agent may have opened its control socket first.
    run, silent = sorted(listed, key=lambda each: each["phase"])
    assert shown.code == 0, shown
    assert (run["pids"], run["phase"]) == ([serving.process.pid], "running")
    assert (silent["run_id"], silent["pids"], silent["phase"]) == ("run", [other.process.pid], "silent")
    other.send(signal.SIGCONT)
    problem = stop(serving)  # it hosts the coordinator, so no other agent can answer
    done = operator.tenax("status")
    assert (done.code, done.err) == (1, f"tenax status: the agent of the run 'run' {problem}")
    serving.send(signal.SIGCONT)
    operator.cluster.finish(workers)
