"""Finds the error that ended a Python process in what it printed to stderr.

Three kinds: the traceback of an uncaught exception (with chained exceptions, groups and syntax errors), the fault
handler's dump of a crash, and what C++ prints before it aborts: an uncaught exception or a fatal line of a log. Pure:
text in, a value out; never raises, whatever the text.

A process prints other tracebacks too: handled and logged ones, those of threads, destructors and children. Invariants:

1. The last traceback not announced as such a secondary one is used; a secondary one only if there is no other.
2. A traceback followed by more output than a dying process prints is not the cause: it was handled earlier.
3. A process killed from outside has no exception, whatever it printed before.
"""

from __future__ import annotations

import re
import signal
from bisect import bisect_left

import msgspec

_HEADER = "Traceback (most recent call last):"
_LOST_BEGINNING = "[the beginning of stderr was not kept]"

# torch's process group puts the rank before every line of an uncaught exception.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ")
_INSIDE_GROUP = re.compile(r"^\s+[|+](?! Exception Group )")
_CONNECTORS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_SECONDARY = re.compile(
    r"(Exception ignored |Exception in thread |Error in atexit|Error in sys\.|--- Logging error ---|Process \S+:$"
    r"|Exception in callback |Task exception was never|Future exception was never|future: )"
)
_EXCEPTION = re.compile(r"([^\W\d][\w.]*(?:\.<locals>\.[\w.]+)*)(?::(?: .*)?)?$")
_SYNTAX_ERROR = re.compile(r"(SyntaxError|IndentationError|TabError)(: |$)")
_SYNTAX_FILE = re.compile(r'  File ".*", line \d+$')
_FRAME = re.compile(r'  File ".*", line \d+, in ')
_FATAL = re.compile(r"(Fatal Python error: .+|Timeout \(\d+:\d\d:\d\d.*\)!)$")
_FATAL_BODY = re.compile(
    r"($|  |Python runtime state: |Current thread|Thread 0x|Stack \(most recent|Extension modules: |<.*truncated.*>)"
)
_TERMINATE = re.compile(r"terminate called (?:after throwing an instance of '(.+)'|without an active exception)$")
# How absl and glog log before they abort, as JAX does: level, month and day, time, thread, source file.
_FATAL_LOG = re.compile(r"F\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]+:\d+\] (.+)")

_MAX_MESSAGE_LINES = 10

# Invariant 2. A message may have many lines, which cannot be distinguished from output that follows.
_MAX_LINES_AFTER = 200
# After a crash only the C library or the driver print something.
_MAX_LINES_AFTER_BEFORE_SIGNAL = 30
# Invariant 3. A process causes the other signals itself.
_EXTERNAL_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)


class LastOutput(msgspec.Struct, frozen=True):
    error_type: str  # "RuntimeError"; empty if unknown
    message: str  # one line: "RuntimeError: boom"
    traceback: str


def find(stderr: str, exit_code: int, *, cut: bool = False) -> LastOutput | None:
    """Return the error in this text, if it explains this exit code (negative: a signal).

    ``cut``: the text is the end of a longer one, so its first line may be incomplete.
    """
    lines = [_RANK_PREFIX.sub("", line) for line in stderr.split("\n")]
    if cut and len(lines) > 1:
        del lines[0]
    while lines and not lines[-1].strip():
        lines.pop()
    if -exit_code in _EXTERNAL_SIGNALS:
        return None
    # C++ prints first, then the fault handler about the resulting abort.
    if exit_code == -signal.SIGABRT and (aborted := _find_abort(lines)) is not None:
        # Threads of torch and JAX abort while an uncaught Python exception ends the interpreter: then that exception is
        # the cause. JAX's thread may even print before it.
        abort_at, abort, may_follow = aborted
        if may_follow:
            before = lines[:abort_at]
            raised = _find_traceback(before, cut, _MAX_LINES_AFTER_BEFORE_SIGNAL)[1]
            return raised or _find_traceback(lines, cut, len(lines))[1] or abort
        return abort
    max_after = _MAX_LINES_AFTER_BEFORE_SIGNAL if exit_code < 0 else _MAX_LINES_AFTER
    crash_at, crash = _find_crash(lines, max_after)
    if exit_code < 0 and crash is not None:
        return crash
    found_at, found = _find_traceback(lines, cut, max_after)
    # With an ordinary exit code the crash may be a child's, and the exception the parent's reaction.
    return crash if crash_at > found_at else found


