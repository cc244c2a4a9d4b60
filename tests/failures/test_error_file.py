"""The error file: written atomically, the first cause is kept, any content can be read."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenax._failures import error_file

NOW = 1_717_171_717.25

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
timestamps = st.one_of(
    json_values, st.sampled_from(["1717171717", "nan", "-1", "1e400", "9" * 5000, 10**400, -(10**400)])
)
almost_valid = st.fixed_dictionaries(
    {},
    optional={
        "message": st.one_of(
            json_values,
            st.fixed_dictionaries(
                {},
                optional={
                    "message": json_values,
                    "errorCode": json_values,
                    "extraInfo": st.one_of(
                        json_values,
                        st.fixed_dictionaries(
                            {},
                            optional={
                                "py_callstack": json_values,
                                "timestamp": timestamps,
                                "timestamp_s": timestamps,
                            },
                        ),
                    ),
                },
            ),
        ),
        "timestamp": timestamps,
    },
)


def check_types(found: error_file.ErrorFile) -> None:
    """Check the types that readers rely on."""
    for text in (found.message, found.traceback, found.error_type, found.problem):
        assert isinstance(text, str)
        text.encode("utf-8")
    assert found.timestamp is None or 0 < found.timestamp < 1e12
    assert isinstance(found.data, dict)


def put(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_the_written_format_is_torchelastics(tmp_path: Path) -> None:
    """With one addition: the precise time."""
    path = tmp_path / "error.json"
    error_file.write(str(path), error_file.content("RuntimeError: boom", "Traceback ...\n", NOW))
    assert json.loads(path.read_text()) == {
        "message": {
            "message": "RuntimeError: boom",
            "extraInfo": {"py_callstack": "Traceback ...\n", "timestamp": "1717171717", "timestamp_s": NOW},
        }
    }


def test_a_written_file_can_be_read(tmp_path: Path) -> None:
    """Type, message, traceback and the time with fractions of a second."""
    path = str(tmp_path / "error.json")
    error_file.write(path, error_file.content("RuntimeError: boom\nmore", "Traceback ...\n", NOW))
    found = error_file.read(path)
    assert (found.found, found.problem) == (True, "")
    assert (found.error_type, found.message) == ("RuntimeError", "RuntimeError: boom\nmore")
    assert (found.traceback, found.timestamp) == ("Traceback ...\n", NOW)


def test_only_the_owner_may_read_the_file_and_no_draft_is_left(tmp_path: Path) -> None:
    """Mode 0600 with any umask, and one file in the folder."""
    path = tmp_path / "error.json"
    error_file.write(str(path), error_file.content("X: y", "", NOW))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["error.json"]


def test_a_failed_write_leaves_no_draft(tmp_path: Path) -> None:
    """The old content stays."""
    path = tmp_path / "error.json"
    path.mkdir()
    with pytest.raises(OSError, match=r"."):
        error_file.write(str(path), {})
    assert os.listdir(tmp_path) == ["error.json"]


def test_writing_is_atomic(tmp_path: Path) -> None:
    """The file is replaced, not rewritten: a reader that has the old one open reads all of it."""
    path = tmp_path / "error.json"
    error_file.write(str(path), error_file.content("Old: one", "", NOW))
    with open(path, "rb") as old:
        error_file.write(str(path), error_file.content("New: one", "", NOW))
        assert json.loads(old.read())["message"]["message"] == "Old: one"
    assert error_file.read(str(path)).message == "New: one"


def test_the_first_cause_wins(tmp_path: Path) -> None:
    """Invariant 2: a second error of the same process does not replace the first."""
    path = str(tmp_path / "error.json")
    assert error_file.write_first(path, error_file.content("First: 1", "", NOW))
    assert not error_file.write_first(path, error_file.content("Second: 2", "", NOW))
    assert error_file.read(path).message == "First: 1"


def test_a_file_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    """Invariant 2: a file that existed at the first check is not of this process."""
    path = put(tmp_path / "error.json", json.dumps({"message": "an old error"}))
    error_file.watch(str(path))
    assert error_file.write_first(str(path), error_file.content("New: 1", "", NOW))
    assert error_file.read(str(path)).message == "New: 1"


def test_a_childs_file_is_the_first_cause(tmp_path: Path) -> None:
    """Invariant 2: a file that appeared since the first check is of a process that failed before."""
    path = tmp_path / "error.json"
    error_file.watch(str(path))
    put(path, json.dumps({"message": "ValueError: in the child"}))
    assert not error_file.write_first(str(path), error_file.content("RuntimeError: child died", "", NOW))
    assert error_file.read(str(path)).message == "ValueError: in the child"


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    """Invariant 2."""
    path = tmp_path / "error.json"
    error_file.watch(str(path))
    put(path, '{"mess')
    assert error_file.write_first(str(path), error_file.content("X: y", "", NOW))
    assert error_file.read(str(path)).message == "X: y"


def test_huge_errors_are_written_below_the_read_limit(tmp_path: Path) -> None:
    """Even if every character is escaped to twelve bytes."""
    path = tmp_path / "error.json"
    error_file.write(str(path), error_file.content("E: " + "😀" * 10**6, "😀" * 10**6 + "the end", NOW))
    assert path.stat().st_size <= error_file.MAX_BYTES
    found = error_file.read(str(path))
    assert found.problem == ""
    assert found.traceback.endswith("the end")
    assert "characters omitted" in found.traceback


def test_the_older_format_is_read(tmp_path: Path) -> None:
    """The message may be a plain string next to the time."""
    path = put(tmp_path / "e", json.dumps({"message": "CUDA died: badly", "timestamp": 1717171717}))
    os.utime(path, (NOW, NOW))
    found = error_file.read(str(path))
    assert (found.message, found.error_type, found.problem) == ("CUDA died: badly", "", "")
    assert found.timestamp == pytest.approx(NOW + 0.01)


def test_whole_seconds_are_refined_by_the_modification_time(tmp_path: Path) -> None:
    """torch's own files have whole seconds only; the modification time is used if it agrees."""
    data = error_file.content("X: y", "", NOW)
    del data["message"]["extraInfo"]["timestamp_s"]
    path = put(tmp_path / "e", json.dumps(data))
    os.utime(path, (NOW + 0.3, NOW + 0.3))
    assert error_file.read(str(path)).timestamp == pytest.approx(NOW + 0.31)
    os.utime(path, (NOW + 500, NOW + 500))  # copied later: the end of that second, never its beginning
    assert error_file.read(str(path)).timestamp == 1_717_171_718.0


