"""ProcessFailure and ChildFailedError: TorchElastic's classes, robust against any content."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tenax._core.model import Evidence, Failure
from tenax._failures import error_file
from tenax._failures.process_failure import ChildFailedError, ProcessFailure

from .test_error_file import NOW, almost_valid


def written(path: Path, message: str = "ValueError: boom", at: float = NOW) -> str:
    error_file.write(str(path), error_file.content(message, f"Traceback of\n{message}\n", at))
    return str(path)


def test_the_error_file_is_read_by_the_constructor(tmp_path: Path) -> None:
    """The derived fields have TorchElastic's types."""
    failure = ProcessFailure(local_rank=1, pid=99, exitcode=1, error_file=written(tmp_path / "e"))
    assert failure.error_file_data == json.loads((tmp_path / "e").read_text())
    assert failure.message == failure.error_file_data["message"]
    assert failure.timestamp == int(NOW)
    assert type(failure.timestamp) is int
    assert failure.timestamp_isoformat() == time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(NOW))


def test_it_is_a_real_dataclass(tmp_path: Path) -> None:
    """replace, asdict and fields work."""
    failure = ProcessFailure(1, 99, 1, written(tmp_path / "e"))
    other = dataclasses.replace(failure, exitcode=-9)
    assert (other.exitcode, other.message) == (-9, failure.message)
    assert list(dataclasses.asdict(failure)) == [
        "local_rank",
        "pid",
        "exitcode",
        "error_file",
        "error_file_data",
        "message",
        "timestamp",
    ]
    assert failure == ProcessFailure(1, 99, 1, str(tmp_path / "e"))
    assert pickle.loads(pickle.dumps(failure)) == failure


def test_without_a_file_the_message_describes_the_exit_code() -> None:
    """A signal has TorchElastic's message; an exit code has one with the next step."""
    before = int(time.time())
    killed = ProcessFailure(0, 99, -signal.SIGKILL, "/no/such/file")
    assert killed.message == "Signal 9 (SIGKILL) received by PID 99"
    assert (killed.error_file, killed.error_file_data) == ("<N/A>", {"message": "<NONE>"})
    assert before <= killed.timestamp <= time.time()
    assert killed.signal_name() == "SIGKILL"
    exited = ProcessFailure(0, 99, 3, "")
    assert exited.message.startswith("exited with code 3; no error file was written (")
    assert exited.error_file_data["errorTraits"]["category"] == "system_terminated_error"
    assert exited.signal_name() == "<N/A>"
    assert ProcessFailure(0, 99, -99, "").signal_name() == "<N/A>"


def test_failures_do_not_share_their_data() -> None:
    """TorchElastic's class adds the data of one exit code to all later failures."""
    ProcessFailure(0, 1, 3, "")
    assert ProcessFailure(0, 1, -9, "").error_file_data == {"message": "<NONE>"}


def test_a_truncated_file_does_not_raise(tmp_path: Path) -> None:
    """The rest of the message is used, and the path is kept."""
    (tmp_path / "e").write_text('{"message": {"message": "ValueError: half')
    failure = ProcessFailure(0, 1, 1, str(tmp_path / "e"))
    assert failure.message["message"] == "ValueError: half"
    assert failure.error_file == str(tmp_path / "e")
    (tmp_path / "e").write_text("")
    assert ProcessFailure(0, 1, 1, str(tmp_path / "e")).message.startswith(
        "exited with code 1; the error file is empty"
    )
    os.mkfifo(tmp_path / "fifo")
    assert ProcessFailure(0, 1, 1, str(tmp_path / "fifo")).error_file == "<N/A>"
    assert ProcessFailure(0, 1, 1, "nul\0").error_file == "<N/A>"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(data=almost_valid)
def test_no_content_makes_the_classes_raise(tmp_path: Path, data: object) -> None:
    """Any file gives a failure, a date and a formatted error."""
    (tmp_path / "e").write_text(json.dumps(data))
    failure = ProcessFailure(0, 1, 1, str(tmp_path / "e"))
    assert failure.message
    assert failure.timestamp_isoformat()
    assert "rank      : 0" in str(ChildFailedError("x", {0: failure}))


def test_evidence_replaces_a_missing_error_file() -> None:
    """A worker without annotation still has its traceback and its precise time."""
    evidence = Evidence(error_type="ValueError", message="ValueError: x", traceback="Traceback ...\nValueError: x")
    failure = ProcessFailure.from_failure(
        Failure(1, 2, 6, 99, 1, seen_at=50.5, evidence=evidence), wall_to_agent_clock=-1_000_000_000.0
    )
    assert (failure.local_rank, failure.pid, failure.exitcode, failure.error_file) == (2, 99, 1, "<N/A>")
    assert failure.message["extraInfo"]["py_callstack"] == "Traceback ...\nValueError: x"
    assert (failure.timestamp, failure.raised_at) == (1_000_000_050, 1_000_000_050.5)


