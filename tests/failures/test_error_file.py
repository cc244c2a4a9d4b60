"""The error file: written atomically, first cause kept, read whatever it is."""

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
nearly_right = st.fixed_dictionaries(
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
    """What every reader may rely on."""
    for text in (found.message, found.traceback, found.error_type, found.problem):
        assert isinstance(text, str)
        text.encode("utf-8")
    assert found.timestamp is None or 0 < found.timestamp < 1e12
    assert isinstance(found.data, dict)


def put(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_what_is_written_is_torchelastics_format(tmp_path: Path) -> None:
    """Keys, nesting and the text of whole seconds are TorchElastic's; the exact time stands beside."""
    path = tmp_path / "error.json"
    error_file.write(str(path), error_file.content("RuntimeError: boom", "Traceback ...\n", NOW))
    assert json.loads(path.read_text()) == {
        "message": {
            "message": "RuntimeError: boom",
            "extraInfo": {"py_callstack": "Traceback ...\n", "timestamp": "1717171717", "timestamp_s": NOW},
        }
    }


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    """Type, message, traceback and the time to the fraction of a second."""
    path = str(tmp_path / "error.json")
    error_file.write(path, error_file.content("RuntimeError: boom\nmore", "Traceback ...\n", NOW))
    found = error_file.read(path)
    assert (found.found, found.problem) == (True, "")
    assert (found.error_type, found.message) == ("RuntimeError", "RuntimeError: boom\nmore")
    assert (found.traceback, found.timestamp) == ("Traceback ...\n", NOW)


def test_only_the_owner_may_read_it_and_no_draft_stays(tmp_path: Path) -> None:
    """Mode 0600 whatever the umask, and one file in the folder."""
    path = tmp_path / "error.json"
    error_file.write(str(path), error_file.content("X: y", "", NOW))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["error.json"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    """If the last step fails, the draft goes and the old content stays."""
    path = tmp_path / "error.json"
    path.mkdir()
    with pytest.raises(OSError, match=r"."):
        error_file.write(str(path), {})
    assert os.listdir(tmp_path) == ["error.json"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """A file is replaced by another file, not rewritten: who holds the old one open still reads it whole."""
    path = tmp_path / "error.json"
    error_file.write(str(path), error_file.content("Old: one", "", NOW))
    with open(path, "rb") as old:
        error_file.write(str(path), error_file.content("New: one", "", NOW))
        assert json.loads(old.read())["message"]["message"] == "Old: one"
    assert error_file.read(str(path)).message == "New: one"


def test_the_first_cause_wins(tmp_path: Path) -> None:
    """Law 2: a second error of the same process does not replace the first."""
    path = str(tmp_path / "error.json")
    assert error_file.write_first(path, error_file.content("First: 1", "", NOW))
    assert not error_file.write_first(path, error_file.content("Second: 2", "", NOW))
    assert error_file.read(path).message == "First: 1"


def test_a_file_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    """Law 2: what lay there when we first looked is not about us."""
    path = put(tmp_path / "error.json", json.dumps({"message": "an old story"}))
    error_file.watch(str(path))
    assert error_file.write_first(str(path), error_file.content("New: 1", "", NOW))
    assert error_file.read(str(path)).message == "New: 1"


def test_a_childs_file_is_the_first_cause(tmp_path: Path) -> None:
    """Law 2: a file that appeared since we looked was written by somebody who failed before us."""
    path = tmp_path / "error.json"
    error_file.watch(str(path))
    put(path, json.dumps({"message": "ValueError: in the child"}))
    assert not error_file.write_first(str(path), error_file.content("RuntimeError: child died", "", NOW))
    assert error_file.read(str(path)).message == "ValueError: in the child"


def test_a_damaged_file_is_no_first_cause(tmp_path: Path) -> None:
    """Law 2: what cannot be read is replaced by what can."""
    path = tmp_path / "error.json"
    error_file.watch(str(path))
    put(path, '{"mess')
    assert error_file.write_first(str(path), error_file.content("X: y", "", NOW))
    assert error_file.read(str(path)).message == "X: y"


def test_huge_errors_are_written_below_the_readers_limit(tmp_path: Path) -> None:
    """Even if every character takes twelve bytes when escaped, what we write is read whole."""
    path = tmp_path / "error.json"
    error_file.write(str(path), error_file.content("E: " + "😀" * 10**6, "😀" * 10**6 + "the end", NOW))
    assert path.stat().st_size <= error_file.MAX_BYTES
    found = error_file.read(str(path))
    assert found.problem == ""
    assert found.traceback.endswith("the end")
    assert "characters left out" in found.traceback


def test_the_older_format_is_read(tmp_path: Path) -> None:
    """The message may be a plain string with the time beside it."""
    path = put(tmp_path / "e", json.dumps({"message": "CUDA died: badly", "timestamp": 1717171717}))
    os.utime(path, (NOW, NOW))
    found = error_file.read(str(path))
    assert (found.message, found.error_type, found.problem) == ("CUDA died: badly", "", "")
    assert found.timestamp == pytest.approx(NOW + 0.01)


def test_whole_seconds_are_sharpened_by_the_files_own_time(tmp_path: Path) -> None:
    """W15: torch's own files know the second only; the file's time knows more, and is used if it agrees."""
    data = error_file.content("X: y", "", NOW)
    del data["message"]["extraInfo"]["timestamp_s"]
    path = put(tmp_path / "e", json.dumps(data))
    os.utime(path, (NOW + 0.3, NOW + 0.3))
    assert error_file.read(str(path)).timestamp == pytest.approx(NOW + 0.31)
    os.utime(path, (NOW + 500, NOW + 500))  # copied later: then the end of that second, never its beginning
    assert error_file.read(str(path)).timestamp == 1_717_171_718.0


def test_an_exact_time_that_contradicts_the_format_is_ignored(tmp_path: Path) -> None:
    """Our own key is a refinement of TorchElastic's, not a rival."""
    data = error_file.content("X: y", "", NOW)
    data["message"]["extraInfo"]["timestamp_s"] = NOW - 1000
    path = put(tmp_path / "e", json.dumps(data))
    os.utime(path, (NOW, NOW))
    assert error_file.read(str(path)).timestamp == pytest.approx(NOW + 0.01)


def test_no_file_is_no_problem(tmp_path: Path) -> None:
    """Most workers leave none. That is not worth a sentence."""
    for path in ("", str(tmp_path / "none"), str(tmp_path / "no" / "folder")):
        found = error_file.read(path)
        assert (found.found, found.problem, found.message) == (False, "", "")


@pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="binds the socket through /proc")
def test_whatever_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """A FIFO, a folder, a link, a device, a socket: told in a sentence, at once."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    put(tmp_path / "real", json.dumps({"message": "X: y"}))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with socket.socket(socket.AF_UNIX) as sock:
        folder = os.open(tmp_path, os.O_PATH)
        sock.bind(f"/proc/self/fd/{folder}/socket")  # the address of a socket must be short
        os.close(folder)
        for name in ("fifo", "folder", "link", "dangling", "socket"):
            found = error_file.read(str(tmp_path / name))
            assert found.found, name
            assert found.problem, name
            assert found.message == "", name
    assert "symbolic link" in error_file.read(str(tmp_path / "link")).problem
    assert error_file.read("/dev/zero").problem == "the error file is not a regular file"
    assert error_file.read("nul\0byte").problem
    assert error_file.read("x" * 5000).problem


def test_a_file_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    """A missing permission is a sentence, not an exception."""
    path = put(tmp_path / "e", "{}")
    path.chmod(0)
    root = os.geteuid() == 0
    try:
        if root:  # who may read everything has to be somebody else for a moment
            os.seteuid(65534)
        found = error_file.read(str(path))
    finally:
        if root:
            os.seteuid(0)
    assert found.problem == "the error file cannot be read: Permission denied"


def test_a_file_beyond_the_limit_is_read_at_its_head_and_that_is_said(tmp_path: Path) -> None:
    """The head still tells the message."""
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
        (b"[1, 2]", "the error file holds a JSON list, expected an object"),
        (b"null", "the error file holds a JSON NoneType, expected an object"),
        (b"{}", "the error file holds no message"),
        (b'{"message": 7}', "the error file holds no message"),
        (b'{"message": {"extraInfo": 7}}', "the error file holds no message"),
        (b"\xff\xfe\x00", "the error file is not whole or not JSON"),
        (b'{"message": ' + b"9" * 5000 + b"}", "the error file"),
        (b"[" * 200_000, "the error file is not whole or not JSON"),
    ],
)
def test_a_file_that_says_nothing_has_its_reason_told(tmp_path: Path, content: bytes, problem: str) -> None:
    """Empty, of another kind, or not JSON: one sentence says which."""
    found = error_file.read(str(put(tmp_path / "e", content)))
    assert found.problem.startswith(problem)
    assert (found.message, found.timestamp) == ("", None)


def test_every_truncation_of_a_real_file_tells_what_it_still_holds(tmp_path: Path) -> None:
    """W12: half a file neither raises nor hides its message once the message is there."""
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
    """Law 3, for bytes that know nothing of the format."""
    check_types(error_file.read(str(put(tmp_path / "e", content))))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(data=nearly_right, cut=st.integers(0, 10_000))
def test_any_json_of_nearly_the_right_shape_is_read_without_raising(tmp_path: Path, data: object, cut: int) -> None:
    """Law 3, for wrong types at every place of the format, whole and torn."""
    text = json.dumps(data)
    check_types(error_file.read(str(put(tmp_path / "e", text))))
    check_types(error_file.read(str(put(tmp_path / "e", text[:cut]))))