def test_a_precise_time_that_contradicts_the_whole_second_is_ignored(tmp_path: Path) -> None:
    """tenax's key only refines TorchElastic's."""
    data = error_file.content("X: y", "", NOW)
    data["message"]["extraInfo"]["timestamp_s"] = NOW - 1000
    path = put(tmp_path / "e", json.dumps(data))
    os.utime(path, (NOW, NOW))
    assert error_file.read(str(path)).timestamp == pytest.approx(NOW + 0.01)


def test_a_missing_file_is_not_a_problem(tmp_path: Path) -> None:
    """Most workers write none."""
    for path in ("", str(tmp_path / "none"), str(tmp_path / "no" / "folder")):
        found = error_file.read(path)
        assert (found.found, found.problem, found.message) == (False, "", "")


@pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="binds the socket through /proc")
def test_a_path_that_is_not_a_regular_file_is_rejected_at_once(tmp_path: Path) -> None:
    """A FIFO, a folder, a link, a device, a socket."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    put(tmp_path / "real", json.dumps({"message": "X: y"}))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with socket.socket(socket.AF_UNIX) as sock:
        folder = os.open(tmp_path, os.O_PATH)
        sock.bind(f"/proc/self/fd/{folder}/socket")  # the path of a socket must be short
        os.close(folder)
        for name in ("fifo", "folder", "link", "dangling", "socket"):
            found = error_file.read(str(tmp_path / name))
            assert found.found, name
            assert found.problem, name
            assert found.message == "", name
    assert "symbolic link" in error_file.read(str(tmp_path / "link")).problem
    assert error_file.read("/dev/zero").problem == "could not read the error file: not a regular file"
    assert error_file.read("nul\0byte").problem
    assert error_file.read("x" * 5000).problem


def test_a_missing_permission_is_reported(tmp_path: Path) -> None:
    """As ``problem``, not as an exception."""
    path = put(tmp_path / "e", "{}")
    path.chmod(0)
    root = os.geteuid() == 0
    try:
        if root:  # root can read everything: become another user for a moment
            os.seteuid(65534)
        found = error_file.read(str(path))
    finally:
        if root:
            os.seteuid(0)
    assert found.problem == "could not read the error file: Permission denied"


def test_only_the_start_of_a_huge_file_is_read_and_that_is_reported(tmp_path: Path) -> None:
    """The message is at the start."""
    data = error_file.content("X: y", "", NOW)
    data["message"]["extraInfo"]["py_callstack"] = "Traceback\n" + "z" * 2 * error_file.MAX_BYTES
    path = put(tmp_path / "e", json.dumps(data))
    found = error_file.read(str(path))
    assert found.problem == f"the error file has {path.stat().st_size} bytes; only the first 1048576 were read"
    assert found.message == "X: y"
    assert found.traceback.startswith("Traceback\nzzz")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the error file is empty"),
        (b" \n", "the error file is empty"),
        (b"[1, 2]", "the error file contains a JSON list, expected an object"),
        (b"null", "the error file contains a JSON NoneType, expected an object"),
        (b"{}", "the error file contains no message"),
        (b'{"message": 7}', "the error file contains no message"),
        (b'{"message": {"extraInfo": 7}}', "the error file contains no message"),
        (b"\xff\xfe\x00", "the error file is truncated or not JSON"),
        (b'{"message": ' + b"9" * 5000 + b"}", "the error file"),
        (b"[" * 200_000, "the error file is truncated or not JSON"),
    ],
)
def test_a_file_without_a_message_has_a_problem(tmp_path: Path, content: bytes, problem: str) -> None:
    """Empty, of another type, or not JSON."""
    found = error_file.read(str(put(tmp_path / "e", content)))
    assert found.problem.startswith(problem)
    assert (found.message, found.timestamp) == ("", None)


def test_the_message_is_recovered_from_every_truncation(tmp_path: Path) -> None:
    """A truncated file does not raise, and its message is used as far as it is there."""
    whole = json.dumps(error_file.content('RuntimeError: "bö\\m"', 'Traceback\n  File "é😀"\n', NOW)).encode()
    path = tmp_path / "e"
    for length in range(len(whole)):
        found = error_file.read(str(put(path, whole[:length])))
        check_types(found)
        assert found.problem
        assert 'RuntimeError: "bö\\m"'.startswith(found.message.removesuffix("\\"))
    assert found.message == 'RuntimeError: "bö\\m"'
    assert found.traceback == 'Traceback\n  File "é😀"\n'
    assert found.error_type == "RuntimeError"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(content=st.binary(max_size=300))
def test_any_bytes_are_read_without_raising(tmp_path: Path, content: bytes) -> None:
    """Invariant 3, for arbitrary bytes."""
    check_types(error_file.read(str(put(tmp_path / "e", content))))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(data=almost_valid, cut=st.integers(0, 10_000))
def test_any_json_of_almost_the_right_shape_is_read_without_raising(tmp_path: Path, data: object, cut: int) -> None:
    """Invariant 3, for wrong types of every field, complete and truncated."""
    text = json.dumps(data)
    check_types(error_file.read(str(put(tmp_path / "e", text))))
    check_types(error_file.read(str(put(tmp_path / "e", text[:cut]))))