def test_failures_with_and_without_a_file_are_converted(tmp_path: Path) -> None:
    """The error file has priority over other evidence, and a signal alone has its message."""
    evidence = Evidence(error_file=written(tmp_path / "e"), raised_at=7.0)
    from_file = ProcessFailure.from_failure(Failure(1, 0, 0, 99, 1, 8.0, evidence=evidence))
    assert from_file.message["message"] == "ValueError: boom"
    assert from_file.raised_at == 7.0
    bare = ProcessFailure.from_failure(Failure(1, 0, 0, 99, -9, 8.0))
    assert bare.message == "Signal 9 (SIGKILL) received by PID 99"
    unstarted = ProcessFailure.from_failure(Failure(1, 0, 0, 0, 127, 8.0, reason="could not be started: no such file"))
    assert unstarted.message["message"] == "could not be started: no such file"


def test_a_worker_that_hung_is_converted_with_its_stacks() -> None:
    """The stacks replace the traceback; the reason stays the message."""
    evidence = Evidence(stacks="Current thread 0x1 (most recent call first):\n  File 't.py', line 3 in step")
    late = Failure(1, 0, 0, 99, -9, 8.0, reason="did not leave the scope 'step' within 1 min", evidence=evidence)
    failure = ProcessFailure.from_failure(late)
    assert failure.message["message"] == late.reason
    assert failure.message["extraInfo"]["py_callstack"] == f"{late.reason}\n{evidence.stacks}"
    text = str(ChildFailedError("x", {0: failure}))
    assert late.reason in text
    assert "line 3 in step" in text


def test_the_first_failure_is_found_within_a_second(tmp_path: Path) -> None:
    """Fractions of a second decide; ties go to the first entry."""
    failures = {
        0: ProcessFailure(0, 10, 1, written(tmp_path / "a", "Late: x", NOW + 0.5)),
        1: ProcessFailure(1, 11, 1, written(tmp_path / "b", "Early: x", NOW + 0.1)),
    }
    assert ChildFailedError("x", failures).get_first_failure() == (1, failures[1])
    failures[0].timestamp = 5  # a value set by a caller is used
    assert ChildFailedError("x", failures).get_first_failure()[0] == 0


def test_the_text_has_torchelastics_layout(tmp_path: Path) -> None:
    """Tools that read torchrun's summary find the same keys in the same order."""
    failures = {
        0: ProcessFailure(0, 10, -9, ""),
        5: ProcessFailure(1, 11, 1, written(tmp_path / "b")),
    }
    error = ChildFailedError("train.py", failures)
    lines = str(error).split("\n")
    assert lines[:5] == ["", "=" * 60, "train.py FAILED", "-" * 60, "Failures:"]
    assert lines[5:10] == [
        "[0]:",
        f"  time      : {failures[0].timestamp_isoformat()}",
        f"  host      : {os.uname().nodename}",
        "  rank      : 0 (local_rank: 0)",
        "  exitcode  : -9 (pid: 10) (SIGKILL)",
    ]
    assert lines[12:15] == ["-" * 60, "Root Cause (first observed failure):", "[1]:"]
    assert lines[-4:] == ["  traceback : Traceback of", "  ValueError: boom", "  ", "=" * 60]
    alone = ChildFailedError("x", {0: failures[5]}).format_msg(boarder_delim="*", section_delim="~")
    assert alone.startswith("\n****")
    assert "  <NO_OTHER_FAILURES>\n~~~~" in alone


def test_a_failure_of_another_node_names_its_host() -> None:
    """The host is where the worker ran. It is not a field: TorchElastic's class has none."""
    there = ProcessFailure.from_failure(Failure(1, 0, 4, 99, 3, 8.0, host="gpu-08"))
    error = pickle.loads(pickle.dumps(ChildFailedError("x", {4: there, 0: ProcessFailure(0, 10, 1, "")})))
    assert [line for line in str(error).split("\n") if line.startswith("  host")] == [
        f"  host      : {os.uname().nodename}",
        "  host      : gpu-08",
    ]
    assert there.host == "gpu-08"
    assert "host" not in {each.name for each in dataclasses.fields(there)}


def test_the_text_contains_no_escape_sequences() -> None:
    """Those of a worker's error are shown as text."""
    failure = ProcessFailure(0, 10, 1, "")
    failure.message = "\x1b]0;title\x07 text"
    assert "\x1b" not in str(ChildFailedError("x", {0: failure}))


def test_an_error_without_failures_is_rejected() -> None:
    """It is a mistake of the caller."""
    with pytest.raises(AssertionError, match="at least one failure"):
        ChildFailedError("x", {})


def test_the_error_can_be_pickled(tmp_path: Path) -> None:
    """With its failures, so that it can be sent to another process."""
    error = ChildFailedError("x", {3: ProcessFailure(0, 10, 1, written(tmp_path / "e"))})
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.name, copy.failures, str(copy)) == (error.name, error.failures, str(error))


def test_the_timestamp_is_the_second_in_the_file(tmp_path: Path) -> None:
    """torch's files have no fractions: the latest possible time is used for ordering only."""
    data = {"message": {"message": "E: x", "extraInfo": {"py_callstack": "", "timestamp": "1717171717"}}}
    (tmp_path / "e").write_text(json.dumps(data))
    failure = ProcessFailure(0, 1, 1, str(tmp_path / "e"))
    assert (failure.timestamp, failure.raised_at) == (1_717_171_717, 1_717_171_718.0)
    (tmp_path / "old").write_text('{"message": "text", "timestamp": 12}')
    assert ProcessFailure(0, 1, 1, str(tmp_path / "old")).timestamp == 12
