"""The last words of a Python process, found in what it printed to stderr.

Three kinds: the traceback of the exception that ended it (with the exceptions it was chained to, groups and syntax
errors), the fault handler's account of a crash, and C++'s account of an exception that nobody caught. Pure: text in, a
value out; never raises, whatever the text.

A process prints other tracebacks too: those it handled and logged, those of its threads, of its destructors, of its
children. Laws:

1. The last traceback that is not announced as such a lesser one is taken; a lesser one only if there is no other.
2. One that is followed by more output than a dying process prints is not the cause: it was handled long ago.
3. A process that was killed from outside has no exception to show, whatever it had printed before.
"""

from __future__ import annotations

import re
import signal
from bisect import bisect_left

import msgspec

_HEADER = "Traceback (most recent call last):"
_LOST_BEGINNING = "[the beginning is not in what was kept of stderr]"

# torch's process group makes the interpreter put its rank before every line of an uncaught exception.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ")
_INSIDE_GROUP = re.compile(r"^\s+[|+](?! Exception Group )")
_CONNECTORS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_LESSER = re.compile(
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

# Law 2. A message may have many lines of its own, and we cannot tell them from output that follows.
_MAX_LINES_AFTER = 200
# After a crash nothing follows but what the C library or the driver has to say.
_MAX_LINES_AFTER_BEFORE_SIGNAL = 30
# Law 3. The other signals that end a process come from what it does itself.
_FROM_OUTSIDE = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)


class LastOutput(msgspec.Struct, frozen=True):
    """What a process said about its end."""

    error_type: str  # "RuntimeError"; empty if it could not be told
    message: str  # one line: "RuntimeError: boom"
    traceback: str


def find(stderr: str, exit_code: int, *, cut: bool = False) -> LastOutput | None:
    """The last words in this text, if they explain this exit code (negative: a signal).

    ``cut``: the text is the end of a longer one, so its first line may be half a line.
    """
    lines = [_RANK_PREFIX.sub("", line) for line in stderr.split("\n")]
    if cut and len(lines) > 1:
        del lines[0]
    while lines and not lines[-1].strip():
        lines.pop()
    if -exit_code in _FROM_OUTSIDE:
        return None
    # The C++ runtime speaks first, then the fault handler about the abort that follows from it.
    if exit_code == -signal.SIGABRT and (uncaught := _find_terminate(lines)) is not None:
        # "Without an active exception" is what torch's threads die of while an uncaught Python exception ends the
        # interpreter above them: then that one is the cause.
        terminated_at, words, is_bare = uncaught
        raised = _find_traceback(lines[:terminated_at], cut, _MAX_LINES_AFTER_BEFORE_SIGNAL)[1] if is_bare else None
        return raised or words
    most_after = _MAX_LINES_AFTER_BEFORE_SIGNAL if exit_code < 0 else _MAX_LINES_AFTER
    crash_at, crash = _find_crash(lines, most_after)
    if exit_code < 0 and crash is not None:
        return crash
    found_at, found = _find_traceback(lines, cut, most_after)
    # With an ordinary exit code the crash may be a child's, and the exception what the parent made of it.
    return crash if crash_at > found_at else found


# --- tracebacks -------------------------------------------------------------------------------------------------------


def _find_traceback(lines: list[str], cut: bool, most_after: int) -> tuple[int, LastOutput | None]:
    headers = _headers(lines)
    main = [at for at in headers if not _is_lesser(lines, at)]
    syntax_at = _bare_syntax_error(lines)
    if (
        syntax_at >= 0
        and len(lines) - syntax_at <= most_after
        and (not main or _exception_line(lines, main[-1]) < syntax_at)
    ):
        return syntax_at, _told(lines, _syntax_start(lines, syntax_at), syntax_at, len(lines), "")
    if not main and cut and (words := _headless(lines, headers)) is not None:
        return 0, words
    if not headers:
        return -1, None
    chosen = (main or headers)[-1]
    end = _end(lines, chosen, headers)
    exception_at = _exception_line(lines, chosen)
    if end - exception_at > most_after:
        return -1, None
    start, note = _start_of_chain(lines, chosen, headers, cut)
    return chosen, _told(lines, start, exception_at, end, note)


def _headers(lines: list[str]) -> list[int]:
    """Where tracebacks begin, without those that are quoted in the message of another."""
    headers: list[int] = []
    for at, line in enumerate(lines):
        if not line.rstrip().endswith(_HEADER) or _INSIDE_GROUP.match(line):
            continue
        if not (headers and _is_quoted(lines, at, headers[-1])):
            headers.append(at)
    return headers


def _is_quoted(lines: list[str], at: int, outer: int) -> bool:
    """Whether this header stands in the message of the exception above it, as process pools and data loaders do it."""
    if lines[at].startswith("Original "):
        return True
    exception_at = _exception_line(lines, outer)
    between = [line for line in lines[exception_at:at] if line.strip()]
    return bool(between) and len(between) <= 2 and between[-1].rstrip().endswith(":") and between[-1] not in _CONNECTORS


def _is_lesser(lines: list[str], header: int) -> bool:
    return header > 0 and _LESSER.match(lines[header - 1]) is not None


