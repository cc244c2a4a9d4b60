"""Where the workers of a generation are when nothing moves: their stacks, put together so that a person sees the odd
one out first. Pure.

Workers whose main threads have made the same calls are at one place, whatever their threads are called and wherever
they are in the innermost function: one that spins is at another of its lines at every look. If that shows nobody who
stands out, lines are compared too; and if all are at one line, what their other threads do. The place that the fewest
workers are at comes first: in a job whose workers do the same, it is the one that the others wait for.

Laws (tests cite the numbers; H1 to H4 are in ``hang.py``, H5 to H8 in ``coordinator.py``):

H9  The same stacks make the same report, in whatever order nodes answer and however their threads are named.
H10 Every worker that is at work is at exactly one place; one whose stacks are not known is at a place that says why.
H11 A report is bounded, however many workers there are and whatever they wrote.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from tenax._core.messages import HangReport, StackPlace
from tenax._core.model import truncate_stacks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MAX_PLACES = 64
_MAX_WITH_STACKS = 16
_MAX_FRAMES = 40
_MAX_BESIDE = 32
_MAX_OF_FRAME = 300  # characters
_RANKS_SAID = 8
_ELSEWHERE = "it is at another place, and there were too many to tell them all"

# How faulthandler begins what it tells of a thread; without a number it tells of the main thread alone.
_HEADER = re.compile(r"^(?:(?:Current t|T)hread (0x[0-9a-f]+)|Stack)\b.*:$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.+)$')
# Where a program waits for others of its kind: whoever is there is rarely the one that is waited for.
_WAITS_FOR_OTHERS = re.compile(
    r"distributed|collective|all_?reduce|all_?gather|broadcast|barrier|recv|gloo|nccl|socket|/store/", re.IGNORECASE
)
_OF_OTHERS = re.compile(r"/lib(?:64)?/python\d|/(?:site|dist)-packages/|^<frozen |^<string>")


class LocalStacks(NamedTuple):
    """One worker of a node, and what it wrote."""

    local_rank: int
    global_rank: int
    pid: int
    stacks: str
    why: str  # there are none, if there are none


def last_dump(text: str) -> str:
    """Of what a worker has written each time it was asked, the last: there no thread is told twice."""
    lines = text.splitlines()
    seen: set[str] = set()
    begin = len(lines)
    for number in range(len(lines) - 1, -1, -1):
        header = _HEADER.match(lines[number])
        if header is None:
            continue
        thread = header[1] or ""  # its main thread alone, asked for before all others
        if thread in seen:
            break
        seen.add(thread)
        begin = number
        if not thread:
            break
    return "\n".join(lines[begin:]).strip("\n")


def frames_in(stacks: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the main thread, innermost first; and the innermost of each other thread."""
    threads: list[list[str]] = []
    main: list[str] | None = None
    for line in stacks.splitlines():
        if (header := _HEADER.match(line)) is not None:
            threads.append([])
            if not header[1]:
                main = threads[-1]
        elif threads and (frame := _FRAME.match(line)) is not None:
            threads[-1].append(f"{frame[1]}:{frame[2]} in {frame[3]}"[-_MAX_OF_FRAME:])
    if not threads:
        return (), ()
    if main is None:
        main = threads[-1]  # the oldest thread is told last
    beside = {thread[0] for thread in threads if thread and thread is not main}
    return tuple(main[:_MAX_FRAMES]), tuple(sorted(beside)[:_MAX_BESIDE])


def places_of(workers: Iterable[LocalStacks]) -> tuple[StackPlace, ...]:
    """The workers of one node, those at one place together."""
    places: list[StackPlace] = []
    for worker in workers:
        frames, beside = frames_in(worker.stacks)
        why = "" if frames else worker.why or "what it wrote tells no place"
        stacks = truncate_stacks(worker.stacks) if frames else ""
        places.append(
            StackPlace((worker.global_rank,), frames, beside, stacks, why, local_rank=worker.local_rank, pid=worker.pid)
        )
    return merged(places)


def merged(places: Iterable[StackPlace], level: int = 2) -> tuple[StackPlace, ...]:
    """Those that are one, as one: by the calls (0), the lines (1), and all threads (2). Only the rarest keep stacks."""
    found: dict[tuple[object, ...], StackPlace] = {}
    for place in sorted(places, key=lambda place: place.ranks[:1]):
        key = _key(place, level)
        one = found.get(key)
        if one is None:
            found[key] = place
        else:
            ranks = tuple(sorted({*one.ranks, *place.ranks}))
            found[key] = msgspec.structs.replace(one, ranks=ranks)
    in_order = sorted(found.values(), key=_oddness)
    bounded = [*in_order[:_MAX_WITH_STACKS], *(_brief(place) for place in in_order[_MAX_WITH_STACKS:])]
    if len(bounded) <= _MAX_PLACES:
        return tuple(bounded)
    rest = tuple(sorted(rank for place in bounded[_MAX_PLACES - 1 :] for rank in place.ranks))
    first = bounded[_MAX_PLACES - 1]
    untold = StackPlace(rest, why=_ELSEWHERE, local_rank=first.local_rank, pid=first.pid, host=first.host)
    return (*bounded[: _MAX_PLACES - 1], untold)


