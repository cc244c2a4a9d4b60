"""Bounds of every value that travels between processes or comes back from a file.

The messages, events, requests and journal lines declare their fields with these types, and msgspec checks them while it
decodes. A value out of bounds is a ``msgspec.ValidationError`` at the edge, before any machine sees it.

Two rules keep an honest process within them. What a user chooses is checked where it is given (``name_problem``). What
a coordinator derives from its members' values has wider bounds than the members' own: a sum of ``MAX_NODES`` values is
within bounds if each of them is.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import DecodeError, Meta

MAX_NODES = 1 << 16
MAX_SLOTS = 1 << 12  # workers of one node
MAX_WORLD = MAX_NODES * MAX_SLOTS
MAX_NAME = 255  # characters of a host, a role or a node name
MAX_ADDRESS = 1 << 10
MAX_PATH = 1 << 15  # PATH_MAX, with every byte written as an escape
MAX_REASON = 1 << 12  # characters of a reason that an operator gives
MAX_TEXT = 1 << 16  # characters of a reason that a node sends
MAX_LONG_TEXT = 1 << 20  # characters of a traceback, and of a reason that a coordinator composes
MAX_SECONDS = 1e10  # of a clock or of a duration
MAX_SUM_SECONDS = 1e100  # so large that no duration added to it exceeds it
MAX_NUMBER = 1 << 53  # JSON readers that use doubles hold it exactly
MAX_FRAMES = 1 << 10
MAX_REPORTED = 1 << 14  # failures, or stopped workers, in one message
# Generations that a joining node may be ahead of the coordinator. A coordinator that lost its state takes the
# generation from its members; a member that reports an absurd one must not exhaust the numbers.
MAX_GENERATIONS_AHEAD = 1_000_000

# What decoding of foreign JSON raises: it is malformed, not UTF-8, out of bounds, or nested too deeply.
DECODE_ERRORS = (DecodeError, UnicodeDecodeError, RecursionError)

# The characters that end a line or control a terminal. All others are escaped before they are printed.
_ONE_LINE = r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z"

Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Generation = Number
OldGeneration = Annotated[int, Meta(ge=0, le=MAX_NUMBER >> 1)]  # of a record: the next ones are within bounds
NumberOrAll = Annotated[int, Meta(ge=-1, le=MAX_NUMBER)]
Count = Annotated[int, Meta(ge=0)]  # a sum of differences of steps may need more than 64 bits
Step = Annotated[int, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Slots = Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
LocalRank = Annotated[int, Meta(ge=-1, lt=MAX_SLOTS)]  # -1: none
Rank = Annotated[int, Meta(ge=-1, lt=MAX_WORLD)]
FirstRank = Annotated[int, Meta(ge=0, le=MAX_WORLD - MAX_SLOTS)]  # of a node: its last rank is within bounds, too
WorldSize = Annotated[int, Meta(ge=0, le=MAX_WORLD)]
NodeRank = Annotated[int, Meta(ge=-1, lt=MAX_NODES)]
NodeCount = Annotated[int, Meta(ge=0, le=MAX_NODES)]
NodeLimit = Annotated[int, Meta(ge=1, le=MAX_NODES)]  # of a run
Pid = Annotated[int, Meta(ge=0, lt=1 << 31)]
ExitCode = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 32)]
Signal = Annotated[int, Meta(ge=0, lt=128)]
Port = Annotated[int, Meta(ge=0, lt=1 << 16)]
Time = Annotated[float, Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
HoldTimeout = Annotated[float, Meta(gt=0, le=3600)]  # for a worker to acknowledge the end of its generation
Interval = Annotated[float, Meta(ge=0.001, le=MAX_SECONDS)]
SumSeconds = Annotated[float, Meta(ge=-MAX_SUM_SECONDS, le=MAX_SUM_SECONDS)]

Name = Annotated[str, Meta(max_length=MAX_NAME, pattern=_ONE_LINE)]
Label = Annotated[str, Meta(max_length=3 * MAX_NAME, pattern=_ONE_LINE)]  # a host with a name and a number
NodeId = Annotated[str, Meta(min_length=1, max_length=64, pattern=_ONE_LINE)]
OptionalNodeId = Annotated[str, Meta(max_length=64, pattern=_ONE_LINE)]  # empty: none
Address = Annotated[str, Meta(max_length=MAX_ADDRESS, pattern=_ONE_LINE)]
HostAddress = Annotated[str, Meta(max_length=64, pattern=_ONE_LINE)]  # numeric, without the interface
Path = Annotated[str, Meta(max_length=MAX_PATH)]
Reason = Annotated[str, Meta(max_length=MAX_REASON)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
LongText = Annotated[str, Meta(max_length=MAX_LONG_TEXT)]


def clamped_time(seconds: float) -> float:
    """Return the time, moved to the nearest bound if it is beyond one. NaN becomes the upper bound."""
    return max(-MAX_SECONDS, seconds) if seconds < MAX_SECONDS else MAX_SECONDS


def name_problem(name: str) -> str:
    """Return why a name that a user chose cannot be sent to other nodes, or an empty string."""
    if len(name) > MAX_NAME:
        return f"it has {len(name)} characters, and at most {MAX_NAME} are allowed"
    if not name.isprintable():
        return "it contains characters that cannot be printed"
    return ""
