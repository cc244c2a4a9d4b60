"""Classifies failures: what ended a worker, whether it follows from another worker's failure, and what to do.

Pure: observations in, a cause out, the same on every host and at every time. ``KINDS`` holds all rules: what each kind
means, what to do next, and how to recognize it.

Invariants:

1. **Evidence is checked in this order**: the kernel's proof of an out-of-memory kill; a signal from outside; the
   exception; the kernel log; the last output; the signal of a crash; the exit code.
2. In a chain of exceptions (``During handling of ...``), every exception is searched for exhausted or broken resources
   (memory, disk, descriptors, a GPU), which are never a side effect. Then the last exception decides, then the earlier.
3. Within one text, rules are tried in the order of the table: the specific before the general.
4. **Only a lost peer or a timeout of a collective is a consequence.** Any other error is a cause of its own, and the
   earliest cause is the first.
5. Source lines quoted in a traceback are not evidence: only the lines of the exceptions themselves are.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import msgspec

from tenax._core.model import AWAITED, NEVER_JOINED, Diagnosis, Evidence, Failure
from tenax._core.text import shortened, storable
from tenax._view.exit_text import describe_exit
from tenax._view.kinds import KINDS, RESOURCES, Kind

_MAX_PROOF = 300
_MAX_SEARCHED = 2000  # characters of a line: some patterns are quadratic in its length
_MAX_LINES_BEFORE_CRASH = 2
_MAX_CONSEQUENCE_LINES = 8  # of output: the worker survived what it printed earlier
_EXTERNAL_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
_SHELL_BASE = 128
_CONNECTING = {id: KINDS[id] for id in ("unknown_host", "unreachable", "connection_refused", "connect_timeout")}
_FAULTS = ("Fatal Python error", "Timeout")  # of the fault handler
_AT_EXIT = "thread_at_exit"  # says nothing about an exception before it
_VAGUE = frozenset({"exception", "assertion", "exit_code", "signal", "unknown"})  # the same only with the same message


class Cause(msgspec.Struct, frozen=True):
    kind: str
    is_consequence: bool
    proof: str  # the line that shows it; empty: only the exit code does
    meaning: str  # the kind's meaning, with details from the proof
    next_step: str  # what to do


_BY_SIGNAL: dict[int, str] = {number: id for id, kind in KINDS.items() for number in kind.signals}
_HEADER = "Traceback (most recent call last):"
_NOT_EVIDENCE = re.compile(
    r"During handling of the above exception|The above exception was the direct cause|Extension modules: |\[|$"
)
_LOG_PREFIX = re.compile(r"^[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]+:\d+\] ")  # of absl and glog
_GROUP = re.compile(r"^\s+\| (?! )")


def classify(
    exit_code: int, evidence: Evidence, earlier_lines: Sequence[str] = (), kernel_error: tuple[str, str] = ("", "")
) -> Cause:
    """Return the cause of a failure. Pure, total and deterministic; see the module's invariants.

    ``exit_code``: negative for a signal. ``earlier_lines``: of the worker's output, as far as they are kept.
    ``kernel_error``: the kind and line of an error of this worker or its GPU in the kernel log.
    """
    kind, proof = _recognize(exit_code, evidence, earlier_lines, kernel_error)
    return _cause(kind, storable(shortened(" ".join(_LOG_PREFIX.sub("", proof).split()), _MAX_PROOF)))


def cause_of(failure: Failure) -> Cause:
    """Return the cause of a failure in a verdict: as classified on its own host, otherwise from its evidence."""
    evidence = failure.evidence
    if failure.was_late:
        return _cause("scope_expired", storable(failure.reason))
    if failure.reason.startswith("could not be started"):
        return _cause("not_started", storable(failure.reason))
    kind = evidence.cause
    if kind not in KINDS:
        return classify(failure.exit_code, evidence)
    if kind == "hang":
        return _cause(kind, storable(failure.reason))
    if kind == NEVER_JOINED:
        # torch retries until the others time out, and the worker prints why.
        found = _first_match(evidence.last_lines[-_MAX_CONSEQUENCE_LINES:][::-1], _CONNECTING)
        return _cause(found[0], storable(shortened(found[1], _MAX_PROOF))) if found is not None else _cause(kind, "")
    if kind in AWAITED:
        return _cause(kind, "")
    return msgspec.structs.replace(_cause(kind, evidence.proof), is_consequence=evidence.is_consequence)


class Related(NamedTuple):
    """The failures of a generation by their relation to the first cause."""

    first: Failure | None
    same: list[Failure]  # the same cause
    victims: list[Failure]  # consequences
    others: list[Failure]  # independent


def related(diagnosis: Diagnosis) -> Related:
    """Return which failures are the first cause, have the same cause, follow from it, or are independent."""
    first = diagnosis.first
    found = Related(first, [], [], [])
    cause = cause_of(first) if first is not None else None
    for failure in diagnosis.failures if first is None else diagnosis.failures[1:]:
        its = cause_of(failure)
        if its.is_consequence and (cause is None or not cause.is_consequence):
            found.victims.append(failure)
        elif first is not None and cause is not None and _has_same_cause(cause, first, its, failure):
            found.same.append(failure)
        else:
            found.others.append(failure)
    return found


def _has_same_cause(cause: Cause, first: Failure, its: Cause, failure: Failure) -> bool:
    if its.kind != cause.kind or cause.is_consequence:
        return False
    a, b = first.evidence, failure.evidence
    return cause.kind not in _VAGUE or (bool(a.message) and (a.error_type, a.message) == (b.error_type, b.message))


def what_happened(failure: Failure) -> str:
    """Return what the worker did, as the rest of a sentence that begins with its name."""
    evidence = failure.evidence
    if failure.reason:
        return failure.reason
    if evidence.out_of_memory.startswith("killed") and failure.exit_code < 0:
        return "was " + evidence.out_of_memory
    if failure.was_stopped and evidence.message:
        return f"raised {evidence.message}"
    ended = describe_exit(failure.exit_code)
    if not evidence.message:
        return ended
    # Every uncaught exception ends with exit code 1: it adds nothing to the exception.
    is_plain = failure.exit_code == 1 and evidence.error_type
    return f"raised {evidence.message}" if is_plain else f"{ended}: {evidence.message}"


def _recognize(
    exit_code: int, evidence: Evidence, earlier_lines: Sequence[str], kernel_error: tuple[str, str]
) -> tuple[str, str]:
    has_exception = bool(evidence.error_type or evidence.message)
    if evidence.out_of_memory:
        return "out_of_memory", evidence.out_of_memory
    if -exit_code in _EXTERNAL_SIGNALS and not has_exception:
        return _BY_SIGNAL.get(-exit_code, "signal"), ""
    raised = _match_exceptions(evidence) if has_exception else None
    if raised is not None and raised[0] == "connect_timeout":  # torch retries, and prints why it has to
        return _first_match([*earlier_lines, *evidence.last_lines][::-1], _CONNECTING) or raised
    if kernel_error[0] and (raised is None or raised[0] in RESOURCES):
        return kernel_error
    is_native = not evidence.error_type or evidence.error_type in _FAULTS or "::" in evidence.error_type
    is_crash = -exit_code in _CRASHES and is_native  # after a Python exception, a process crashes while it exits
    is_vague = raised[0] == "child_failed" if raised else not has_exception or is_crash
    if is_vague and (printed := _match_output(exit_code, evidence, has_exception)) is not None:
        return printed
    return raised or _from_exit_code(exit_code, evidence, has_exception, is_crash)


def _match_exceptions(evidence: Evidence) -> tuple[str, str] | None:
    last, earlier = _exception_lines(evidence)
    return (
        _first_match([*last, *earlier], RESOURCES, evidence.traceback)
        or _first_match(last, KINDS, evidence.traceback)
        or _first_match(earlier, KINDS, evidence.traceback)
    )


def _exception_lines(evidence: Evidence) -> tuple[list[str], list[str]]:
    """Return the lines of the last exception, and of those before it in its chain, newest first (invariant 5)."""
    blocks: list[list[str]] = [[]]
    for line in evidence.traceback.split("\n"):
        if line.rstrip().endswith(_HEADER):
            blocks.append([])
            continue
        text = _GROUP.sub("", line)
        if text.startswith("  what():"):
            text = text.strip()
        if not text.startswith((" ", "\t")) and not _NOT_EVIDENCE.match(text):
            blocks[-1].append(text)
    last = [evidence.message, *blocks.pop()]
    earlier = [line for block in reversed(blocks) for line in block]
    return [line for line in last if line.strip()], earlier


def _match_output(exit_code: int, evidence: Evidence, has_exception: bool) -> tuple[str, str] | None:
    """Match the output of a process that exited or aborted by itself and left no better evidence."""
    lines = [line for line in evidence.last_lines if line.strip() and not line.startswith("    ")]
    kinds = {id: kind for id, kind in KINDS.items() if kind.trust_output}
    own = {id: kind for id, kind in kinds.items() if not kind.is_consequence}
    if exit_code < 0 and -exit_code != signal.SIGABRT:
        # It crashed: only what it printed directly before may be the reason.
        crashed_at = next((at for at, line in enumerate(lines) if line.startswith("Fatal Python error")), 0)
        before = lines[max(0, crashed_at - _MAX_LINES_BEFORE_CRASH) : crashed_at]
        return _first_match(before[::-1], own)
    if has_exception and exit_code >= 0:  # output of a child: match resources, not lost peers
        return _first_match(lines[::-1], {id: kind for id, kind in kinds.items() if id in RESOURCES})
    if has_exception:
        del own[_AT_EXIT]
    late = lines if exit_code < 0 else lines[-_MAX_CONSEQUENCE_LINES:]
    certain = dict(takewhile(lambda item: item[0] != "connection_refused", own.items()))
    return (
        _first_match(lines[::-1], certain)
        or _first_match(late[::-1], {id: kind for id, kind in kinds.items() if kind.is_consequence})
        or _first_match(lines[::-1], own)
    )


def _from_exit_code(code: int, evidence: Evidence, has_exception: bool, is_crash: bool) -> tuple[str, str]:
    number = -code if code < 0 else code - _SHELL_BASE if _SHELL_BASE < code <= _SHELL_BASE + 64 else 0
    is_python_fault = evidence.error_type in _FAULTS
    if has_exception and not is_python_fault and not is_crash:
        return "exception", evidence.message or evidence.error_type
    if number:
        kind = _BY_SIGNAL.get(number, "signal")
        return kind, evidence.message if has_exception else "" if code < 0 else describe_exit(code)
    if has_exception:
        return "aborted" if is_python_fault else "exception", evidence.message or evidence.error_type
    last = evidence.last_lines[-1] if evidence.last_lines else ""
    return {127: "script_not_found", 126: "not_executable", 0: "unknown"}.get(code, "exit_code"), last


def _first_match(lines: Sequence[str], kinds: Mapping[str, Kind], traceback: str = "") -> tuple[str, str] | None:
    for id, kind in kinds.items():
        found = _first_line(lines, kind.patterns)
        if not found and kind.within is not None and re.search(kind.within[0], traceback):
            found = _first_line(lines, kind.within[1:])
        if found:
            return id, found
    return None


def _first_line(lines: Sequence[str], patterns: tuple[str, ...]) -> str:
    if not patterns:
        return ""
    pattern = re.compile("|".join(patterns))
    return next((line for line in lines if pattern.search(line, 0, _MAX_SEARCHED)), "")


def _cause(kind_id: str, proof: str) -> Cause:
    kind = KINDS[kind_id]
    meaning = kind.meaning
    if kind.detail is not None:
        match = re.search(kind.detail.pattern, proof)
        found = next((group for group in match.groups() if group), "") if match is not None else ""
        what = kind.detail.named.replace("{0}", found) if found else kind.detail.otherwise
        meaning = meaning.replace("{what}", what)
    return Cause(kind_id, kind.is_consequence, proof, meaning, kind.next_step)
