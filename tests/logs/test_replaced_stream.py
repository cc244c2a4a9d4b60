"""A replaced sys.stdout: the object gets the teed lines, whole and in order; if it raises, the run is not affected."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from pathlib import Path

import pytest

from kit.processes import TIMEOUT_S, leaving_nothing, on_linux, until
from tenax._logs.replaced_stream import ReplacedStream
from tenax.launcher import LaunchConfig, elastic_launch
from tenax.multiprocessing import DefaultLogsSpecs, RunProcsResult, Std, start_processes

pytestmark = [on_linux, pytest.mark.process]


class Broken(io.StringIO):
    """Accepts one write."""

    def write(self, text: str) -> int:
        if self.getvalue():
            raise ValueError("I/O operation on closed file")
        return super().write(text)


def write(stream: io.StringIO, *chunks: bytes) -> None:
    replaced = ReplacedStream(stream)
    for chunk in chunks:
        with contextlib.suppress(BrokenPipeError):
            os.write(replaced.descriptor, chunk)
        if isinstance(stream, Broken):
            until(stream.getvalue, "the first write")
    replaced.close(TIMEOUT_S)


def test_lines_arrive_whole_including_an_unfinished_last_one() -> None:
    """Characters are never divided, and invalid UTF-8 is replaced."""
    stream = io.StringIO()
    write(stream, b"one\ntw", "o ü".encode()[:-1], "ü".encode()[-1:] + b"\n\xff", b"last")
    assert stream.getvalue() == "one\ntwo ü\n\ufffdlast"


def test_an_object_that_raises_gets_no_more_writes(capfd: pytest.CaptureFixture[str]) -> None:
    """Later writes fail with a broken pipe, as with a closed reader."""
    stream = Broken()
    write(stream, b"one\n", b"two\n", b"three\n")
    assert stream.getvalue() == "one\n"
    assert (
        "could not write to the Broken that replaces sys.stdout or sys.stderr: I/O operation" in capfd.readouterr().err
    )


def run(folder: Path, script: str, tee: Std) -> RunProcsResult:
    specs = DefaultLogsSpecs(str(folder), tee=tee)
    arguments = ("-c", script)
    with leaving_nothing():
        context = start_processes("test", sys.executable, {0: arguments, 1: arguments}, {0: {}, 1: {}}, specs)
        result = context.wait(TIMEOUT_S)
        context.close()
    assert result is not None
    return result


def test_many_lines_of_several_workers_are_not_mixed(tmp_path: Path) -> None:
    """Each line of each worker arrives once, in that worker's order, also if both streams are one object."""
    shown = io.StringIO()
    script = "import sys\nfor n in range(2000): print('o', n); print('e', n, file=sys.stderr)"
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        assert not run(tmp_path, script, Std.ALL).failures
    lines = shown.getvalue().splitlines()
    for rank in range(2):
        for stream in "oe":
            start = f"[test{rank}]:{stream} "
            assert [line for line in lines if line.startswith(start)] == [f"{start}{n}" for n in range(2000)]


def test_an_object_that_raises_fails_no_worker(tmp_path: Path) -> None:
    """The run succeeds, and the files have all lines."""
    with contextlib.redirect_stdout(Broken()):
        result = run(tmp_path, "for n in range(500): print(n, flush=True)", Std.OUT)
    assert not result.failures
    assert all(Path(path).read_text().split() == [*map(str, range(500))] for path in result.stdouts.values())


def test_output_that_is_not_teed_goes_to_the_descriptor(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As under torch: this program writes only teed lines."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert not run(tmp_path, "print('direct')", Std.NONE).failures
    assert shown.getvalue() == ""
    assert capfd.readouterr().out.split() == ["direct", "direct"]


def print_rank() -> None:
    print("rank", os.environ["RANK"])


def test_elastic_launch_uses_the_replaced_stream(tmp_path: Path) -> None:
    shown = io.StringIO()
    specs = DefaultLogsSpecs(str(tmp_path), tee=Std.ALL)
    with leaving_nothing(), contextlib.redirect_stdout(shown):
        elastic_launch(LaunchConfig(1, 1, 2, logs_specs=specs, max_restarts=0), print_rank)()
    assert sorted(shown.getvalue().splitlines()) == ["[default_role0]:rank 0", "[default_role1]:rank 1"]


def test_the_replaced_stream_survives_the_death_of_the_log_writer(tmp_path: Path) -> None:
    """The next log writer gets the same pipe."""
    shown = io.StringIO()
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), tee=Std.OUT)
    script = f"print('first', flush=True)\nopen({str(tmp_path / 'gate')!r}).read()\nprint('second')"
    os.mkfifo(tmp_path / "gate")
    with leaving_nothing(), contextlib.redirect_stdout(shown):
        context = start_processes("test", sys.executable, {0: ("-c", script)}, {0: {}}, specs)
        until(lambda: "first" in shown.getvalue(), "the first line")
        log_writer = context._logs._writer
        first = log_writer.pid
        os.kill(first, signal.SIGKILL)
        until(lambda: log_writer.pid != first, "another log writer")
        with open(tmp_path / "gate", "w"):
            pass
        assert context.wait(TIMEOUT_S) is not None
        context.close()
    assert shown.getvalue().splitlines() == ["[test0]:first", "[test0]:second"]
