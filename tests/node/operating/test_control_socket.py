"""Control sockets: one per agent, never taken from a live agent, with a note that outlives the run."""

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
from tenax._node.control_socket import ControlSocket, socket_paths
from tenax._node.run_notes import last_runs, write_note


@pytest.fixture
def folder() -> Iterator[str]:
    """The folder for control sockets of this process; its path is short, as socket paths must be."""
    made, before = tempfile.mkdtemp(prefix="sockets-", dir="/tmp"), os.environ.get("TENAX_PRIVATE_DIR")
    os.environ["TENAX_PRIVATE_DIR"] = made
    yield made
    shutil.rmtree(made)
    os.environ.pop("TENAX_PRIVATE_DIR") if before is None else os.environ.update(TENAX_PRIVATE_DIR=before)


answered: list[AnyRequest] = []


def answer(request: AnyRequest, reply: Callable[[Any, str], None]) -> None:
    answered.append(request)
    reply({"run_id": "mine", "pid": os.getpid(), "log_dir": "logs"}, "")


def note(socket_path: str) -> None:
    write_note({"run_id": "mine", "pid": os.getpid(), "log_dir": "logs"}, socket_path)


def test_a_control_socket_is_never_taken_from_a_live_agent(folder: str) -> None:
    warnings: list[str] = []
    loop, sockets = Loop(), [ControlSocket(answer, warnings.append, note) for _ in range(2)]
    for control_socket in sockets:
        control_socket.open(loop)
    first, second = sockets
    assert first.path == f"{folder}/{os.getpid()}.sock"
    assert second.path.startswith(f"{folder}/{os.getpid()}-")
    assert sorted(socket_paths()) == sorted((first.path, second.path))
    limit = loop.now() + 30.0
    for control_socket in sockets:
        line = connect_to_agent(control_socket.path)
        number = line.send(AgentRequest())
        answered.clear()
        loop.next_event(lambda: 0.0 if answered else limit)
        assert b"mine" in bytes(line.answer(number, 30.0))
        line.close()
    for control_socket in sockets:
        control_socket.close()
    loop.close()
    assert socket_paths() == []
    assert [(run.run_id, run.log_dir) for run in last_runs()] == [("mine", "logs")] * 2
    assert warnings == []


def test_the_socket_of_a_killed_agent_is_replaced_and_old_notes_are_removed(folder: str) -> None:
    for number in range(150):
        Path(folder, f"{number}.json").write_text('{"run_id": "old", "pid": 1}')
        os.utime(Path(folder, f"{number}.json"), (number, number))
    Path(folder, f"{os.getpid()}.sock").touch()
    loop, control_socket = Loop(), ControlSocket(answer, lambda _: None, note)
    control_socket.open(loop)
    connect_to_agent(control_socket.path).close()
    control_socket.close()
    loop.close()
    runs = last_runs()
    assert len(runs) == 100
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

loop, control_socket = Loop(), Counted(answer, print)
control_socket.open(loop)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
lowest = os.dup(0)
os.close(lowest)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
print(control_socket.path, flush=True)
sys.stdin.readline()  # a client has connected
until = loop.now() + 0.5
loop.next_event(lambda: until)
print(control_socket.turns, flush=True)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
until = loop.now() + 60.0
loop.at(until, lambda: os._exit(1))
loop.next_event(lambda: until)
"""


def test_an_agent_without_free_descriptors_pauses_accepting(folder: str) -> None:
    """The waiting client is accepted when a descriptor is free again."""
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        line = connect_to_agent(agent.stdout.readline().strip())
        number = line.send(AgentRequest())
        agent.stdin.write("connected\n")
        agent.stdin.flush()
        assert agent.stdout.readline() == "1\n", "it tries once and pauses"
        assert b"mine" in bytes(line.answer(number, 30.0))
        line.close()
        agent.kill()


def test_an_unusable_folder_costs_only_the_control_socket(folder: str) -> None:
    warnings: list[str] = []
    os.environ["TENAX_PRIVATE_DIR"] = f"{folder}/not/there"
    loop, control_socket = Loop(), ControlSocket(answer, warnings.append)
    control_socket.open(loop)
    control_socket.close()
    loop.close()
    assert len(warnings) == 1
    assert warnings[0].startswith("could not open the control socket: ")


def until_readable(loop: Loop, line: Any) -> None:
    """Run the loop until an answer has arrived."""
    limit = loop.now() + 30.0

    def is_answered() -> bool:
        return bool(select.select([line._sock], [], [], 0)[0])

    loop.next_event(lambda: 0.0 if is_answered() else limit)
    assert is_answered()


def test_an_exception_while_answering_becomes_an_error_answer(folder: str) -> None:
    def broken(request: AnyRequest, reply: Callable[[Any, str], None]) -> None:
        if not isinstance(request, AgentRequest):
            raise RuntimeError("a bug")
        reply({"run_id": "mine", "pid": os.getpid()}, "")

    warnings: list[str] = []
    loop, control_socket = Loop(), ControlSocket(broken, warnings.append)
    control_socket.open(loop)
    line = connect_to_agent(control_socket.path)
    asked = [line.send(StatusRequest()), line.send(AgentRequest())]
    until_readable(loop, line)
    with pytest.raises(Declined, match="could not answer the request: RuntimeError: a bug"):
        line.answer(asked[0], 30.0)
    assert b"mine" in bytes(line.answer(asked[1], 30.0))
    line.close()
    control_socket.close()
    loop.close()


def test_an_exception_after_the_answer_is_raised() -> None:
    """The request was already executed, so the exception is a bug of the run and is not hidden."""
    answers: list[tuple[Any, str]] = []

    def breaks_later(_: object, reply: Callable[[Any, str], None]) -> None:
        reply("begun", "")
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        answer_safely(breaks_later, None, lambda value, error: answers.append((value, error)))
    assert answers == [("begun", "")]
