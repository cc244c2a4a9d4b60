"""The diagnosis of a generation: what ended it, what followed, what tenax stopped, which nodes were there and left.

The coordinator makes it once, when every member has stopped. The verdict contains it, so every node gets the same one;
reports, status, pages, metrics and traces show it and decide nothing themselves.

Invariants (tests cite the numbers):

D1  Causes come before consequences, then the earliest comes first. If most workers report the failure of one of them
    (another collective operation, a checkpoint that it could not write), they are consequences of that one.
D2  If every failed worker lost a peer or timed out, the first cause is the worker that they waited for, if it is known:
    the ranks that their errors name; or workers that exited with code 0 while the others still ran; or, if some timed
    out, the rank that the hang report shows, or else the workers that still ran, if that is one worker or one node.
    One that aborted while it was being stopped, or whose last lines say so, had timed out as well.
    If every worker of the run failed like that and some timed out, none was missing: they waited for each other.
    A report that was withdrawn counts only if the failures followed at once: then they were the activity.
D3  After a change of membership or on an operator's request, consequences have no other cause.
D4  No worker is both failed and stopped.
"""

from __future__ import annotations

import re

import msgspec

from tenax._core.model import (
    AWAITED,
    DEADLOCK,
    EXITED_EARLY,
    NEVER_JOINED,
    STOPPED_RESPONDING,
    Departure,
    Diagnosis,
    Evidence,
    Failure,
    Member,
    Stopped,
    by_cause,
    failure_began_at,
    truncate_failures,
    truncate_stacks,
)
from tenax._core.text import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from tenax._core.messages import HangReport
    from tenax._core.run_state import CoordinatorState, Generation

_SIGABRT = 6
_MAX_STOPPED_WITH_TEXTS = 32  # in a verdict, which is one message
_MAX_MEMBERS = 1024
_EXIT_S = 30.0  # from an exception, which may be seen as activity, to the exit of its worker
_TIMEOUTS = frozenset({"collective_timeout", "store_timeout"})
_NAMED = (
    re.compile(r"Ranks? (\d{1,9}(?:, \d{1,9})*) failed to pass monitoredBarrier"),
    # The addresses of gloo's ranks are keys of the store.
    re.compile(r"wait timeout after \d+ ?ms, keys: \S*//cpu//\d+/(\d{1,9})\b"),
    # JAX's coordination service lists tasks, one per line.
    re.compile(r"\(stopped sending heartbeats\):\s+(\d[\d\s]{0,2000})"),
    re.compile(r"Barrier timed out\. Id: (?!Shutdown)[^']{1,1000}?Some timed out task names:\s+(\d[\d\s]{0,2000})"),
    re.compile(r"\[([\d, ]{1,2000})\] (?:finished collective #\d+, but )?didn't join collective"),
)
# Ranks that report the failure of one rank: torch's check of collectives, and its distributed checkpoint.
_FAILED_RANK = re.compile(
    r"but Rank (\d{1,9}) is running collective|CheckpointException ranks:dict_keys\(\[(\d{1,9})\]\)"
)
# From c10d's store, gloo and JAX's coordination service: some workers never connected.
_NEVER_JOINED = re.compile(
    r"waiting for clients|keys: /default_pg/0//cpu//"
    r"|CoordinationService/RegisterTask|Timed out .*register_?task|waiting for .*tasks? to (?:connect|register)"
)


def diagnosis_of(state: CoordinatorState) -> Diagnosis:
    """Return the diagnosis of the last generation; while it runs or ends, what is known so far."""
    from tenax._core.run_state import EndCause, Ending

    known = state.verdict or state.last.diagnosis
    is_change = isinstance(state.phase, Ending) and state.phase.cause is not EndCause.FAILURE
    return known or diagnose(state.last, state.generation, is_change=is_change)


