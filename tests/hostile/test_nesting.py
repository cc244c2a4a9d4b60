"""JSON that is nested too deeply is an error of its line, file or connection, never a traceback."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import tenax
from kit.jobs import TIMEOUT_S
from tenax._core.bounds import DECODE_ERRORS
from tenax._core.etcd.errors import EtcdRejected
from tenax._core.etcd.operations import KeyValue
from tenax._core.events import AnyEvent
from tenax._core.leadership.keys import read_leader
from tenax._core.link import wire
from tenax._core.watchdog import MAX_LINE, RequestLines
from tenax._engines.tcp.marker import Marker
from tenax._failures import error_file
from tenax._failures.error_handler import ErrorHandler
from tenax._failures.report import wall_clock_of
from tenax._io.etcd.data_directory import last_messages
from tenax._node.run_notes import note_for
from view.test_history import agent_of_two_generations, run_of_two_nodes

DEPTH = 100_000
DEEP = b"[" * DEPTH + b"]" * DEPTH


def test_msgspec_reports_deep_nesting_as_one_of_the_decode_errors() -> None:
    """Also in an unknown field, which is skipped."""
    for body in (DEEP, b'{"event":"Tick","unknown":' + DEEP + b"}"):
        with pytest.raises(DECODE_ERRORS):
            msgspec.json.decode(body, type=AnyEvent)


def test_every_decoder_catches_all_decode_errors() -> None:
    """No module catches msgspec's error alone: others would end the process."""
    source = Path(tenax.__file__).parent
    found = []
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                names = {each.attr for each in ast.walk(node.type) if isinstance(each, ast.Attribute)}
                if "DecodeError" in names:
                    found.append(f"{path.relative_to(source)}:{node.lineno}")
    assert [each for each in found if not each.startswith("etcd/gateway")] == []


def test_a_nested_line_in_the_watchdog_pipe_is_ignored_alone() -> None:
    """A worker must not be able to end the agent, which reads the pipe."""
    lines = RequestLines()
    deep = b'{"version": 1, "x": ' + b"[" * (MAX_LINE - 100)
    good = b'{"version": 1, "pid": 7, "scope_id": "step", "expiration_time": 1.0, "signal": 9}'
    assert [request.pid for request in lines.feed(deep + b"\n" + good + b"\n")] == [7]
    assert lines.malformed == 1


@pytest.mark.process
@pytest.mark.parametrize("name", ["journal.jsonl", "coordinator.jsonl"])
@pytest.mark.parametrize("command", ["replay", "report", "timeline"])
@pytest.mark.parametrize("where", ["header", "step"])
def test_a_nested_journal_is_rejected_with_a_message(name: str, command: str, where: str, tmp_path: Path) -> None:
    """The message names the file; the exit code is that of an unreadable journal."""
    folder = tmp_path / "logs"
    run_of_two_nodes(folder).close()
    agent_of_two_generations(folder).close(60.0)
    path = folder / name
    lines = path.read_bytes().split(b"\n")
    number = 0 if where == "header" else 2
    lines[number] = lines[number][:-1] + b',"unknown":' + DEEP + b"}"
    path.write_bytes(b"\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-m", "tenax", command, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert name in done.stderr
    assert done.returncode in (1, 2)


def test_a_nested_error_file_is_reported_as_damaged(tmp_path: Path) -> None:
    """What follows the nesting is still found."""
    path = tmp_path / "error.json"
    path.write_bytes(b'{"x":' + DEEP + b',"message":{"message":"boom","extraInfo":{"py_callstack":"here"}}}')
    found = error_file.read(str(path))
    assert found.message == "boom"
    assert "not JSON" in found.problem


@pytest.mark.parametrize("depth", [10, 200, 900, 990, 5000])
def test_an_error_file_of_any_depth_is_forwarded_or_reported(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that can be read but not encoded again does not end the process."""
    path, own = tmp_path / "error.json", tmp_path / "own.json"
    path.write_bytes(b'{"message":{"message":"boom","x":' + b"[" * depth + b"]" * depth + b"}}")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own))
    ErrorHandler().dump_error_file(str(path), 3)
    assert "boom" in own.read_text()


def test_nested_frames_notes_markers_and_keys_are_rejected(tmp_path: Path) -> None:
    """Frames close their connection; unreadable files count as missing."""
    with pytest.raises(wire.WireError):
        wire.decode_from_agent(b'{"frame":"Beat","number":1,"x":' + DEEP + b"}")
    with pytest.raises(wire.WireError):
        wire.decode_from_server(b'{"frame":"BeatAnswer","number":1,"x":' + DEEP + b"}")
    (tmp_path / "7.json").write_bytes(b'{"run_id":"r","pid":7,"x":' + DEEP[: 60 << 10] + b"}")
    assert note_for(str(tmp_path / "7.sock")) is None
    marker = Marker("run", "host:1", str(tmp_path))
    with open(marker._path, "wb") as file:
        file.write(b'{"generation":1,"x":' + DEEP + b"}")
    assert marker.read() is None
    with pytest.raises(EtcdRejected, match="cannot read the key"):
        read_leader(KeyValue(b"/leader", b'{"x":' + DEEP + b"}", 1, 1, 1, 0))
    (tmp_path / "journal.jsonl").write_bytes(DEEP + b"\n")
    assert wall_clock_of(str(tmp_path / "journal.jsonl")).offset_s
    assert last_messages('{"msg":"gone"}\n{"x":' + DEEP.decode() + "}") == "gone"