def _find_traceback(lines: list[str], cut: bool, max_after: int) -> tuple[int, LastOutput | None]:
    headers = _headers(lines)
    main = [at for at in headers if at == 0 or not _SECONDARY.match(lines[at - 1])]
    syntax_at = _bare_syntax_error(lines)
    is_last = not main or _exception_line(lines, main[-1]) < syntax_at
    if syntax_at >= 0 and is_last and len(lines) - syntax_at <= max_after:
        return syntax_at, _build(lines, _syntax_start(lines, syntax_at), syntax_at, len(lines), "")
    if not main and cut and (headless := _find_headless(lines, headers)) is not None:
        return 0, headless
    if not headers:
        return -1, None
    chosen = (main or headers)[-1]
    end = _end(lines, chosen, headers)
    exception_at = _exception_line(lines, chosen)
    if end - exception_at > max_after:
        return -1, None
    start, note = _start_of_chain(lines, chosen, headers, cut)
    return chosen, _build(lines, start, exception_at, end, note)


def _headers(lines: list[str]) -> list[int]:
    """Return the lines where tracebacks begin, without those quoted in the message of another."""
    headers: list[int] = []
    for at, line in enumerate(lines):
        is_header = line.rstrip().endswith(_HEADER) and not _INSIDE_GROUP.match(line)
        if is_header and not (headers and _is_quoted(lines, at, headers[-1])):
            headers.append(at)
    return headers


def _is_quoted(lines: list[str], at: int, outer: int) -> bool:
    """Return whether this header is in the message of the exception above, as in process pools and data loaders."""
    if lines[at].startswith("Original "):
        return True
    exception_at = _exception_line(lines, outer)
    between = [line for line in lines[exception_at:at] if line.strip()]
    return bool(between) and len(between) <= 2 and between[-1].rstrip().endswith(":") and between[-1] not in _CONNECTORS


def _is_group(lines: list[str], header: int) -> bool:
    return header >= 0 and "+ Exception Group " in lines[header]


def _exception_line(lines: list[str], header: int) -> int:
    """Return the line of the exception below its frames; the end of the text if there is none."""
    frame = "  |  " if _is_group(lines, header) else " "
    rest = range(header + 1, len(lines))
    return next((at for at in rest if not lines[at].startswith(frame)), len(lines))


def _end(lines: list[str], header: int, headers: list[int]) -> int:
    """Return where the traceback's text ends: at the next announcement of another error, or with the text."""
    following, others = set(headers), (_SECONDARY, _FATAL, _TERMINATE, _FATAL_LOG)
    rest = range(_exception_line(lines, header) + 1, len(lines))
    return next((at for at in rest if at in following or any(each.match(lines[at]) for each in others)), len(lines))


def _start_of_chain(lines: list[str], header: int, headers: list[int], cut: bool) -> tuple[int, str]:
    """Return where the first of the chained exceptions begins, and a note if its start is lost."""
    start = header
    while True:
        above = start - 1
        while above >= 0 and not lines[above].strip():
            above -= 1
        if above < 0 or lines[above].strip() not in _CONNECTORS:
            return start, ""
        earlier = bisect_left(headers, above)
        if earlier:
            start = headers[earlier - 1]
            # A pool's remote traceback is in triple quotes, below its own exception line.
            if start >= 2 and lines[start - 1] == '"""':
                start -= 2
        elif cut:
            return 0, _LOST_BEGINNING
        else:
            return _paragraph_start(lines, above), ""


def _paragraph_start(lines: list[str], connector: int) -> int:
    """Return where an exception without frames begins, above the connector."""
    end = connector - 1
    while end > 0 and not lines[end].strip():
        end -= 1
    start = end
    while start > 0 and lines[start - 1].strip():
        start -= 1
    # Other output may be directly above it. Exception names are capitalized; most other output is not.
    for at in range(max(start, 0), end):
        match = _EXCEPTION.match(lines[at])
        if match and match.group(1).rpartition(".")[2][0:1].isupper():
            return at
    return max(end, 0)


