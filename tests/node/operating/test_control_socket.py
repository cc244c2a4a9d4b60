"""Doors: one for each agent, never taken from a living one, and a note that outlives the run."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tenax._core.requests import AgentRequest, AnyRequest, StatusRequest, answer_safely
from tenax._engines.tcp.operator import Declined, connect_to_agent
from tenax._io.loop import Loop
from tenax._node.control_socket import ControlSocket, last_runs, socket_paths


@pytest.fixture
def folder() -> Iterator[str]:
    """Where the doors of this very process are; short, as the path of a socket must be."""
    made, before = tempfile.mkdtemp(prefix="doors-", dir="/tmp"), os.environ.get("TENAX_PRIVATE_DIR")
    os.environ["TENAX_PRIVATE_DIR"] = made
    yield made
    shutil.rmtree(made)
    os.environ.pop("TENAX_PRIVATE_DIR") if before is None else os.environ.update(TENAX_PRIVATE_DIR=before)


answered: list[AnyRequest] = []


def answer(request: AnyRequest, reply: Callable[[Any, str], None]) -> None:
    answered.append(request)
    reply({"run_id": "mine", "pid": os.getpid(), "log_dir": "logs"}, "")


def test_a_door_is_never_taken_from_somebody_who_lives(folder: str) -> None:
    said: list[str] = []
    loop, doors = Loop(), [ControlSocket(answer, said.append) for _ in range(2)]
    for door in doors:
        door.open(loop)
    first, second = doors
    assert first.path == f"{folder}/{os.getpid()}.sock"
    assert second.path.startswith(f"{folder}/{os.getpid()}-")
    assert sorted(socket_paths()) == sorted((first.path, second.path))
    limit = loop.now() + 30.0
    for door in doors:
        line = connect_to_agent(door.path)
        number = line.send(AgentRequest())
        answered.clear()
        loop.next_event(lambda: 0.0 if answered else limit)
        assert b"mine" in bytes(line.answer(number, 30.0))
        line.close()
    for door in doors:
        door.close()
    loop.close()
    assert socket_paths() == []
    assert [(run.run_id, run.log_dir) for run in last_runs()] == [("mine", "logs")] * 2
    assert said == []


def test_of_one_that_was_killed_the_door_is_taken_over_and_old_notes_go(folder: str) -> None:
    for number in range(100):
        Path(folder, f"{number}.json").write_text('{"run_id": "old", "pid": 1}')
        os.utime(Path(folder, f"{number}.json"), (number, number))
    Path(folder, f"{os.getpid()}.sock").touch()
    loop, door = Loop(), ControlSocket(answer, lambda _: None)
    door.open(loop)
    connect_to_agent(door.path).close()
    door.close()
    loop.close()
    runs = last_runs()
    assert len(runs) == 64
    assert (runs[0].run_id, runs[1].run_id) == ("mine", "old")


WITHOUT_DESCRIPTORS = """
import os, resource, sys
from tenax._io.loop import Loop
from tenax._node.control_socket import ControlSocket

class Counted(ControlSocket):
    turns = 0
    def on_readable(self):
        self.turns += 1
        super().on_readable()

def answer(request, reply):
    reply({"run_id": "mine", "pid": os.getpid(), "log_dir": ""}, "")

loop, door = Loop(), Counted(answer, print)
door.open(loop)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
lowest = os.dup(0)
os.close(lowest)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
print(door.path, flush=True)
sys.stdin.readline()  # somebody has knocked
until = loop.now() + 0.5
loop.next_event(lambda: until)
print(door.turns, flush=True)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
until = loop.now() + 60.0
loop.at(until, lambda: os._exit(1))
loop.next_event(lambda: until)
"""


def test_an_agent_without_descriptors_does_not_spin_at_its_door(folder: str) -> None:
    """Who knocks is let in when there is room again."""
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        line = connect_to_agent(agent.stdout.readline().strip())
        number = line.send(AgentRequest())
        agent.stdin.write("knocked\n")
        agent.stdin.flush()
        assert agent.stdout.readline() == "1\n", "it looks once, and pauses"
        assert b"mine" in bytes(line.answer(number, 30.0))
        line.close()
        agent.kill()


def test_a_folder_that_cannot_be_used_costs_the_door_only(folder: str) -> None:
    said: list[str] = []
    os.environ["TENAX_PRIVATE_DIR"] = f"{folder}/not/there"
    loop, door = Loop(), ControlSocket(answer, said.append)
    door.open(loop)
    door.close()
    loop.close()
    assert len(said) == 1
    assert said[0].startswith("could not open the control socket: ")


def until_readable(loop: Loop, line: Any) -> None:
    """Serve the loop until somebody has answered."""
    limit = loop.now() + 30.0

    def is_answered() -> bool:
        return bool(select.select([line._sock], [], [], 0)[0])

    loop.next_event(lambda: 0.0 if is_answered() else limit)
    assert is_answered()


def test_an_answer_that_breaks_is_an_answer_and_not_the_end_of_the_loop(folder: str) -> None:
    def broken(request: AnyRequest, reply: Callable[[Any, str], None]) -> None:
        if not isinstance(request, AgentRequest):
            raise RuntimeError("a bug")
        reply({"run_id": "mine", "pid": os.getpid()}, "")

    said: list[str] = []
    loop, door = Loop(), ControlSocket(broken, said.append)
    door.open(loop)
    line = connect_to_agent(door.path)
    asked = [line.send(StatusRequest()), line.send(AgentRequest())]
    until_readable(loop, line)
    with pytest.raises(Declined, match="this cannot be answered: RuntimeError: a bug"):
        line.answer(asked[0], 30.0)
    assert b"mine" in bytes(line.answer(asked[1], 30.0))
    line.close()
    door.close()
    loop.close()


def test_what_breaks_after_the_answer_is_not_answered_again() -> None:
    """A request that was understood and begun: then it is the run that is broken, and that is not hidden."""
    heard: list[tuple[Any, str]] = []

    def breaks_later(_: object, reply: Callable[[Any, str], None]) -> None:
        reply("begun", "")
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        answer_safely(breaks_later, None, lambda value, error: heard.append((value, error)))
    assert heard == [("begun", "")]
