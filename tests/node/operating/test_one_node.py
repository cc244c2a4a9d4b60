"""Operator commands for a run of one node: found by run id, by pid, or because it is the only run."""

from __future__ import annotations

import os
import signal
import socket

from .kit import Operator


def start(operator: Operator, run_id: str = "solo", workers: int = 2) -> None:
    (agent,) = operator.cluster.start(nodes=(1, 1), workers=workers, run_id=run_id, backend="local")
    operator.until_found(agent)


def test_the_only_run_needs_no_name(operator: Operator) -> None:
    start(operator)
    workers = operator.cluster.hub.generation(2)
    agent = operator.cluster.agents[0]
    operator.until_status(agent, lambda status: status.nodes[0].state == "working")
    done = operator.tenax("status")
    assert done.code == 0
    assert done.out.startswith("run solo: running for ")
    assert "generation 1 is running, 2 workers on 1 node" in done.out
    assert "0 of 3 used, 3 left" in done.out
    assert "ranks 0-1" in done.out
    for name in ("solo", str(agent.process.pid)):
        found = operator.json("status", name)
        assert found["run_id"] == "solo"
        assert found["nodes"][0]["pids"] == [worker.pid for worker in workers]
    operator.cluster.finish(workers)


def test_ps_lists_every_run_of_this_host(operator: Operator) -> None:
    start(operator, "one", 1)
    start(operator, "two", 2)
    workers = operator.cluster.hub.all(3)
    done = operator.tenax("ps")
    assert done.code == 0
    titles, *rows = done.out.splitlines()
    assert titles.split()[:3] == ["RUN", "SCRIPT", "PHASE"]
    assert [row.split()[:2] for row in rows] == [["one", "worker_main.py"], ["two", "worker_main.py"]]
    assert [(run["run_id"], run["workers"]) for run in operator.json("ps")] == [("one", 1), ("two", 2)]
    several = operator.tenax("status")
    assert several.code == 1
    assert "2 runs on this host; give the id of one: 'one', 'two'" in several.err
    assert operator.tenax("status", "two").out.startswith("run two: ")
    operator.cluster.finish(workers)


def test_two_runs_with_one_name_are_chosen_by_pid(operator: Operator) -> None:
    start(operator, "same", 1)
    start(operator, "same", 1)
    workers = operator.cluster.hub.all(2)
    pids = [agent.process.pid for agent in operator.cluster.agents]
    done = operator.tenax("stop", "same", "--yes")
    assert done.code == 1
    assert "2 runs on this host have the id 'same'; use the pid of an agent instead" in done.err
    assert all(str(pid) in done.err for pid in pids)
    assert operator.tenax("stop", str(pids[1]), "--yes", "--wait").code == 0
    assert operator.cluster.agents[1].wait() == 130
    operator.cluster.finish([worker for worker in workers if worker.agent == "node0"])


def test_an_operators_restart_is_uncharged_and_shows_its_reason(operator: Operator) -> None:
    start(operator)
    operator.cluster.hub.generation(2)
    agent = operator.cluster.agents[0]
    operator.until_status(agent, lambda status: status.nodes[0].state == "working")
    done = operator.tenax("restart", "--yes", "--why", "new data")
    assert done.code == 0
    assert done.out == "stopping generation 1; the next one follows\n"
    workers = operator.cluster.hub.generation(2, 2)
    status = operator.until_status(agent, lambda s: s.generation == 2 and s.nodes[0].state == "working")
    assert (status.restarts_used, status.requests) == (0, 1)
    assert status.generations[-1].why == "an operator restarted the run: new data"
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in workers} == {"0"}
    operator.cluster.finish(workers)
    assert operator.tenax("restart", "--yes").code == 1


def test_stop_waits_for_the_agent_and_the_run_is_reported_as_cancelled(operator: Operator) -> None:
    start(operator)
    operator.cluster.hub.generation(2)
    agent = operator.cluster.agents[0]
    done = operator.tenax("stop", "solo", "--yes", "--wait", "--why", "the rack is moved")
    assert done.code == 0
    assert done.out == "stopping the run on every node\n"
    assert not os.path.exists(f"/proc/{agent.process.pid}/fd/0"), "it has ended before stop has"
    assert agent.wait() == 130
    assert "the rack is moved" in agent.printed_report


def test_without_a_terminal_nothing_is_done_unless_yes_is_passed(operator: Operator) -> None:
    start(operator)
    workers = operator.cluster.hub.generation(2)
    for words in (("stop",), ("restart",), ("drain", "0")):
        done = operator.tenax(*words)
        assert done.code == 2
        assert "pass --yes" in done.err
    operator.cluster.finish(workers)


