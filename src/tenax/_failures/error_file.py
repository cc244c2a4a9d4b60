"""The error file: TorchElastic's JSON file to which a worker writes the exception that ends it.

Workers write it, agents read it. The format is TorchElastic's, so that files written by torch are read here and files
written here are read by torch::

    {"message": {"message": "RuntimeError: boom",
                 "extraInfo": {"py_callstack": "Traceback ...",
                               "timestamp": "1717171717", "timestamp_s": 1717171717.25}}}

``timestamp`` is text in whole seconds; ``timestamp_s`` is tenax's addition, because a second is too coarse to order two
failures. The older shape ``{"message": "text", "timestamp": 12}`` is read too.

Invariants:

1. Writing is atomic: a reader sees no file or a complete one. Only the owner may read it.
2. **The first cause wins.** A process never overwrites an error file that appeared since it first checked that path:
   neither its own nor that of a child that inherited the path, since later exceptions are mostly consequences. An older
   file belongs to an earlier run and is replaced; so is an unreadable file.
3. Reading never raises and never blocks, whatever is at the path; ``problem`` holds the reason.

Workers import this module, so it must stay cheap: no ``typing``, no ``msgspec``, and ``json`` only when needed.
"""

from __future__ import annotations

import os

from tenax._core.text import decoded, storable, without_middle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_BYTES = 1 << 20  # read limit; written files stay below it even if every character is escaped
_MAX_TRACEBACK = 64_000  # characters
_MAX_MESSAGE = 16_000
_YEAR_10000_S = 253_402_300_800  # later times cannot be formatted as a date
# The kernel's clock for file times may be this much behind the one that processes read.
_FILE_CLOCK_LAG_S = 0.01


class ErrorFile:
    """The content of an error file. Any field may be empty; ``problem`` holds the reason, unless there is no file."""

    def __init__(self) -> None:
        self.found = False  # the path exists
        self.problem = ""
        self.error_type = ""  # "RuntimeError"
        self.message = ""  # "RuntimeError: boom", possibly of several lines
        self.traceback = ""
        # When it was raised: seconds since the epoch. If the content has only whole seconds or nothing, this is the
        # latest time that the file's modification time allows, so that a consequence is not taken for a cause.
        self.timestamp: float | None = None
        self.stated_s: int | None = None  # the whole second in the content
        self.data: dict[str, Any] = {}  # the decoded content


# What was at a path when this process first checked: (device, inode, modification time), or None. See invariant 2.
_first_seen: dict[str, tuple[int, int, int] | None] = {}


def watch(path: str) -> None:
    """Remember what is at the path now: a file that appears later is a first cause and is kept."""
    if path not in _first_seen:
        _first_seen[path] = _identity(path)


def content(message: str, traceback: str, timestamp_s: float) -> dict[str, Any]:
    """Return the content of an error file in TorchElastic's format."""
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
    """Write the file unless it holds an earlier cause (invariant 2). Return whether it was written. Raises OSError."""
    watch(path)
    present = _identity(path)
    if present is not None and present != _first_seen[path] and not read(path).problem:
        return False
    write(path, data)
    return True


def write(path: str, data: dict[str, Any]) -> None:
    """Write or replace the file atomically. Raises OSError."""
    import json

    write_text(path, json.dumps(data, default=str))


def write_text(path: str, text: str) -> None:
    """Write or replace the file with this text atomically. Raises OSError."""
    from tenax._io.safe_open import replace_file

    replace_file(path, text.encode("utf-8", "backslashreplace"))


def _identity(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def read(path: str) -> ErrorFile:
    """Read an error file. Never raises, never blocks."""
    result = ErrorFile()
    if not path:
        return result
    from tenax._io.safe_open import read_with_status

    try:
        head, status = read_with_status(path, MAX_BYTES)
    except FileNotFoundError:
        return result
    except (OSError, ValueError) as error:
        result.found = True
        reason = "it is a symbolic link" if os.path.islink(path) else getattr(error, "strerror", None) or str(error)
        result.problem = f"could not read the error file: {reason}"
        return result
    result.found = True
    if status.st_size > MAX_BYTES:
        result.problem = f"the error file has {status.st_size} bytes; only the first {MAX_BYTES} were read"
    if not head.strip():
        result.problem = "the error file is empty"
        return result
    text = decoded(head)
    data = _decode(text, result)
    if data is None:
        _salvage(text, result)
    else:
        result.data = data
        _extract(result)
    result.error_type = _type_of(result.message)
    if result.message or result.traceback:
        result.stated_s = None if result.timestamp is None else int(result.timestamp)
        result.timestamp = _refine_timestamp(result.timestamp, result.data, status.st_mtime)
    return result


def _decode(text: str, result: ErrorFile) -> dict[str, Any] | None:
    import json

    try:
        data = json.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        # A file beyond the limit already has a problem.
        result.problem = result.problem or f"the error file is truncated or not JSON: {error}"
        return None
    if not isinstance(data, dict):
        result.problem = f"the error file contains a JSON {type(data).__name__}, expected an object"
        return {}
    return data


def _extract(result: ErrorFile) -> None:
    """Extract the fields that have the right type, and set ``problem`` if there is no message."""
    message: object = result.data.get("message")
    if isinstance(message, dict):
        extra: object = message.get("extraInfo")
        if isinstance(extra, dict):
            result.traceback = _text(extra.get("py_callstack"))
            result.timestamp = _seconds(extra.get("timestamp"))
        message = message.get("message")
    else:
        result.timestamp = _seconds(result.data.get("timestamp"))
    result.message = _text(message)
    if not result.message and not result.traceback and not result.problem:
        result.problem = "the error file contains no message"


def _text(value: object) -> str:
    return storable(value) if isinstance(value, str) else ""


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        return None
    return seconds if 0 < seconds < _YEAR_10000_S else None  # also rejects NaN


def _refine_timestamp(timestamp: float | None, data: dict[str, Any], file_time: float) -> float | None:
    """Return the most precise time that agrees with the format's own whole second, if there is one."""
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
    """Recover the strings of a truncated file, even the last, partial one."""
    import json
    import re

    def last_string(key: str) -> str:
        strings = re.findall(rf'"{key}"\s*:\s*"((?:[^"\\]|\\.)*)', text, re.DOTALL)
        if not strings:
            return ""
        # The cut may split an escape: \uD8 is not valid.
        raw = re.sub(r"\\u[0-9a-fA-F]{0,3}$", "", strings[-1])
        try:
            return _text(json.loads(f'"{raw}"', strict=False))
        except ValueError:
            return _text(raw)

    result.message = last_string("message")
    result.traceback = last_string("py_callstack")
    result.timestamp = _seconds(last_string("timestamp"))
