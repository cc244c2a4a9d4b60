"""Evidence: gathered from error file, stderr and kernel, the most specific source first."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kit.causes import known_cause

from tenax._core.model import Evidence
from tenax._failures import error_file
from tenax._failures.evidence import MAX_LAST_LINES, gather, last_lines, owner_in, stacks_in
from tenax._failures.out_of_memory import OutOfMemoryWatch

from .test_error_file import NOW

TAIL = b'noise\nTraceback (most recent call last):\n  File "t.py", line 1, in f\nValueError: printed\n'


def recorded(
    folder: Path, message: str = "KeyError: recorded", traceback: str = "Traceback ...\nKeyError: recorded\n"
) -> str:
    path = str(folder / "error.json")
    error_file.write(path, error_file.content(message, traceback, NOW))
    return path


def test_frames_of_cpp_do_not_replace_the_last_lines() -> None:
    text = "step 1\n[W1117 socket.cpp:764] the addresses of head cannot be retrieved\n<omitting python frames>\n"
    lines = last_lines(text + "".join(f"frame #{number}: main + 0x85\n" for number in range(60)))
    assert lines == ("step 1", "[W1117 socket.cpp:764] the addresses of head cannot be retrieved")


def test_why_a_connection_timed_out_may_have_been_printed_long_before() -> None:
    """torch warns on each attempt, and prints long C++ stacks below."""
    text = (
        "[W1117 socket.cpp:764] [c10d] The IPv4 network addresses of (head, 29500) cannot be retrieved \n"
        + "frame #7: <unknown function>\n" * 50
        + "Traceback (most recent call last):\n  File 'train.py', line 3, in <module>\n"
        "torch.distributed.DistNetworkError: The client socket has timed out after 15000ms while trying to connect to "
        "(head, 29500).\n"
    )
    assert gather(pid=1, exit_code=1, stderr_tail=text.encode()).cause == "unknown_host"


def test_the_error_file_has_priority_over_stderr(tmp_path: Path) -> None:
    """The worker recorded its exception itself."""
    path = recorded(tmp_path)
    found = gather(pid=1, exit_code=1, error_file=path, stderr_tail=TAIL, log_file="/logs/stderr.log")
    assert (found.error_type, found.message) == ("KeyError", "KeyError: recorded")
    assert found.traceback == "Traceback ...\nKeyError: recorded"
    assert (found.error_file, found.log_file) == (path, "/logs/stderr.log")
    assert found.raised_at == NOW


def test_without_an_error_file_the_exception_is_found_in_stderr(tmp_path: Path) -> None:
    """No annotation in the user's code is needed."""
    found = gather(pid=1, exit_code=1, error_file=str(tmp_path / "none"), stderr_tail=TAIL)
    assert (found.error_type, found.message) == ("ValueError", "ValueError: printed")
    assert found.traceback.startswith("Traceback (most recent call last):\n")
    assert found.error_file == ""
    assert found.raised_at is None


def test_without_an_exception_the_last_lines_are_kept() -> None:
    """Number and length of the lines are limited."""
    tail = "".join(f"line {n}\n" for n in range(100)) + "x" * 5000 + "\n"
    found = gather(pid=1, exit_code=2, stderr_tail=tail.encode())
    assert (found.error_type, found.message, found.traceback) == ("", "", "")
    assert len(found.last_lines) == MAX_LAST_LINES
    assert found.last_lines[-2] == "line 99"
    assert len(found.last_lines[-1]) == 400


def test_a_process_without_output_has_only_a_cause() -> None:
    """No file, no output: the cause comes from the signal."""
    assert gather(pid=1, exit_code=-9) == Evidence(cause="killed")


def test_the_last_state_of_a_progress_bar_is_kept() -> None:
    """A line that was redrawn is shown as a terminal shows it."""
    assert last_lines("start\n 1%\r 2%\r 3%\r\nend") == ("start", " 3%", "end")
    assert last_lines("half a line\nwhole", cut=True) == ("whole",)
    assert last_lines("only", cut=True) == ("only",)
    assert last_lines("") == ()
    assert last_lines("\n \n") == ()


