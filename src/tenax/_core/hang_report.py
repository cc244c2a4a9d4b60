"""Hang reports: groups workers by their stacks, so that the worker that stands out comes first.

Workers whose main threads have the same call stack are at one location. Thread names and the line in the innermost
function do not count, because the line of a spinning worker changes with every sample. If no location stands out, lines
are compared as well; if all workers are at one line, their other threads. The location with the fewest workers comes
first: if all workers run the same program, the others are waiting for that one. A minority that is not in a collective
comes before workers that are, however few those are.

Invariants (tests cite the numbers; H1 to H4 are in ``hang.py``, H5 to H8 in ``hang_suspicion.py``):

H9  The same stacks give the same report, independent of the order of replies and of thread names.
H10 Every running worker is at exactly one location; a worker without stacks is at a location that states why.
H11 The size of a report is limited, whatever the number of workers and the stacks that they write.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from tenax._core.messages import HangReport, StackLocation
from tenax._core.model import truncate_stacks
from tenax._core.text import counted, format_duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MAX_LOCATIONS = 64
_MAX_WITH_STACKS = 16
_MAX_FRAMES = 40
_MAX_BESIDE = 32
_MAX_FRAME_CHARS = 300
_MAX_RANGES = 8  # of ranks in a text
_WAITING = 2
_ELSEWHERE = "another location; there were too many to list"

# The first line that faulthandler writes for a thread; without a number it is a dump of the main thread alone.
_HEADER = re.compile(r"^(?:(?:Current t|T)hread (0x[0-9a-f]+)|Stack)\b.*:$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.+)$')
# Where a worker waits for other workers, so that it is rarely the one that others wait for: in a collective, or in the
# backward pass, where DDP and FSDP wait for their collectives without a Python frame.
_WAITS_FOR_OTHERS = re.compile(
    r"distributed|collective|all_?reduce|all_?gather|broadcast|barrier|recv|gloo|nccl|socket|/store/"
    r"|_engine_run_backward|fsdp|block_until_ready|/jax/_src/array",
    re.IGNORECASE,
)
# Where it waits for its own processes, with the same functions.
_WAITS_FOR_OWN = re.compile(r"/utils/data/|/multiprocessing/(?!spawn)")
_THIRD_PARTY = re.compile(r"/lib(?:64)?/python\d|/(?:site|dist)-packages/|^<frozen |^<string>|:\?\?\? in ")


class LocalStacks(NamedTuple):
    """One worker of a node, and the stacks that it wrote."""

    local_rank: int
    global_rank: int
    pid: int
    stacks: str
    why: str  # why there are none


def last_dump(text: str) -> str:
    """Return the last dump of a file with several: walk back until a thread appears for the second time."""
    lines = text.splitlines()
    seen: set[str] = set()
    begin = len(lines)
    for number in range(len(lines) - 1, -1, -1):
        header = _HEADER.match(lines[number])
        if header is None:
            continue
        thread = header[1] or ""  # "": a dump of the main thread alone, which precedes the dump of all threads
        if thread in seen:
            break
        seen.add(thread)
        begin = number
        if not thread:
            break
    return "\n".join(lines[begin:]).strip("\n")


def frames_in(stacks: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the frames of the main thread, innermost first, and the innermost frame of each other thread."""
    threads: list[list[str]] = []
    main: list[str] | None = None
    for line in stacks.splitlines():
        if (header := _HEADER.match(line)) is not None:
            threads.append([])
            if not header[1]:
                main = threads[-1]
        elif threads and (frame := _FRAME.match(line)) is not None:
            threads[-1].append(f"{frame[1]}:{frame[2]} in {frame[3]}"[-_MAX_FRAME_CHARS:])
    if not threads:
        return (), ()
    if main is None:
        main = threads[-1]  # faulthandler writes the oldest thread last
    beside = {thread[0] for thread in threads if thread and thread is not main}
    return tuple(main[:_MAX_FRAMES]), tuple(sorted(beside)[:_MAX_BESIDE])


def places_of(workers: Iterable[LocalStacks]) -> tuple[StackLocation, ...]:
    """Group the workers of one node by location."""
    locations: list[StackLocation] = []
    for worker in workers:
        frames, beside = frames_in(worker.stacks)
        why = "" if frames else worker.why or "its output contains no stack"
        stacks = truncate_stacks(worker.stacks) if frames else ""
        locations.append(
            StackLocation(
                (worker.global_rank,), frames, beside, stacks, why, local_rank=worker.local_rank, pid=worker.pid
            )
        )
    return merged(locations)


def merged(locations: Iterable[StackLocation], level: int = 2) -> tuple[StackLocation, ...]:
    """Merge equal locations, comparing calls (level 0), lines (1) or all threads (2). Only the first keep stacks."""
    found: dict[tuple[object, ...], StackLocation] = {}
    for location in sorted(locations, key=lambda location: location.ranks[:1]):
        key = _key(location, level)
        one = found.get(key)
        if one is None:
            found[key] = location
        else:
            ranks = tuple(sorted({*one.ranks, *location.ranks}))
            found[key] = msgspec.structs.replace(one, ranks=ranks)
    in_order = sorted(found.values(), key=_oddness)
    bounded = [*in_order[:_MAX_WITH_STACKS], *(_brief(location) for location in in_order[_MAX_WITH_STACKS:])]
    if len(bounded) <= _MAX_LOCATIONS:
        return tuple(bounded)
    rest = tuple(sorted(rank for location in bounded[_MAX_LOCATIONS - 1 :] for rank in location.ranks))
    first = bounded[_MAX_LOCATIONS - 1]
    omitted = StackLocation(rest, why=_ELSEWHERE, local_rank=first.local_rank, pid=first.pid, host=first.host)
    return (*bounded[: _MAX_LOCATIONS - 1], omitted)