def make_report(
    places: Iterable[StackPlace], *, generation: int, nodes: int, quiet_s: float, why: str, what_follows: str
) -> HangReport:
    """The odd one first."""
    fine = merged(places)
    views = [merged(fine, level) for level in (0, 1, 2)]
    told = next((view for view in views if _has_odd_one(view)), None)
    is_odd = told is not None
    if told is None:
        told = next((view for view in views if len(view) > 1), fine)
    workers = sum(len(place.ranks) for place in told)
    return HangReport(generation, nodes, workers, round(quiet_s, 1), why, told, is_odd, what_follows)


def _key(place: StackPlace, level: int) -> tuple[object, ...]:
    if level == 0 and place.frames:
        file, _, rest = place.frames[0].rpartition(":")
        return (file, rest.partition(" in ")[2], place.frames[1:], place.why)
    return (place.frames, place.beside if level == 2 else (), place.why)


def _has_odd_one(places: Sequence[StackPlace]) -> bool:
    if len(places) < 2:
        return False
    first, second = places[:2]
    return len(first.ranks) < len(second.ranks) or (len(places) == 2 and _waits(first) < _waits(second))


def _brief(place: StackPlace) -> StackPlace:
    return msgspec.structs.replace(place, stacks="") if place.stacks else place


def _oddness(place: StackPlace) -> tuple[int, int, tuple[int, ...]]:
    return len(place.ranks), _waits(place), place.ranks


def _waits(place: StackPlace) -> int:
    """Who cannot even say where it is, is not one of those that wait; who waits for others by the look of it, is."""
    if not place.frames:
        return 0
    return 2 if any(_WAITS_FOR_OTHERS.search(frame) for frame in place.frames[:4]) else 1


# --- in words ---------------------------------------------------------------------------------------------------------


def where_in_words(place: StackPlace) -> str:
    """In the program, and what it called there, if that is code of others."""
    if not place.frames:
        return f"not known: {place.why}"
    innermost = place.frames[0]
    own = next((frame for frame in place.frames if not _OF_OTHERS.search(frame)), innermost)
    return f"at {own}" if own == innermost else f"at {own}, in {_short(innermost)}"


def _short(frame: str) -> str:
    """Of a file of others the name is enough."""
    path, _, rest = frame.rpartition(":")
    return f"{path.rpartition('/')[2]}:{rest}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1, 2``, ``ranks 0 to 6 and 8``: short, however many there are."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    said = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs[:_RANKS_SAID]]
    more = sum(b - a + 1 for a, b in runs[_RANKS_SAID:])
    listed = ", ".join(said) + (f" and {more} more" if more else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {listed}"


def reason_of(report: HangReport) -> str:
    """Why the odd one is a failure, as the rest of a sentence that begins with its name."""
    moved = f"hung: nothing moved on {nodes_in_words(report.nodes)} for {report.quiet_s:g} s"
    if not report.places:
        return moved
    odd = report.places[0]
    where = where_in_words(odd) if odd.frames else f"which place is {where_in_words(odd)}"
    if len(report.places) == 1:
        return f"{moved}; all ranks are at one place, {where}" if report.workers > 1 else f"{moved}; it is {where}"
    who = "it is the one that is elsewhere" if len(report.places[0].ranks) == 1 else "it is one of those elsewhere"
    if not report.is_odd:
        who = "no rank stands out, and this one is the first"
    return f"{moved}; {who}, {where}"


def nodes_in_words(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def report_in_lines(report: HangReport) -> list[str]:
    """For the console: the same on every node."""
    workers = "1 worker" if report.workers == 1 else f"{report.workers} workers"
    order = ", the odd one out first" if report.is_odd else ""
    lines = [
        f"generation {report.generation} seems to hang: nothing has moved on {nodes_in_words(report.nodes)} for "
        f"{report.quiet_s:g} s ({report.why})",
        f"where its {workers} {'is' if report.workers == 1 else 'are'}{order}:",
    ]
    for place in report.places:
        who = ranks_in_words(place.ranks)
        if len(place.ranks) == 1:
            who += f" (pid {place.pid}{f' on {place.host}' if place.host else ''})"
        lines.append(f"  {who}: {where_in_words(place)}")
    if report.what_follows:
        lines.append(report.what_follows)
    return lines