def test_a_message_without_traceback_gets_the_printed_one(tmp_path: Path) -> None:
    """The older format has no traceback; stderr may have it."""
    path = tmp_path / "e"
    path.write_text(json.dumps({"message": "\n CUDA error: x\nmore"}))
    found = gather(pid=1, exit_code=1, error_file=str(path), stderr_tail=TAIL)
    assert found.message == "CUDA error: x"
    assert found.traceback.endswith("ValueError: printed")
    alone = gather(pid=1, exit_code=1, error_file=str(path))
    assert alone.traceback == "\n CUDA error: x\nmore"


def test_a_traceback_without_message_gives_the_message(tmp_path: Path) -> None:
    """The error file may contain either of them."""
    found = gather(pid=1, exit_code=1, error_file=recorded(tmp_path, "", TAIL.decode()))
    assert (found.error_type, found.message) == ("ValueError", "ValueError: printed")


def test_a_truncated_error_file_is_used_and_marked(tmp_path: Path) -> None:
    """The report shows that the file is incomplete."""
    path = tmp_path / "e"
    path.write_text('{"message": {"message": "ValueError: torn')
    found = gather(pid=1, exit_code=1, error_file=str(path))
    assert found.message == "ValueError: torn"
    assert "[the error file is truncated or not JSON" in found.traceback
    path.write_text("")
    assert gather(pid=1, exit_code=1, error_file=str(path), stderr_tail=TAIL).message == "ValueError: printed"


@pytest.mark.parametrize(
    ("started_at", "seen_at", "expected"),
    [
        (100.0, 200.0, 150.25),
        (None, None, 150.25),
        (160.0, 200.0, None),  # before its start: the wall clock was set, or the file belongs to another process
        (100.0, 120.0, 120.0),  # after its exit
    ],
)
def test_the_time_is_converted_and_limited_to_the_workers_lifetime(
    tmp_path: Path, started_at: float | None, seen_at: float | None, expected: float | None
) -> None:
    """The agent's own observation has priority over the wall clock."""
    found = gather(
        pid=1,
        exit_code=1,
        error_file=recorded(tmp_path),
        wall_to_agent_clock=150.0 - int(NOW),
        started_at=started_at,
        seen_at=seen_at,
    )
    assert found.raised_at == (None if expected is None else pytest.approx(expected))


@pytest.fixture
def oom(tmp_path: Path) -> OutOfMemoryWatch:
    """A watch whose counter has increased by one."""
    (tmp_path / "memory.events").write_text("oom_kill 0\n")
    (tmp_path / "membership").write_text("0::/\n")
    absent = str(tmp_path / "absent")
    watch = OutOfMemoryWatch(
        cgroup_file=str(tmp_path / "membership"),
        cgroup_root=str(tmp_path),
        kernel_log=absent,
        pid_namespace_file=absent,
    )
    (tmp_path / "memory.events").write_text("oom_kill 1\n")
    return watch


def test_sigkill_with_the_kernels_proof_is_out_of_memory(oom: OutOfMemoryWatch) -> None:
    """The proof is requested if the worker was killed by SIGKILL."""
    found = gather(pid=1, exit_code=-signal.SIGKILL, out_of_memory=oom)
    assert found.out_of_memory == "killed by the kernel: out of memory (cgroup /, oom_kill 0 → 1)"


@pytest.mark.parametrize("exit_code", [1, 3, -signal.SIGTERM, -signal.SIGSEGV])
def test_other_exit_codes_are_not_out_of_memory(oom: OutOfMemoryWatch, exit_code: int) -> None:
    """A kill of another process of the group is not the cause of an ordinary error."""
    assert gather(pid=1, exit_code=exit_code, stderr_tail=TAIL, out_of_memory=oom).out_of_memory == ""


