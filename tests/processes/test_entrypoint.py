"""Entrypoints: how a command or function becomes a launch, and which descriptors are open meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kit.processes import descriptors, leaving_nothing, on_linux
from tenax._node.workers import make_entrypoint
from tenax._processes.entrypoint import CommandEntrypoint, FunctionEntrypoint
from tenax._processes.function_worker import ResultUnreadable, anonymous_file, read_result

pytestmark = on_linux


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    with leaving_nothing():
        yield


def double(number: int) -> int:
    return 2 * number


def test_a_string_is_a_command() -> None:
    """``${local_rank}`` is replaced in its arguments, and nothing else."""
    args = ("--rank=${local_rank}", "${HOME}", "$$", "${rank}", 3, 1.5, None)
    entrypoint = make_entrypoint("./train", {0: args, 1: args}, "spawn", "train")
    assert isinstance(entrypoint, CommandEntrypoint)
    launch = entrypoint.launch(1, {"A": "b"})
    assert launch.argv == ["./train", "--rank=1", "${HOME}", "$$", "${rank}", "3", "1.5", "None"]
    assert (launch.env, launch.descriptors, launch.cwd) == ({"A": "b"}, {}, "")


def test_a_callable_is_a_function_entrypoint() -> None:
    """It has a name, and its exceptions are recorded."""
    entrypoint = make_entrypoint(double, {0: (1,)}, "fork", "ignored")
    assert isinstance(entrypoint, FunctionEntrypoint)
    assert entrypoint.name == "double"


def test_a_successful_command_returns_none() -> None:
    """Failed ones have no return value; a new start removes the old value."""
    entrypoint = CommandEntrypoint({0: ["a"], 1: ["a"], 2: ["a"]}, "a")
    for rank, code in ((2, 0), (1, 3), (0, 0)):
        entrypoint.launch(rank, {})
        assert entrypoint.collect(rank, code) == ""
    assert entrypoint.return_values() == {0: None, 2: None}
    entrypoint.launch(2, {})
    assert entrypoint.return_values() == {0: None}


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_descriptors_are_closed_when_no_longer_needed(method: str) -> None:
    """The payload until the worker was started, the result until it was read, both ends of one barrier for all workers
    of a generation; a restart or the end closes the rest."""
    before = len(descriptors())
    entrypoint = FunctionEntrypoint(double, {0: (1,), 1: (2,)}, wrap=double, start_method=method)
    for rank in (0, 1):
        entrypoint.launch(rank, {})
    payloads, results, barrier = 0 if method == "fork" else 2, 2, 2
    assert len(descriptors()) == before + payloads + results + barrier
    entrypoint.release(0)
    entrypoint.release(1)
    assert len(descriptors()) == before + results + barrier
    assert entrypoint.collect(0, 0) == ""
    assert len(descriptors()) == before + 1 + barrier
    entrypoint.launch(1, {})  # again: the first worker with this rank never came to anything
    entrypoint.release(1)
    assert len(descriptors()) == before + 1 + barrier, "the barrier of the first generation is closed"
    assert entrypoint.collect(1, -9) == ""
    assert entrypoint.return_values() == {0: None}
    entrypoint.launch(0, {})
    assert entrypoint.return_values() == {}, "the value of an earlier generation is forgotten"
    entrypoint.close()
    entrypoint.close()
    assert len(descriptors()) == before


def test_an_incomplete_result_is_distinguished_from_none() -> None:
    """An empty file is None; too short, too long or invalid content is unreadable."""
    for content, is_readable in [
        (b"", True),
        (b"\x04", False),
        (b"\x09\0\0\0\0\0\0\0abc", False),
        (b"\x02\0\0\0\0\0\0\0N.", True),
        (b"\x02\0\0\0\0\0\0\0N.N.", False),
        (b"\x03\0\0\0\0\0\0\0no!", False),
    ]:
        file = anonymous_file("test")
        os.write(file, content)
        if is_readable:
            assert read_result(file) is None
        else:
            with pytest.raises(ResultUnreadable):
                read_result(file)
        os.close(file)
