"""Gathering evidence: why did this worker end?

Asks the witnesses in the order of their knowledge: the worker's own error file, what it printed last, the kernel.
What they say is judged at once (``cause.py``), on the host where the worker ran, where everything is at hand.
Nothing it finds can make it raise or wait. The result is bounded, and fit to be stored and sent.
"""

from __future__ import annotations

import re
import signal

import msgspec

from tenax._core.model import Evidence
from tenax._failures import error_file as error_files
from tenax._failures import python_traceback
from tenax._failures.cause import Cause, Facts, judge
from tenax._failures.plain_text import decoded, shortened, storable, without_middle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._failures.out_of_memory import OutOfMemoryWatch

MAX_LAST_LINES = 30
_MAX_LINE = 400  # characters
_MAX_MESSAGE = 500
_MAX_TRACEBACK = 32_000
_MAX_STACKS = 31_000  # what says that something is left out comes on top
_MAX_STACKS_READ = 1 << 20  # bytes

_MORE_THREADS = re.compile(r"^\.\.\.$", re.MULTILINE)  # how faulthandler says it
_CRASHES = frozenset({-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE})
# How launchers, pools and data loaders tell that SIGKILL ended a child of theirs.
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
) -> Evidence:
    """What can be found out about a worker that ended with this exit code (negative: a signal). Never raises.

    ``stderr_tail``: the end of what it wrote to stderr, raw; ``tail_is_cut``: there was more before it.
    ``stacks_file``: where it wrote its stacks when it hung, if it was asked to.
    ``wall_to_agent_clock``: what to add to the wall clock's time to get the agent's. ``started_at`` and ``seen_at``,
    when the worker started and when its end was seen on the agent's clock, bound what the error file may claim.
    """
    recorded = error_files.read(error_file)
    stderr = decoded(stderr_tail)
    printed = python_traceback.find(stderr, exit_code, cut=tail_is_cut)
    if recorded.message or recorded.traceback:
        error_type, message = _recorded_error(recorded)
        traceback = recorded.traceback or (printed.traceback if printed else "")
        if not traceback and "\n" in recorded.message:
            traceback = recorded.message
        if recorded.problem:
            traceback = f"{traceback}\n[{recorded.problem}]".lstrip("\n")
    elif printed is not None:
        error_type, message, traceback = printed.error_type, printed.message, printed.traceback
    else:
        error_type = message = traceback = ""
    if recorded.problem and not (recorded.message or recorded.traceback):
        traceback = f"{traceback}\n[{recorded.problem}]".lstrip("\n")
    raised_at = None if recorded.timestamp is None else recorded.timestamp + wall_to_agent_clock
    facts = Facts(
        exit_code=exit_code,
        error_type=storable(shortened(error_type, _MAX_MESSAGE)),
        message=storable(shortened(message, _MAX_MESSAGE)),
        traceback=storable(without_middle(traceback.rstrip("\n"), _MAX_TRACEBACK)),
        last_lines=last_lines(stderr, cut=tail_is_cut),
        out_of_memory=storable(_out_of_memory(out_of_memory, pid, exit_code, f"{message}\n{traceback}")),
    )
    cause = _cause(facts, out_of_memory, pid)
    return Evidence(
        error_type=facts.error_type,
        message=facts.message,
        traceback=facts.traceback,
        last_lines=tuple(facts.last_lines),
        out_of_memory=facts.out_of_memory,
        error_file=storable(error_file) if recorded.found else "",
        log_file=storable(log_file),
        raised_at=_plausible(raised_at, started_at, seen_at),
        stacks=stacks_in(stacks_file),
        cause=cause.kind,
        is_consequence=cause.is_consequence,
        proof=cause.proof,
    )


def stacks_in(path: str) -> str:
    """What faulthandler wrote. The end may be missing: the process was ended a moment later. Never raises."""
    if not path:
        return ""
    from tenax._core.hang_report import last_dump
    from tenax._io.named_file import read_regular

    try:
        written = read_regular(path, _MAX_STACKS_READ)
    except OSError:  # it was not asked, or could not write
        return ""
    # Asked more than once, because it hung before and went on: only the last answer is about this end.
    text = _MORE_THREADS.sub(
        "[more threads are not told: faulthandler stops after the newest hundred]", last_dump(decoded(written))
    )
    return storable(without_middle(text.rstrip(), _MAX_STACKS))


def last_lines(stderr: str, *, cut: bool = False) -> tuple[str, ...]:
    """The last lines as a terminal would have shown them: of a progress bar that redraws its line, the last state."""
    lines = stderr.rstrip().split("\n")
    if cut and len(lines) > 1:
        del lines[0]
    shown = (line.rstrip().rsplit("\r", 1)[-1] for line in lines[-MAX_LAST_LINES:])
    kept = tuple(storable(shortened(line, _MAX_LINE)) for line in shown)
    return () if kept == ("",) else kept


def _recorded_error(recorded: error_files.ErrorFile) -> tuple[str, str]:
    if recorded.message:
        first = next((line for line in recorded.message.split("\n") if line.strip()), "")
        return recorded.error_type, first.strip()
    words = python_traceback.find(recorded.traceback, 1)
    return (words.error_type, words.message) if words else ("", "")


def _out_of_memory(watch: OutOfMemoryWatch | None, pid: int, exit_code: int, said: str) -> str:
    if watch is None:
        return ""
    if exit_code == -signal.SIGKILL:
        return watch.sentence(pid)
    if exit_code == 128 + signal.SIGKILL or _CHILD_KILLED.search(said):
        return watch.sentence(pid, child=True)
    return ""


def _cause(facts: Facts, watch: OutOfMemoryWatch | None, pid: int) -> Cause:
    """The judgement; where the kernel's log knows more, with that."""
    cause = judge(facts)
    if watch is None or cause.is_consequence:
        return cause
    lines, known_as = watch.troubles(pid)
    if not lines:
        return cause
    from tenax._failures.kernel_log import crash_line, gpu_trouble

    says_gpu = cause.kind.startswith(("gpu_", "cuda_", "no_gpu", "nccl_")) or facts.exit_code in _CRASHES
    kind, line = gpu_trouble(lines, known_as, says_gpu=says_gpu)
    if kind:
        return judge(msgspec.structs.replace(facts, kernel_kind=kind, kernel_line=storable(line)))
    line = crash_line(lines, known_as) if known_as and facts.exit_code in _CRASHES else ""
    return msgspec.structs.replace(cause, proof=storable(shortened(line, _MAX_LINE))) if line else cause


def _plausible(raised_at: float | None, started_at: float | None, seen_at: float | None) -> float | None:
    """A time that lies outside the worker's life says only that a clock was set or that the file lies."""
    if raised_at is None or (started_at is not None and raised_at < started_at):
        return None
    return raised_at if seen_at is None else min(raised_at, seen_at)