@pytest.mark.parametrize(
    ("exit_code", "message"),
    [
        (137, ""),
        (1, "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "),
        (1, "ProcessExitedException: process 0 terminated with signal SIGKILL"),
        (1, "CalledProcessError: Command 'x' died with <Signals.SIGKILL: 9>."),
    ],
)
def test_a_killed_child_is_reported(oom: OutOfMemoryWatch, exit_code: int, message: str) -> None:
    """A worker that fails because its child was killed gets the proof."""
    tail = b"Traceback (most recent call last):\n" + message.encode()
    found = gather(pid=1, exit_code=exit_code, stderr_tail=tail if message else b"", out_of_memory=oom)
    assert found.out_of_memory == "child process killed by the kernel: out of memory (cgroup /, oom_kill 0 → 1)"


@pytest.mark.process
def test_the_exception_of_a_real_process_is_found(tmp_path: Path) -> None:
    """A real process and the end of its stderr."""
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint('x' * 9000, file=sys.stderr)\nraise RuntimeError('boom')\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, timeout=60, check=False)
    found = gather(pid=1, exit_code=done.returncode, stderr_tail=done.stderr[-4096:], tail_is_cut=True)
    assert (found.error_type, found.message) == ("RuntimeError", "RuntimeError: boom")
    assert found.last_lines[0] == "Traceback (most recent call last):"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(
    tail=st.binary(max_size=400), content=st.binary(max_size=100), exit_code=st.integers(-20, 140), cut=st.booleans()
)
def test_any_input_gives_evidence_that_can_be_stored(
    tmp_path: Path, tail: bytes, content: bytes, exit_code: int, cut: bool
) -> None:
    """Whatever file and output contain, the evidence survives encoding and decoding."""
    (tmp_path / "e").write_bytes(content)
    found = gather(pid=1, exit_code=exit_code, error_file=str(tmp_path / "e"), stderr_tail=tail, tail_is_cut=cut)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Evidence) == found


def test_hostile_names_and_texts_can_be_stored(tmp_path: Path) -> None:
    """Lone surrogates from JSON escapes and from file names do not break the journal."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.json")
    with open(path, "w") as file:
        file.write('{"message": {"message": "E: \\ud800", "extraInfo": {"py_callstack": "\\udfff"}}}')
    found = gather(pid=1, exit_code=1, error_file=path, log_file=path)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Evidence) == found
    assert found.message == "E: \\ud800"


def test_stacks_are_read_from_the_dump_of_the_worker(tmp_path: Path) -> None:
    """Limited in size, and storable. Without a dump there are none."""
    path = tmp_path / "stacks.txt"
    path.write_bytes(b'Current thread 0x1 (most recent call first):\n  File "t.py", line 3 in step\xff\n\n')
    found = gather(pid=1, exit_code=-9, stacks_file=str(path))
    assert found.stacks.startswith('Current thread 0x1 (most recent call first):\n  File "t.py", line 3 in step')
    assert msgspec.json.decode(msgspec.json.encode(found), type=Evidence) == found
    path.write_bytes(b"  File x\n" * 100_000)
    assert len(gather(pid=1, exit_code=-9, stacks_file=str(path)).stacks) <= 32_000
    for nothing in (str(tmp_path / "none"), str(tmp_path), ""):
        assert gather(pid=1, exit_code=-9, stacks_file=nothing).stacks == ""


def test_the_end_of_long_stacks_is_kept_and_omitted_threads_are_marked(tmp_path: Path) -> None:
    """The main thread is the oldest one and comes last."""
    path = tmp_path / "stacks.txt"
    path.write_text(
        "Thread 0x2:\n" + '  File "t.py", line 3 in step\n' * 2000 + "...\nCurrent thread 0x1:\n  in main\n"
    )
    found = stacks_in(str(path))
    assert len(found) <= 32_000
    assert found.endswith("faulthandler stops after the newest 100]\nCurrent thread 0x1:\n  in main")


def test_the_process_that_has_the_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        text = f"Traceback (most recent call last):\nOSError: [Errno 98] Address already in use, port: {port}\n"
        found = gather(pid=1, exit_code=1, stderr_tail=text.encode())
    assert found.cause == "address_in_use"
    assert f"; pid {os.getpid()} (" in found.proof
    assert known_cause(found.cause, found.proof).meaning == f"Port {port} is already in use by another process."


def test_a_free_port_has_no_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert owner_in(f"port: {port}") == owner_in("no port") == ""
