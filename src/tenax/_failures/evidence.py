"""Gathers the evidence of a worker's failure: its error file, its last output, the kernel's counters and log.

Classifies the failure at once (``cause.py``), on the host where the worker ran. Never raises or waits, whatever it
finds. The result is bounded and can be stored and sent.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from tenax._core.model import Evidence
from tenax._core.text import decoded, shortened, storable, without_middle
from tenax._failures import error_file as error_files
from tenax._failures import python_traceback
from tenax._failures.out_of_memory import OutOfMemoryWatch, link_target, read_file
from tenax._view.cause import Cause, classify
from tenax._view.kinds import PORT

MAX_LAST_LINES = 30
_MAX_LINE = 400  # characters
_MAX_MESSAGE = 500
_MAX_TRACEBACK = 32_000
_MAX_STACKS = 31_000  # without the note about what was omitted
_MAX_STACKS_READ = 1 << 20  # bytes

_MORE_THREADS = re.compile(r"^\.\.\.$", re.MULTILINE)  # faulthandler's mark
_CRASHES = frozenset({-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE})
# torch prints up to a hundred below a warning; they would replace all other lines.
_NATIVE_FRAME = re.compile(r"(?:\[rank\d+\]: ?)?(?:frame #\d+: |<omitting python frames>)")
# How launchers, pools and data loaders report a child killed by SIGKILL.
_CHILD_KILLED = re.compile(r"killed by signal: Killed|SIGKILL|[Ss]ignal 9\b|exit(?: )?code:? -9\b")


def gather(
    *,
    pid: int,
    exit_code: int,
    error_file: str = "",
    stderr_tail: bytes = b"",
    tail_is_cut: bool = False,
    log_file: str = "",
    stacks_file: str = "",
    wall_to_agent_clock: float = 0.0,
    started_at: float | None = None,
    seen_at: float | None = None,
    out_of_memory: OutOfMemoryWatch | None = None,
    last_lines_of: str = "stderr",
) -> Evidence:
    """Return the evidence about a worker with this exit code (negative: a signal). Never raises.

    ``stderr_tail``: the last bytes of its stderr; ``tail_is_cut``: there were more before; ``last_lines_of``: "output"
    if they include its stdout.
    ``stacks_file``: where it dumped its stacks, if it hung.
    ``wall_to_agent_clock``: the agent's clock minus the wall clock. ``started_at`` and ``seen_at``, when the worker
    started and when its exit was observed on the agent's clock, bound the time in the error file.
    """
    recorded = error_files.read(error_file)
    stderr = decoded(stderr_tail)
    printed = python_traceback.find(stderr, exit_code, cut=tail_is_cut)
    error_type = message = traceback = ""
    if recorded.message or recorded.traceback:
        error_type, message = _recorded_error(recorded)
        traceback = recorded.traceback or (printed.traceback if printed else "")
        if not traceback and "\n" in recorded.message:
            traceback = recorded.message
    elif printed is not None:
        error_type, message, traceback = printed.error_type, printed.message, printed.traceback
    if recorded.problem:
        traceback = f"{traceback}\n[{recorded.problem}]".lstrip("\n")
    raised_at = None if recorded.timestamp is None else recorded.timestamp + wall_to_agent_clock
    evidence = Evidence(
        error_type=storable(shortened(error_type, _MAX_MESSAGE)),
        message=storable(shortened(message, _MAX_MESSAGE)),
        traceback=storable(without_middle(traceback.rstrip("\n"), _MAX_TRACEBACK)),
        last_lines=last_lines(stderr, cut=tail_is_cut),
        last_lines_of=last_lines_of,
        out_of_memory=storable(_out_of_memory(out_of_memory, pid, exit_code, f"{message}\n{traceback}")),
        error_file=storable(error_file) if recorded.found else "",
        log_file=storable(log_file),
        raised_at=_clamp_to_lifetime(raised_at, started_at, seen_at),
        stacks=stacks_in(stacks_file),
    )
    cause = _cause(exit_code, evidence, stderr.split("\n")[:-MAX_LAST_LINES], out_of_memory, pid)
    return msgspec.structs.replace(evidence, cause=cause.kind, is_consequence=cause.is_consequence, proof=cause.proof)


def stacks_in(path: str) -> str:
    """Return faulthandler's last dump. Its end may be missing: the process is killed soon after. Never raises."""
    if not path:
        return ""
    from tenax._core.hang_report import last_dump
    from tenax._io.safe_open import read_regular

    try:
        written = read_regular(path, _MAX_STACKS_READ)
    except OSError:  # no dump was requested, or it could not be written
        return ""
    # There may be dumps of earlier hangs: only the last one is about this failure.
    text = _MORE_THREADS.sub(
        "[more threads are not shown: faulthandler stops after the newest 100]", last_dump(decoded(written))
    )
    return storable(without_middle(text.rstrip(), _MAX_STACKS))


def last_lines(stderr: str, *, cut: bool = False) -> tuple[str, ...]:
    """Return the last lines as a terminal shows them: of a progress bar, the last state. Frames of C++ are left out."""
    lines = [line for line in stderr.rstrip().split("\n") if not _NATIVE_FRAME.match(line)]
    if cut and len(lines) > 1:
        del lines[0]
    shown = (line.rstrip().rsplit("\r", 1)[-1] for line in lines[-MAX_LAST_LINES:])
    kept = tuple(storable(shortened(line, _MAX_LINE)) for line in shown)
    return () if kept == ("",) else kept