def _is_group(lines: list[str], header: int) -> bool:
    return header >= 0 and "+ Exception Group " in lines[header]


def _exception_line(lines: list[str], header: int) -> int:
    """Where the exception itself stands below its frames; the end of the text if it is not there."""
    at = header + 1
    inside = "  | " if _is_group(lines, header) else ""
    while at < len(lines) and lines[at].startswith(inside + " "):
        at += 1
    return at


def _end(lines: list[str], header: int, headers: list[int]) -> int:
    """Where the traceback's text ends: at the next announcement of something else, or with the text."""
    at = _exception_line(lines, header) + 1
    following = set(headers)
    while at < len(lines):
        if at in following or _LESSER.match(lines[at]) or _FATAL.match(lines[at]) or _TERMINATE.match(lines[at]):
            break
        at += 1
    return min(at, len(lines))


def _start_of_chain(lines: list[str], header: int, headers: list[int], cut: bool) -> tuple[int, str]:
    """Where the first of the chained exceptions begins, and a note if its beginning is lost."""
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
            # A pool's remote traceback stands between triple quotes, below its own exception line.
            if start >= 2 and lines[start - 1] == '"""':
                start -= 2
        elif cut:
            return 0, _LOST_BEGINNING
        else:
            return _paragraph_start(lines, above), ""


def _paragraph_start(lines: list[str], connector: int) -> int:
    """Where an exception begins that has no frames of its own, above the connector."""
    end = connector - 1
    while end > 0 and not lines[end].strip():
        end -= 1
    start = end
    while start > 0 and lines[start - 1].strip():
        start -= 1
    # Other output may stand directly above it. Exceptions are named in capitals; most other things are not.
    for at in range(max(start, 0), end):
        match = _EXCEPTION.match(lines[at])
        if match and match.group(1).rpartition(".")[2][0:1].isupper():
            return at
    return max(end, 0)


def _headless(lines: list[str], headers: list[int]) -> LastOutput | None:
    """A traceback so long that its header was cut off."""
    exception_at = _exception_line(lines, -1)
    if exception_at >= len(lines) or not any(_FRAME.match(line) for line in lines[:exception_at]):
        return None
    if not _EXCEPTION.match(lines[exception_at]):
        return None
    end = _end(lines, -1, headers)
    return _told(lines, 0, exception_at, end, _LOST_BEGINNING) if end - exception_at <= _MAX_LINES_AFTER else None


def _bare_syntax_error(lines: list[str]) -> int:
    """Where the error stands that a script's own syntax gave: such a one has no header."""
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


def _told(lines: list[str], start: int, exception_at: int, end: int, note: str) -> LastOutput:
    kept = lines[start:end]
    while kept and not kept[-1].strip():
        kept.pop()
    if kept and kept[0].rstrip().endswith(_HEADER) and not _is_group(lines, start):
        kept[0] = _HEADER  # a progress bar may stand on the same line
    if note:
        kept.insert(0, note)
    error_type, message = _exception(lines, exception_at, end)
    return LastOutput(error_type, message, "\n".join(kept))


def _exception(lines: list[str], at: int, end: int) -> tuple[str, str]:
    """The type and the one-line message of the exception at this line."""
    if at >= len(lines):
        return "", ""
    line = lines[at].removeprefix("  | ").removeprefix("__main__.").rstrip()  # Python before 3.11 names that module
    match = _EXCEPTION.match(line)
    if match is None:
        return "", line
    if line.endswith(":"):
        # The message goes on below: what it quotes last says most.
        rest = [text.strip() for text in lines[at + 1 : end] if text.strip()]
        line = f"{line} {rest[-1]}" if rest else line
    return match.group(1), line


# --- crashes ----------------------------------------------------------------------------------------------------------


def _find_crash(lines: list[str], most_after: int) -> tuple[int, LastOutput | None]:
    """The fault handler's last account: of a fatal signal, of the interpreter's own fatal error, of a timeout."""
    for at in range(len(lines) - 1, -1, -1):
        if _FATAL.match(lines[at]):
            end = at + 1
            while end < len(lines) and _FATAL_BODY.match(lines[end]):
                end += 1
            if len(lines) - end > most_after:
                break
            text = "\n".join(lines[at:end]).rstrip()
            error_type = "Fatal Python error" if lines[at].startswith("Fatal") else "Timeout"
            return at, LastOutput(error_type, lines[at].rstrip(), text)
    return -1, None


def _find_terminate(lines: list[str]) -> tuple[int, LastOutput, bool] | None:
    """What C++ prints before it aborts, where, and whether it names no exception that nobody caught."""
    for at in range(len(lines) - 1, -1, -1):
        match = _TERMINATE.match(lines[at].rstrip())
        if match is None:
            continue
        error_type = match.group(1) or "std::terminate"
        what = lines[at + 1].strip() if at + 1 < len(lines) else ""
        said = what.removeprefix("what():").strip() if what.startswith("what():") else lines[at].rstrip()
        words = LastOutput(error_type, f"{error_type}: {said}", "\n".join(lines[at:]))
        return at, words, match.group(1) is None
    return None