def calls_of(locations: Iterable[StackLocation]) -> dict[tuple[object, ...], tuple[int, ...]]:
    """Return the ranks at each location, compared by calls: two dumps of workers that have not moved are equal."""
    return {_key(location, 0): location.ranks for location in merged(locations, 0) if location.frames}


def make_report(
    locations: Iterable[StackLocation], *, generation: int, nodes: int, quiet_s: float, why: str, what_follows: str
) -> HangReport:
    """Report the coarsest grouping in which a location stands out, or else in which there are several."""
    fine = merged(locations)
    views = [_in_order(merged(fine, level)) for level in (0, 1, 2)]
    shown = next((view for view in views if _has_odd_one(view)), None)
    is_odd = shown is not None
    if shown is None:
        shown = next((view for view in views if len(view) > 1), fine)
    workers = sum(len(location.ranks) for location in shown)
    return HangReport(generation, nodes, workers, round(quiet_s, 1), why, shown, is_odd, what_follows)


def _key(location: StackLocation, level: int) -> tuple[object, ...]:
    if level == 0 and location.frames:
        file, _, rest = location.frames[0].rpartition(":")
        return (file, rest.partition(" in ")[2], location.frames[1:], location.why)
    return (location.frames, location.beside if level == 2 else (), location.why)


def _in_order(locations: Sequence[StackLocation]) -> tuple[StackLocation, ...]:
    """Put a minority that does not wait for others first."""
    elsewhere = [location for location in locations if _waits(location) < _WAITING]
    count = sum(len(location.ranks) for location in elsewhere)
    if 2 * count > sum(len(location.ranks) for location in locations):
        return tuple(locations)
    return tuple(sorted(locations, key=lambda location: _waits(location) == _WAITING))


def _has_odd_one(locations: Sequence[StackLocation]) -> bool:
    if len(locations) < 2:
        return False
    first, *others = locations
    if _waits(first) < min(map(_waits, others)):
        return 2 * len(first.ranks) <= sum(len(location.ranks) for location in locations)
    return len(first.ranks) < len(others[0].ranks) and _waits(first) <= _waits(others[0])


def _brief(location: StackLocation) -> StackLocation:
    return msgspec.structs.replace(location, stacks="") if location.stacks else location


def _oddness(location: StackLocation) -> tuple[int, int, tuple[int, ...]]:
    return len(location.ranks), _waits(location), location.ranks


def _waits(location: StackLocation) -> int:
    """Return 0 for unknown stacks, 2 if the innermost frames wait for other workers, 1 otherwise."""
    if not location.frames:
        return 0
    if any(_WAITS_FOR_OWN.search(frame) for frame in location.frames[:8]):
        return 1
    return _WAITING if any(_WAITS_FOR_OTHERS.search(frame) for frame in location.frames[:4]) else 1


# --- texts ------------------------------------------------------------------------------------------------------------


def describe_location(location: StackLocation) -> str:
    """Describe the location: the innermost frame in user code, and the third-party call it made, if any."""
    if not location.frames:
        return f"not known: {location.why}"
    innermost = location.frames[0]
    own = next((frame for frame in location.frames if not _THIRD_PARTY.search(frame)), innermost)
    return f"at {own}" if own == innermost else f"at {own}, in {_short(innermost)}"


def _short(frame: str) -> str:
    """Shorten a third-party frame to the file's base name."""
    path, _, rest = frame.rpartition(":")
    return f"{path.rpartition('/')[2]}:{rest}"


def format_ranks(ranks: Sequence[int], to: str = " to ", max_ranges: int = _MAX_RANGES) -> str:
    """Return sorted ranks as ``rank 3``, ``ranks 0, 1, 2`` or ``ranks 0 to 6, 8``, limited in length."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}{to}{b}" for a, b in runs[:max_ranges]]
    more = sum(b - a + 1 for a, b in runs[max_ranges:])
    listed = ", ".join(shown) + (f" and {more} more" if more else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {listed}"


def reason_of(report: HangReport) -> str:
    """Return why the worker that stands out is a failure, as the predicate of a sentence about it."""
    hung = f"hung: no activity on {counted(report.nodes, 'node')} for {format_duration(report.quiet_s)}"
    if not report.locations:
        return hung
    odd = report.locations[0]
    where = describe_location(odd) if odd.frames else f"location {describe_location(odd)}"
    if len(report.locations) == 1:
        return f"{hung}; {'all ranks are at the same location,' if report.workers > 1 else 'it is'} {where}"
    is_only_one = len(report.locations[0].ranks) == 1
    which = "only this rank is" if is_only_one else f"this rank is one of {len(report.locations[0].ranks)}"
    if not report.is_odd:
        which = "no rank stands out; the first one is"
    return f"{hung}; {which} {where}"


def format_report(report: HangReport) -> list[str]:
    """Return the report as lines for the console."""
    order = ", the odd one out first" if report.is_odd else ""
    lines = [
        f"generation {report.generation} seems to hang: no activity on {counted(report.nodes, 'node')} for "
        f"{format_duration(report.quiet_s)} ({report.why})",
        f"where its {counted(report.workers, 'worker')} {'is' if report.workers == 1 else 'are'}{order}:",
    ]
    for location in report.locations:
        ranks = format_ranks(location.ranks)
        if len(location.ranks) == 1:
            ranks += f" (pid {location.pid}{f' on {location.host}' if location.host else ''})"
        lines.append(f"  {ranks}: {describe_location(location)}")
    if report.what_follows:
        lines.append(report.what_follows)
    return lines