def _find_headless(lines: list[str], headers: list[int]) -> LastOutput | None:
    """Find a traceback so long that its header was cut off."""
    exception_at = _exception_line(lines, -1)
    has_frame = any(_FRAME.match(line) for line in lines[:exception_at])
    if not has_frame or exception_at >= len(lines) or not _EXCEPTION.match(lines[exception_at]):
        return None
    end = _end(lines, -1, headers)
    return _build(lines, 0, exception_at, end, _LOST_BEGINNING) if end - exception_at <= _MAX_LINES_AFTER else None


def _bare_syntax_error(lines: list[str]) -> int:
    """Return the line of a syntax error in the script itself, which has no header; -1 if there is none."""
    for at in range(len(lines) - 1, 0, -1):
        if _SYNTAX_ERROR.match(lines[at]):
            start = _syntax_start(lines, at)
            headed = start > 0 and (lines[start - 1].startswith(" ") or lines[start - 1].rstrip().endswith(_HEADER))
            return at if _SYNTAX_FILE.match(lines[start]) and not headed else -1
    return -1


def _syntax_start(lines: list[str], at: int) -> int:
    start = at - 1
    while start > 0 and lines[start].startswith(" ") and not _SYNTAX_FILE.match(lines[start]):
        start -= 1
    return start


def _build(lines: list[str], start: int, exception_at: int, end: int, note: str) -> LastOutput:
    kept = lines[start:end]
    while kept and not kept[-1].strip():
        kept.pop()
    if kept and kept[0].rstrip().endswith(_HEADER) and not _is_group(lines, start):
        kept[0] = _HEADER  # a progress bar may be on the same line
    if note:
        kept.insert(0, note)
    error_type, message = _exception(lines, exception_at, end)
    return LastOutput(error_type, message, "\n".join(kept))


def _exception(lines: list[str], at: int, end: int) -> tuple[str, str]:
    """Return the type and the one-line message of the exception at this line."""
    if at >= len(lines):
        return "", ""
    line = lines[at].removeprefix("  | ").removeprefix("__main__.").rstrip()  # Python before 3.11 prints that module
    match = _EXCEPTION.match(line)
    if match is None:
        return "", line
    if line.endswith(":"):
        # The message continues below: its last line is the most specific.
        rest = [text.strip() for text in lines[at + 1 : end] if text.strip()]
        line = f"{line} {rest[-1]}" if rest else line
    return match.group(1), line


def _find_crash(lines: list[str], max_after: int) -> tuple[int, LastOutput | None]:
    """Find the fault handler's last dump: of a fatal signal, a fatal error of the interpreter, or a timeout."""
    for at in range(len(lines) - 1, -1, -1):
        if _FATAL.match(lines[at]):
            end = at + 1
            while end < len(lines) and _FATAL_BODY.match(lines[end]):
                end += 1
            if len(lines) - end > max_after:
                break
            text = "\n".join(lines[at:end]).rstrip()
            error_type = "Fatal Python error" if lines[at].startswith("Fatal") else "Timeout"
            return at, LastOutput(error_type, lines[at].rstrip(), text)
    return -1, None


def _find_abort(lines: list[str]) -> tuple[int, LastOutput, bool] | None:
    """Find what C++ prints before it aborts. Return its line, the error, and whether it may follow an exception."""
    for at in range(len(lines) - 1, -1, -1):
        line = lines[at].rstrip()
        if (logged := _FATAL_LOG.match(line)) is not None:
            message = " ".join([logged.group(1), *_until_blank(lines[at + 1 :])])
            return at, LastOutput("", message.partition("absl::Status: ")[2] or message, "\n".join(lines[at:])), True
        match = _TERMINATE.match(line)
        if match is None:
            continue
        error_type = match.group(1) or "std::terminate"
        what = lines[at + 1].strip() if at + 1 < len(lines) else ""
        message = what.removeprefix("what():").strip() if what.startswith("what():") else line
        error = LastOutput(error_type, f"{error_type}: {message}", "\n".join(lines[at:]))
        return at, error, match.group(1) is None
    return None


def _until_blank(lines: list[str]) -> list[str]:
    """Return the lines of a message: up to a blank one or the stack below."""
    end = next((at for at, line in enumerate(lines) if not line.strip() or line.startswith("***")), len(lines))
    return [line.strip() for line in lines[: min(end, _MAX_MESSAGE_LINES)]]
