"""Parsers of untrusted bytes do linear work: each gets its worst inputs, in growing sizes.

HTTP and the etcd client have their own tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.linear import assert_linear, pieces
from tenax._core import hang_report
from tenax._core.diagnosis import missing_ranks
from tenax._core.link import wire
from tenax._core.model import Evidence
from tenax._core.text import decoded, harmless, one_line, storable
from tenax._core.watchdog import RequestLines
from tenax._failures import error_file, python_traceback
from tenax._failures.evidence import crash_line, gpu_error, last_lines
from tenax._io.endpoint import Endpoint
from tenax._logs.lines import LineCutter, lines_with, with_prefix
from tenax._node.journal import JournalUnreadable, read_journal
from tenax._node.worker_logs import read_progress
from tenax._view.cause import classify
from tenax._view.kinds import KINDS
from tenax.store._key_values import KeyValues, Limits
from tenax.store._protocol import Session
from tenax.store._wire import GREETING

BIG = 1 << 16


def repeated(*parts: str) -> Callable[[int], str]:
    """Return text of about a size: the first part once, the second repeated, the third at the end."""
    first, again, last = (*parts, "", "")[:3] if len(parts) > 1 else ("", parts[0], "")

    def make(size: int) -> str:
        return first + again * max(1, (size - len(first) - len(last)) // len(again)) + last

    return make


HEADER = "Traceback (most recent call last):\n"
CHAIN = (
    f'{HEADER}  File "x", line 1, in f\nE: e\n\nDuring handling of the above exception, another exception occurred:\n\n'
)
STDERR = {
    "nothing but line breaks": repeated("\n"),
    "one long line": repeated("x"),
    "spaces before the end": repeated("", " ", "x"),
    "headers": repeated(HEADER),
    "quoted headers": repeated(f"{HEADER}  File\nE:\n", HEADER),
    "one header, frames without end": repeated(HEADER, '  File "x", line 1, in f\n'),
    "a chain": repeated("", CHAIN, f"{HEADER}E: e\n"),
    "groups": repeated("  | + Exception Group " + HEADER),
    "syntax errors": repeated('  File "x", line 1\nSyntaxError: \n'),
    "file names": repeated('  File "', '", line 1', "x"),
    "dotted names": repeated("a.<locals>.", "b.<locals>.", "!"),
    "fatal errors": repeated("Fatal Python error: x\n"),
    "timeouts": repeated("Timeout (0:00:01", ")!", "x"),
    "terminations": repeated("terminate called after throwing an instance of '", "'", "x\n"),
    "ranks": repeated("[rank1]: "),
    "carriage returns": repeated("\r"),
    "colours": repeated("\x1b[31"),
    "invisible characters": repeated("\u200b\x07"),
}


@pytest.mark.parametrize("make", STDERR.values(), ids=STDERR)
def test_stderr_of_a_worker_is_examined_in_linear_time(make: Callable[[int], str]) -> None:
    """Last lines, tracebacks and crashes."""
    for code in (1, -6, -11):
        assert_linear(lambda text, code=code: python_traceback.find(text, code, cut=True), make, size=BIG)
    assert_linear(last_lines, make, size=BIG)
    assert_linear(hang_report.last_dump, make, size=BIG)
    assert_linear(hang_report.frames_in, make, size=BIG)


@pytest.mark.parametrize("make", STDERR.values(), ids=STDERR)
def test_text_is_escaped_in_linear_time(make: Callable[[int], str]) -> None:
    for work in (harmless, one_line, storable, lambda text: decoded(text.encode())):
        assert_linear(work, make, size=BIG)


def literal_beginning(pattern: str) -> str:
    """Return text at which the pattern starts to match."""
    return pattern.removeprefix("(?i:").split(".*")[0].replace("\\b", " ").replace("\\", "")[:40]


@pytest.mark.parametrize("id", [id for id, kind in KINDS.items() if any(".*" in each for each in kind.patterns)])
def test_causes_are_recognised_in_linear_time(id: str) -> None:
    """Patterns with a gap, on lines that start to match everywhere and match nowhere."""

    def work(text: str) -> object:
        return classify(1, Evidence(error_type="E", message="E: e", traceback=text))

    for pattern in KINDS[id].patterns:
        if ".*" in pattern:
            assert_linear(work, repeated("E: ", literal_beginning(pattern), "!"), size=1 << 14)


@pytest.mark.parametrize(
    "make",
    [
        repeated("Rank ", "1, ", "x"),
        repeated("Rank 1"),
        repeated("Rank ", "1", " failed to pass monitoredBarrier"),
        repeated("["),
        repeated("[", "1, ", "x"),
        repeated("[", "1", "] didn't join collective"),
    ],
)
def test_ranks_are_found_in_linear_time_and_numbers_are_bounded(make: Callable[[int], str]) -> None:
    """Also in the message of a peer, which may contain a number of any length."""
    assert_linear(lambda text: missing_ranks([text]), make, size=1 << 16)


@pytest.mark.parametrize(
    "make", [repeated("NVRM: Xid ("), repeated("NVRM: Xid (x): ", "1"), repeated("[1]: segfault ")]
)
def test_kernel_lines_are_read_in_linear_time(make: Callable[[int], str]) -> None:
    assert_linear(lambda text: gpu_error([text], 1, has_gpu_symptom=True), make, size=BIG)
    assert_linear(lambda text: crash_line([text], 1), make, size=BIG)


ERROR_FILES = {
    "nested": repeated("["),
    "messages": repeated('{"message":"'),
    "escapes": repeated('{"message":"', "\\u", ""),
    "backslashes": repeated('{"message":"', "\\\\", ""),
    "spaces": repeated('{"message"', " ", ""),
    "keys": repeated('"message" : '),
    "a long number": repeated('{"message":{"message":"m","extraInfo":{"timestamp":"', "1", '"}}}'),
    "a long integer": repeated('{"x":', "1", "}"),
    "a chain": repeated(
        '{"message":{"message":"","extraInfo":{"py_callstack":"', CHAIN.replace("\n", "\\n").replace('"', "'"), '"}}}'
    ),
}


@pytest.mark.parametrize("make", ERROR_FILES.values(), ids=ERROR_FILES)
def test_error_files_are_read_in_linear_time(make: Callable[[int], str], tmp_path: Path) -> None:
    """Complete, truncated or invalid."""

    def path(size: int) -> str:
        (tmp_path / str(size)).write_text(make(size))
        return str(tmp_path / str(size))

    def read(path: str) -> object:
        found = error_file.read(path)
        return python_traceback.find(found.traceback, 1)

    assert_linear(read, path, size=BIG)


JOURNALS = {
    "line breaks": repeated("\n"),
    "one line": repeated('{"line":"header"', " ", ""),
    "nested": repeated('{"line":"header","x":', "["),
    "empty objects": repeated("{}\n"),
    "steps": repeated('{"line":"step","at":1,"event":{"event":"Tick"}}\n'),
}


@pytest.mark.parametrize("make", JOURNALS.values(), ids=JOURNALS)
def test_journals_are_read_in_linear_time(make: Callable[[int], str], tmp_path: Path) -> None:
    """Up to the first invalid line."""

    def path(size: int) -> str:
        (tmp_path / str(size)).write_text(make(size))
        return str(tmp_path / str(size))

    def read(path: str) -> object:
        try:
            return read_journal(path)
        except JournalUnreadable as error:
            return error

    assert_linear(read, path, size=BIG)


def fed(reader: Callable[[], Any], length: int) -> Callable[[bytes], None]:
    """Feed a new reader piece by piece, and drop the result."""

    def work(data: bytes) -> None:
        feed = reader()
        for piece in pieces(data, length):
            for _ in feed(piece):
                pass

    return work


@pytest.mark.parametrize("length", [1, 100, 1 << 16])
@pytest.mark.parametrize(
    "make",
    [
        lambda size: (size - 4).to_bytes(4, "big") + b"x" * (size - 4),
        lambda size: b"\0\0\0\1x" * (size // 5),
        lambda size: b"\0\0\0\0" * (size // 4),
    ],
    ids=["one frame", "short frames", "empty frames"],
)
def test_frames_are_cut_in_linear_time(make: Callable[[int], bytes], length: int) -> None:
    """However the stream was divided."""
    assert_linear(fed(lambda: wire.FrameReader(wire.MAX_BYTES).feed, length), make, size=1 << 16)


@pytest.mark.parametrize("length", [1, 100, 1 << 16])
@pytest.mark.parametrize("text", [b"\n", b"x", b"{", b'{"version"', b'{"version": 1}\n', b"[" * 200 + b"\n"])
def test_the_watchdog_pipe_is_read_in_linear_time(text: bytes, length: int) -> None:
    """Lines without newlines, newlines without lines, incomplete requests."""
    assert_linear(fed(lambda: RequestLines().feed, length), lambda size: text * (size // len(text)), size=1 << 14)


@pytest.mark.parametrize("length", [1, 100, 1 << 16])
@pytest.mark.parametrize("text", [b"\n", b"x", b"\r", b"x\r\n"])
def test_lines_of_output_are_cut_in_linear_time(text: bytes, length: int) -> None:
    """With and without newlines, prefixes and filters."""

    def work(data: bytes) -> None:
        cutter = LineCutter()
        for piece in pieces(data, length):
            lines_with(with_prefix(cutter.cut(piece, at_returns=True), b"[0]:", at_returns=True), [b"needle"])

    assert_linear(work, lambda size: text * (size // len(text)), size=1 << 14)


@pytest.mark.parametrize("length", [1, 100, 1 << 16])
@pytest.mark.parametrize("kind", range(20))
def test_the_store_reads_requests_in_linear_time(kind: int, length: int) -> None:
    """Every command with a long list, a long value, and garbage after it."""

    def make(size: int) -> bytes:
        key = (1).to_bytes(8, "little") + b"k"
        value = (size // 2).to_bytes(8, "little") + b"v" * (size // 2)
        return GREETING + bytes([kind]) + key + value + (bytes([kind]) + key + key) * (size // 40)

    def work(data: bytes) -> None:
        session = Session(KeyValues(Limits()))
        for piece in pieces(data, length):
            session.receive(piece)

    assert_linear(work, make, size=1 << 14)


@pytest.mark.parametrize("text", ["[", ":", "a", "1", "[::", " ", "a:1,"])
def test_endpoints_are_parsed_in_linear_time(text: str) -> None:
    """Those of users, and of keys in etcd."""

    def work(text: str) -> object:
        try:
            return Endpoint.parse(text)
        except ValueError as error:
            return error

    assert_linear(work, repeated(text), size=1 << 14)


def test_progress_is_read_in_constant_time(tmp_path: Path) -> None:
    """However long the file is."""
    path = tmp_path / "progress"
    path.write_bytes(os.urandom(1 << 20))
    assert read_progress(str(path), 0) is None