def diagnose(last: Generation, number: int, *, is_change: bool) -> Diagnosis:
    """Return what happened to this generation, as far as its members have reported."""
    is_change |= bool(last.lost or last.drained or last.is_uncharged)
    failures = sorted(_after_named(last, number), key=by_cause)
    if failures and failures[0].evidence.is_consequence and not is_change:
        awaited = _awaited(last, number, failures)
        named = {each.global_rank for each in awaited}
        rest = [each for each in failures if each.global_rank not in named]
        failures = [*awaited, *rest] if awaited else sorted(_deadlocked(last, failures), key=by_cause)
    failed = {failure.global_rank for failure in failures}
    stopped = [each for rank, each in last.stopped.items() if rank not in failed]
    left = [Departure(label, "lost", why) for label, why in last.lost.items()]
    return Diagnosis(
        failures=tuple(failures),
        stopped=(*stopped[:_MAX_STOPPED_WITH_TEXTS], *(each.brief() for each in stopped[_MAX_STOPPED_WITH_TEXTS:])),
        left=(*left, *(Departure(label, "drained") for label in last.drained if label not in last.lost)),
        members=tuple(last.parts.values())[:_MAX_MEMBERS],
        is_change=is_change,
    )


def truncated(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis so that it fits into a message."""
    return msgspec.structs.replace(diagnosis, failures=truncate_failures(diagnosis.failures))


def describe_first_cause(first: Failure) -> str:
    """Return one short sentence: which worker, and whether it failed or the others waited for it."""
    what = first.reason if first.evidence.cause in AWAITED else "failed"
    return f"rank {first.global_rank}{f' on {first.host}' if first.host else ''} {what}"


def missing_ranks(texts: Iterable[str]) -> list[int]:
    """Return the ranks that these messages report as missing."""
    found: set[int] = set()
    for text in texts:
        for pattern in _NAMED:
            for match in pattern.finditer(text):
                found.update(int(number) for number in re.findall(r"\d+", match[1]) if len(number) < 10)
    return sorted(found)


def _awaited(last: Generation, number: int, victims: list[Failure]) -> list[Failure]:
    """Return the workers that the victims waited for, as failures; none if they are not known (D2)."""
    failed = {failure.global_rank for failure in victims}
    timed_out = [each for each in victims if each.evidence.cause in _TIMEOUTS]
    known = (last.accounted | last.done) - last.gone
    early = {
        rank: part
        for node_id, part in last.parts.items()
        if node_id in known
        for rank in range(part.first_rank, part.first_rank + part.slots)
        if rank not in failed and rank not in last.stopped and rank not in last.held
    }
    evidence = (each.evidence for each in victims)
    texts = (text for each in evidence for text in (each.proof, each.message, each.traceback))
    ended = _ended_later(victims)
    named = [rank for rank in missing_ranks(texts) if rank in last.stopped or rank in early or rank in ended]
    at = min(failure_began_at(each) for each in victims)
    hang = _hang_at(last, at)
    ranks = named or sorted(early) or (_silent(last, hang, failed) if timed_out else [])
    never_joined = any(_NEVER_JOINED.search(f"{each.evidence.message}\n{each.evidence.proof}") for each in timed_out)
    waited = _waited(*(sum(each.global_rank not in ranks for each in group) for group in (victims, timed_out)))
    found = []
    for rank in ranks:
        stopped = last.stopped.get(rank) or ended.get(rank)
        if stopped is None:
            part = early[rank]
            cause, reason = EXITED_EARLY, f"exited with code 0 while others still ran; {waited}"
            stopped = Stopped(rank - part.first_rank, rank, 0, 0, host=part.host)
        elif never_joined:
            cause, reason = NEVER_JOINED, f"never joined the process group; {waited}"
        else:
            cause, reason = STOPPED_RESPONDING, f"stopped responding; {waited}"
        found.append(_as_failure(hang, number, stopped, cause, reason, at))
    return found


def _ended_later(victims: list[Failure]) -> dict[int, Stopped]:
    """Return the victims that failed after the first one: the exit of those that waited may have ended them."""
    first_at = min(failure_began_at(each) for each in victims)
    return {
        each.global_rank: Stopped(
            each.local_rank,
            each.global_rank,
            each.pid,
            each.exit_code,
            host=each.host,
            last_lines=each.evidence.last_lines,
            log_file=each.evidence.log_file,
        )
        for each in victims
        if failure_began_at(each) > first_at
    }


def _after_named(last: Generation, number: int) -> list[Failure]:
    """Return the failures; those that report one that another rank has, as consequences of it (D1).

    If that rank was stopped before it could fail, its failure is what the others report.
    """
    failures = list(last.failures.values())
    found = {each.global_rank: _FAILED_RANK.search(each.evidence.message) for each in failures}
    named = {rank: int(match[match.lastindex or 0]) for rank, match in found.items() if match is not None}
    ranks = list(named.values())
    first = next((rank for rank in ranks if 2 * ranks.count(rank) > len(named)), None)
    is_certain = len(named) > 1 or any(match is not None and match[2] for match in found.values())  # a checkpoint
    if first in last.stopped and is_certain:  # if two collectives differ, one rank alone does not know which is right
        report = min((each for each in failures if named.get(each.global_rank) == first), key=failure_began_at)
        evidence = msgspec.structs.replace(report.evidence, log_file=last.stopped[first].log_file)
        stopped = _as_failure(None, number, last.stopped[first], report.evidence.cause, "", failure_began_at(report))
        failures = [msgspec.structs.replace(stopped, evidence=evidence), *failures]
    elif first not in named:
        return failures
    return [
        each
        if each.global_rank == first or each.global_rank not in named
        else msgspec.structs.replace(each, evidence=msgspec.structs.replace(each.evidence, is_consequence=True))
        for each in failures
    ]


def _deadlocked(last: Generation, victims: list[Failure]) -> list[Failure]:
    """Return the failures; if all workers failed, those that timed out are causes: no worker was missing (D2)."""
    if len(victims) < last.world_size:
        return victims
    return [
        msgspec.structs.replace(
            each, evidence=msgspec.structs.replace(each.evidence, cause=DEADLOCK, is_consequence=False)
        )
        if each.evidence.cause in _TIMEOUTS
        else each
        for each in victims
    ]


def _hang_at(last: Generation, at: float) -> HangReport | None:
    """Return the report of the hang in which the generation was when it failed."""
    hang = last.hang
    if hang is None or (hang.over_at is not None and hang.over_at + _EXIT_S < at):
        return None
    return hang.report


def _silent(last: Generation, hang: HangReport | None, failed: set[int]) -> list[int]:
    """Return the ranks that still ran when the others had timed out, if they are one worker or one node."""
    if hang is not None and hang.is_odd:
        return [rank for rank in hang.locations[0].ranks if rank in last.stopped]
    failing = {rank for rank, each in last.stopped.items() if _has_timed_out(each)}
    silent = [rank for rank in last.stopped if rank not in failed | failing]
    nodes = {_part_of(last, rank) for rank in silent}
    is_one_node = not failing and len(nodes) == 1 and any(_part_of(last, rank) not in nodes for rank in failed)
    return sorted(silent) if len(silent) == 1 or is_one_node else []


def _has_timed_out(stopped: Stopped) -> bool:
    """Whether a worker that was stopped was about to fail like those that it waited with."""
    return stopped.exit_code == -_SIGABRT or any(_NEVER_JOINED.search(line) for line in stopped.last_lines)


def _part_of(last: Generation, rank: int) -> Member | None:
    return next((part for part in last.parts.values() if 0 <= rank - part.first_rank < part.slots), None)


def _waited(victims: int, timed_out: int) -> str:
    who = counted(victims, "rank")
    if timed_out == victims:
        return f"{who} timed out waiting for it"
    return f"{who} lost the connection to it" if not timed_out else f"{who} timed out or lost the connection to it"


def _as_failure(hang: HangReport | None, number: int, stopped: Stopped, cause: str, reason: str, at: float) -> Failure:
    stacks = stopped.stacks
    if not stacks and hang is not None:
        stacks = next((each.stacks for each in hang.locations if stopped.global_rank in each.ranks), "")
    return Failure(
        generation=number,
        local_rank=stopped.local_rank,
        global_rank=stopped.global_rank,
        pid=stopped.pid,
        exit_code=stopped.exit_code,
        seen_at=at,
        reason=reason,
        evidence=Evidence(
            cause=cause,
            last_lines=stopped.last_lines,
            last_lines_of="output",
            log_file=stopped.log_file,
            stacks=truncate_stacks(stacks),
        ),
        was_stopped=cause != EXITED_EARLY,
        host=stopped.host,
    )
