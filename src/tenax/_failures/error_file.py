"""The error file: TorchElastic's JSON file in which a worker says why it dies.

Workers write it, agents read it. The format is TorchElastic's, so that files written by torch are read here and files
written here are read by torch::

    {"message": {"message": "RuntimeError: boom",
                 "extraInfo": {"py_callstack": "Traceback ...",
                               "timestamp": "1717171717", "timestamp_s": 1717171717.25}}}

``timestamp`` is text and whole seconds; ``timestamp_s`` is our addition, because a second is too coarse to tell which
of two workers failed first. The older shape ``{"message": "text", "timestamp": 12}`` is read too.

Laws:

1. Writing is atomic: a reader sees no file or a whole one. Only the owner may read it.
2. **The first cause wins.** A process never overwrites an error file that appeared since it first looked at that path:
   neither its own nor that of a child that inherited the path, for what is raised later is most often a consequence.
   A file from before that moment is an earlier run's and is replaced; so is a file that cannot be read.
3. Reading never raises and never blocks, whatever lies at the path; what was wrong is said in ``problem``.

A worker imports this module, so it must stay cheap: no ``typing``, no ``msgspec``, and ``json`` only when it is needed.
"""

from __future__ import annotations

import os
import stat
from _thread import get_ident  # threading would cost a worker an import

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_BYTES = 1 << 20  # what is read of a file; what we write stays below, also when every character is escaped
_MAX_TRACEBACK = 64_000  # characters
_MAX_MESSAGE = 16_000
_YEAR_10000_S = 253_402_300_800  # no date can be shown beyond it
# The kernel stamps files with a clock that may be this much behind the one that processes read.
_FILE_CLOCK_LAG_S = 0.01


class ErrorFile:
    """What was found at a path. Every field may be empty; then ``problem`` says why, unless there is simply no file."""

    __slots__ = (
        *("data", "error_code", "error_type", "found", "message"),
        *("path", "problem", "said_s", "timestamp", "traceback"),
    )

    def __init__(self, path: str) -> None:
        self.path = path
        self.found = False  # something lies at the path
        self.problem = ""
        self.error_type = ""  # "RuntimeError"
        self.message = ""  # "RuntimeError: boom", possibly of several lines
        self.traceback = ""
        # When it was raised: seconds since the epoch. Where the content only knows the second, or nothing, this is the
        # latest moment that the file's own time allows, so that nobody takes a consequence for a cause.
        self.timestamp: float | None = None
        self.said_s: int | None = None  # the second that the content itself names
        self.error_code: int | None = None
        self.data: dict[str, Any] = {}  # the whole content as it was decoded

    def __repr__(self) -> str:
        return f"ErrorFile({self.path!r}, message={self.message!r}, problem={self.problem!r})"


# --- writing ----------------------------------------------------------------------------------------------------------

# What lay at a path when this process first looked: (device, inode, time of change), or None. See law 2.
_first_seen: dict[str, tuple[int, int, int] | None] = {}


def watch(path: str) -> None:
    """Note what lies at the path now: whatever appears there later is a first cause, and stays."""
    if path not in _first_seen:
        _first_seen[path] = _identity(path)


def content(message: str, traceback: str, timestamp_s: float) -> dict[str, Any]:
    """The content of an error file, in TorchElastic's format."""
    from tenax._failures.plain_text import without_middle

    return {
        "message": {
            "message": without_middle(message, _MAX_MESSAGE),
            "extraInfo": {
                "py_callstack": without_middle(traceback, _MAX_TRACEBACK),
                "timestamp": str(int(timestamp_s)),
                "timestamp_s": timestamp_s,
            },
        }
    }


def write_first(path: str, data: dict[str, Any]) -> bool:
    """Write the file unless an earlier cause is already there (law 2). Tells whether it was. May raise OSError."""
    watch(path)
    present = _identity(path)
    if present is not None and present != _first_seen[path] and not read(path).problem:
        return False
    write(path, data)
    return True


def write(path: str, data: dict[str, Any]) -> None:
    """Write or replace the file, atomically. May raise OSError."""
    import json

    write_text(path, json.dumps(data, default=str))