def test_on_a_terminal_the_command_asks_first(operator: Operator) -> None:
    start(operator)
    operator.cluster.hub.generation(2)
    agent = operator.cluster.agents[0]
    operator.until_status(agent, lambda status: status.nodes[0].state == "working")
    terminal = operator.terminal("stop")
    terminal.until("Continue? [y/N] ")
    assert "This stops the run 'solo': 2 workers on 1 node." in terminal.seen
    terminal.type(b"n\n")
    assert terminal.wait() == 1
    assert "nothing was changed" in terminal.seen
    assert agent.is_running
    terminal = operator.terminal("drain", "0")
    terminal.until("Continue? [y/N] ")
    assert "and stops its 2 workers; the run ends, because it has no other node" in terminal.seen
    terminal.type(b"\x03")
    assert terminal.wait() == 130
    assert terminal.seen.endswith("\n"), "what the shell prints next begins a line"
    terminal = operator.terminal("stop")
    terminal.until("Continue? [y/N] ")
    terminal.type(b"\x04")
    assert terminal.wait() == 1
    assert terminal.seen.endswith("Continue? [y/N] \r\ntenax: cancelled; nothing was changed\r\n")
    terminal = operator.terminal("stop", "--wait")
    terminal.until("Continue? [y/N] ")
    terminal.type(b"y\n")
    assert terminal.wait() == 0
    assert agent.wait() == 130


def test_an_ended_run_is_distinguished_from_an_unknown_one(operator: Operator) -> None:
    start(operator, "past")
    operator.cluster.finish(operator.cluster.hub.generation(2))
    stop = operator.tenax("stop", "past", "--yes")
    assert stop.code == 1
    assert "the run 'past' no longer runs on this host; to see how it ended: tenax status past" in stop.err
    never = operator.tenax("status", "never")
    assert never.code == 1
    assert "no run 'never' on this host (you have none here)" in never.err
    nothing = operator.tenax("stop", "--yes")
    assert nothing.code == 1
    assert "you have no run on this host" in nothing.err


def test_commands_without_a_run_show_the_last_one(operator: Operator) -> None:
    """The first run ends before its control socket would open."""
    assert operator.runner.start("--rdzv-id", "earlier", "--no-python", "true").wait().code == 0
    start(operator, "latest-7b")
    operator.cluster.finish(operator.cluster.hub.generation(2))
    for name in ((), ("late",), ("latest-7b",)):
        done = operator.tenax("status", *name)
        assert done.code == 0
        assert done.out.startswith("latest-7b: succeeded (all 2 workers succeeded)\n")
        assert operator.tenax("report", "--json", *name).out == operator.tenax("report", "--json", "latest-7b").out
        assert "run latest-7b of" in operator.tenax("replay", *name).out
    assert operator.json("status", "earlier")["outcome"] == "succeeded"
    assert [(run["run_id"], run["phase"]) for run in operator.json("ps", "--all")] == [
        ("earlier", "succeeded"),
        ("latest-7b", "succeeded"),
    ]
    assert operator.json("ps") == []
    assert "did you mean 'latest-7b'?" in operator.tenax("status", "lates-7b").err


def test_the_control_socket_of_a_killed_agent_is_removed(operator: Operator) -> None:
    start(operator)
    operator.cluster.hub.generation(2)
    agent = operator.cluster.agents[0]
    path = operator.control_socket(agent)
    operator.cluster.kill(agent)
    agent.wait()
    assert os.path.exists(path)
    done = operator.tenax("ps")
    assert (done.code, done.out) == (0, "")
    assert not os.path.exists(path)
    assert "no longer runs on this host" in operator.tenax("stop", "solo", "--yes").err
    assert operator.tenax("status", "solo").out.startswith("solo: no end known\n")


def test_a_stopped_agent_is_listed_and_does_not_delay_the_command(operator: Operator) -> None:
    start(operator, "well", 1)
    start(operator, "stuck", 1)
    workers = operator.cluster.hub.all(2)
    stuck = operator.cluster.agents[1]
    stuck.send(signal.SIGSTOP)
    well, silent = operator.json("ps")
    assert (well["run_id"], well["trouble"]) == ("well", "")
    assert silent["pids"] == [stuck.process.pid]
    assert silent["run_id"] == "stuck"
    stuck.send(signal.SIGCONT)
    operator.cluster.finish(workers)


def test_garbage_on_the_control_socket_closes_only_that_connection(operator: Operator) -> None:
    start(operator, workers=1)
    workers = operator.cluster.hub.generation(1)
    agent = operator.cluster.agents[0]
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\0\0\0\2{}", b"\0\0\0\0", b"\0\0"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30.0)
            sock.connect(operator.control_socket(agent))
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(100) == b""
    assert operator.tenax("status").code == 0
    operator.cluster.finish(workers)


def test_a_folder_that_other_users_can_enter_is_not_used(operator: Operator) -> None:
    os.chmod(operator.sockets, 0o755)
    (agent,) = operator.cluster.start(nodes=(1, 1), run_id="solo", backend="local")
    workers = operator.cluster.hub.generation(1)
    agent.until_printed("could not open the control socket: ")
    assert os.listdir(operator.sockets) == []
    done = operator.tenax("ps")
    assert done.code == 1
    assert "must be a folder that only this user can enter" in done.err
    operator.cluster.finish(workers)
