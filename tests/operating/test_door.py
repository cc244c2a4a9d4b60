"""Doors: one for each agent, never taken from a living one, and a note that outlives the run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tenax.core.requests import AgentWanted, AnyRequest
from tenax.loop import Loop
from tenax.rendezvous.tcp.operator import at_door
from tenax.runtime.door import Door, doors_of, last_runs


@pytest.fixture
def folder() -> Iterator[str]:
    """Where the doors of this very process are; short, as the path of a socket must be."""
    made, before = tempfile.mkdtemp(prefix="doors-", dir="/tmp"), os.environ.get("TENAX_DOORS")
    os.environ["TENAX_DOORS"] = made
    yield made
    shutil.rmtree(made)
    os.environ.pop("TENAX_DOORS") if before is None else os.environ.update(TENAX_DOORS=before)


answered: list[AnyRequest] = []


def answer(request: AnyRequest, reply: Callable[[Any, str], None]) -> None:
    answered.append(request)
    reply({"run_id": "mine", "pid": os.getpid(), "log_dir": "logs"}, "")


def test_a_door_is_never_taken_from_somebody_who_lives(folder: str) -> None:
    said: list[str] = []
    loop, doors = Loop(), [Door(answer, said.append) for _ in range(2)]
    for door in doors:
        door.open(loop)
    first, second = doors
    assert first.path == f"{folder}/{os.getpid()}.sock"
    assert second.path.startswith(f"{folder}/{os.getpid()}-")
    assert sorted(doors_of()) == sorted((first.path, second.path))
    limit = loop.now() + 30.0
    for door in doors:
        line = at_door(door.path)
        number = line.send(AgentWanted())
        answered.clear()
        loop.next_event(lambda: 0.0 if answered else limit)
        assert b"mine" in bytes(line.answer(number, 30.0))
        line.close()
    for door in doors:
        door.close()
    loop.close()
    assert doors_of() == []
    assert [(run.run_id, run.log_dir) for run in last_runs()] == [("mine", "logs")] * 2
    assert said == []


def test_of_one_that_was_killed_the_door_is_taken_over_and_old_notes_go(folder: str) -> None:
    for number in range(100):
        Path(folder, f"{number}.json").write_text('{"run_id": "old", "pid": 1}')
        os.utime(Path(folder, f"{number}.json"), (number, number))
    Path(folder, f"{os.getpid()}.sock").touch()
    loop, door = Loop(), Door(answer, lambda _: None)
    door.open(loop)
    at_door(door.path).close()
    door.close()
    loop.close()
    runs = last_runs()
    assert len(runs) == 64
    assert (runs[0].run_id, runs[1].run_id) == ("mine", "old")


def test_a_folder_that_cannot_be_used_costs_the_door_only(folder: str) -> None:
    said: list[str] = []
    os.environ["TENAX_DOORS"] = f"{folder}/not/there"
    loop, door = Loop(), Door(answer, said.append)
    door.open(loop)
    door.close()
    loop.close()
    assert len(said) == 1
    assert said[0].startswith("'tenax status' will not find this run by its id: ")