def write_text(path: str, text: str) -> None:
    """Write or replace the file with this text, atomically. May raise OSError."""
    # In the same folder, or the last step would not be atomic.
    draft = os.path.join(os.path.dirname(path), f".error.{os.getpid()}.{get_ident()}.draft")
    # One that is already there can only be left over from an earlier process with the same number.
    _remove(draft)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
        os.replace(draft, path)
    except BaseException:
        _remove(draft)
        raise


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def _identity(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


# --- reading ----------------------------------------------------------------------------------------------------------


def read(path: str) -> ErrorFile:
    """What the file says. Never raises, never blocks."""
    result = ErrorFile(path)
    if not path:
        return result
    try:
        head, status = _read_head(path, result)
    except FileNotFoundError:
        return result
    except (OSError, ValueError) as error:
        result.found = True
        reason = "it is a symbolic link" if _is_link(path) else getattr(error, "strerror", None) or str(error)
        result.problem = f"the error file cannot be read: {reason}"
        return result
    if status is None:
        return result
    from tenax._failures.plain_text import decoded

    if not head.strip():
        result.problem = "the error file is empty"
        return result
    text = decoded(head)
    decoded_data = _decode(text, result)
    if decoded_data is None:
        _salvage(text, result)
    else:
        result.data = decoded_data
        _understand(result)
    if not result.error_type:
        result.error_type = _type_of(result.message)
    if result.message or result.traceback:
        result.said_s = None if result.timestamp is None else int(result.timestamp)
        result.timestamp = _sharpened(result.timestamp, result.data, status.st_mtime)
    return result


def _is_link(path: str) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def _read_head(path: str, result: ErrorFile) -> tuple[bytes, os.stat_result | None]:
    # O_NONBLOCK: a FIFO must not make us wait for a writer. O_NOFOLLOW: a link could lead anywhere.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY)
    result.found = True
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            result.problem = "the error file is not a regular file"
            return b"", None
        parts: list[bytes] = []
        missing = MAX_BYTES
        while missing and (part := os.read(descriptor, missing)):
            parts.append(part)
            missing -= len(part)
    finally:
        os.close(descriptor)
    if status.st_size > MAX_BYTES:
        result.problem = f"the error file has {status.st_size} bytes; only the first {MAX_BYTES} were read"
    return b"".join(parts), status


def _decode(text: str, result: ErrorFile) -> dict[str, Any] | None:
    import json

    try:
        data = json.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        # A file beyond the limit already has its sentence.
        result.problem = result.problem or f"the error file is not whole or not JSON: {error}"
        return None
    if not isinstance(data, dict):
        result.problem = f"the error file holds a JSON {type(data).__name__}, expected an object"
        return {}
    return data


def _understand(result: ErrorFile) -> None:
    """Take what has the right type from where it belongs, and say so when the message itself is not there."""
    message: object = result.data.get("message")
    if isinstance(message, dict):
        extra: object = message.get("extraInfo")
        if isinstance(extra, dict):
            result.traceback = _text(extra.get("py_callstack"))
            result.timestamp = _seconds(extra.get("timestamp"))
        code: object = message.get("errorCode")
        result.error_code = code if isinstance(code, int) and not isinstance(code, bool) else None
        message = message.get("message")
    else:
        result.timestamp = _seconds(result.data.get("timestamp"))
    result.message = _text(message)
    if not result.message and not result.traceback and not result.problem:
        result.problem = "the error file holds no message"


def _text(value: object) -> str:
    from tenax._failures.plain_text import storable

    return storable(value) if isinstance(value, str) else ""


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        return None
    return seconds if 0 < seconds < _YEAR_10000_S else None  # also refuses NaN


def _sharpened(timestamp: float | None, data: dict[str, Any], file_time: float) -> float | None:
    """The most exact time that does not contradict the format's own, which is in whole seconds, if it is there."""
    file_time += _FILE_CLOCK_LAG_S
    if timestamp is None:
        return _seconds(file_time)
    if timestamp != int(timestamp):
        return timestamp
    message = data.get("message")
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    exact = _seconds(extra.get("timestamp_s")) if isinstance(extra, dict) else None
    if exact is not None and timestamp <= exact < timestamp + 1:
        return exact
    return file_time if timestamp <= file_time < timestamp + 2 else timestamp + 1


def _type_of(message: str) -> str:
    import re

    match = re.match(r"([^\W\d][\w.]*)(?::|$)", message.split("\n", 1)[0].rstrip())
    return match.group(1) if match else ""


def _salvage(text: str, result: ErrorFile) -> None:
    """Half a file, from a writer that died or was cut off: take the strings that are there, even the last, torn one."""
    import json
    import re

    def last_string(key: str) -> str:
        strings = re.findall(rf'"{key}"\s*:\s*"((?:[^"\\]|\\.)*)', text, re.DOTALL)
        if not strings:
            return ""
        # The tear may go through an escape: \uD8 is not one any more.
        raw = re.sub(r"\\u[0-9a-fA-F]{0,3}$", "", strings[-1])
        try:
            return _text(json.loads(f'"{raw}"', strict=False))
        except ValueError:
            return _text(raw)

    result.message = last_string("message")
    result.traceback = last_string("py_callstack")
    result.timestamp = _seconds(last_string("timestamp"))