def _recorded_error(recorded: error_files.ErrorFile) -> tuple[str, str]:
    if recorded.message:
        first = next((line for line in recorded.message.split("\n") if line.strip()), "")
        return recorded.error_type, first.strip()
    found = python_traceback.find(recorded.traceback, 1)
    return (found.error_type, found.message) if found else ("", "")


def _out_of_memory(watch: OutOfMemoryWatch | None, pid: int, exit_code: int, text: str) -> str:
    if watch is None:
        return ""
    if exit_code == -signal.SIGKILL:
        return watch.proof(pid)
    if exit_code == 128 + signal.SIGKILL or _CHILD_KILLED.search(text):
        return watch.proof(pid, child=True)
    return ""


def _cause(
    exit_code: int, evidence: Evidence, earlier_lines: list[str], watch: OutOfMemoryWatch | None, pid: int
) -> Cause:
    """Classify the failure, with the kernel log if that has more."""
    cause = classify(exit_code, evidence, earlier_lines)
    if cause.kind == "address_in_use":
        owner = owner_in(cause.proof)
        return msgspec.structs.replace(cause, proof=f"{cause.proof}; {owner} listens there") if owner else cause
    if watch is None or cause.is_consequence:
        return cause
    lines, log_pid = watch.kernel_errors(pid)
    has_gpu_symptom = cause.kind.startswith(("gpu_", "cuda_", "no_gpu", "nccl_")) or exit_code in _CRASHES
    kind, line = gpu_error(lines, log_pid, has_gpu_symptom=has_gpu_symptom)
    if kind:
        return classify(exit_code, evidence, earlier_lines, (kind, storable(line)))
    line = crash_line(lines, log_pid) if log_pid and exit_code in _CRASHES else ""
    return msgspec.structs.replace(cause, proof=storable(shortened(line, _MAX_LINE))) if line else cause


def _clamp_to_lifetime(raised_at: float | None, started_at: float | None, seen_at: float | None) -> float | None:
    """Reject or bound a time outside the worker's lifetime: a clock was set, or the file is wrong."""
    if raised_at is None or (started_at is not None and raised_at < started_at):
        return None
    return raised_at if seen_at is None else min(raised_at, seen_at)


# NVIDIA's driver logs its errors as ``NVRM: Xid (PCI:...): NUMBER, pid=..., text``; the kernel logs the library in
# which a process crashed.
_XID = re.compile(r"NVRM: Xid \([^()]*\): (\d{1,9})(?:, pid='?(\d+|<unknown>)'?)?")
_CLEANUP_XID = 45  # after a process was killed
_XIDS = {
    79: "gpu_lost",
    **dict.fromkeys((48, 63, 64, 92, 94, 95), "gpu_memory_error"),
    **dict.fromkeys((13, 31, 43), "gpu_illegal_access"),  # errors of the program
}
# After these a GPU is unusable until it is reset, whatever process used it.
_FATAL_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120})


def gpu_error(lines: Sequence[str], pid: int, *, has_gpu_symptom: bool) -> tuple[str, str]:
    """Return the kind and line of a GPU error of this process, or empty strings.

    ``has_gpu_symptom``: the worker reported a GPU error or crashed, so fatal errors without a pid count too.
    """
    best = ("", "")
    for line in lines:
        match = _XID.search(line)
        if match is None:
            continue
        number, logged_pid = int(match.group(1)), match.group(2)
        is_of_process = logged_pid == str(pid)
        is_unattributed = (logged_pid is None or not logged_pid.isdigit()) and number in _FATAL_XIDS and has_gpu_symptom
        if number == _CLEANUP_XID or not (is_of_process or is_unattributed):
            continue
        kind = _XIDS.get(number, "gpu_error")
        if not best[0] or kind in ("gpu_lost", "gpu_memory_error"):
            best = (kind, line)
            if kind == "gpu_lost":
                break
    return best


def crash_line(lines: Sequence[str], pid: int) -> str:
    """Return the line about this process's crash: ``python3[4703]: segfault at 0 ip ... in libfoo.so[...]``."""
    pattern = re.compile(rf"\[{pid}\]:? (?:segfault at|general protection|trap )")
    return next((line for line in lines if pattern.search(line)), "")


def owner_in(message: str) -> str:
    """Return the process that listens on the port that the message names: ``pid 4711 (python3)``; empty if unknown."""
    match = re.search(PORT, message)
    sockets = _listening_on(int(match[1])) if match is not None else set()
    if not sockets:
        return ""
    for pid in _entries("/proc"):
        if pid.isdecimal() and any(
            link_target(f"/proc/{pid}/fd/{name}") in sockets for name in _entries(f"/proc/{pid}/fd")
        ):
            name = read_file(f"/proc/{pid}/comm").decode("utf-8", "replace").strip()
            return f"pid {pid} ({name or 'unknown'})"
    return "a process of another user"


def _listening_on(port: int) -> set[str]:
    """Return the sockets that listen on this port, as links to them are named."""
    text = decoded(read_file("/proc/net/tcp", -1) + read_file("/proc/net/tcp6", -1))
    rows, listening = map(str.split, text.splitlines()), "0A"
    return {
        f"socket:[{row[9]}]" for row in rows if len(row) > 9 and row[3] == listening and row[1].endswith(f":{port:04X}")
    }


def _entries(path: str) -> list[str]:
    with suppress(OSError):  # the process has exited or belongs to another user
        return os.listdir(path)
    return []
