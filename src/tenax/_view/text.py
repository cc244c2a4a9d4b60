"""Goodput, times, failures and ends as text for people. Pure.

The terminal, the reports and the pages show the same texts.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from tenax._core.ledger import Goodput
from tenax._core.model import Outcome
from tenax._core.text import counted, format_duration
from tenax._view.exit_text import signal_name

_SHORT_S = 10.0  # a shorter run without failures gets only the first part of the line
_INSTANT_S = 0.0005
_ALMOST_NONE = "under 1 %"
_PARTS = ("starting", "waiting", "stopping", "hung", "lost")
_MAX_NAME = 60
_GENERAL = frozenset({"exception", "signal", "exit_code", "unknown"})  # less specific than the class or the number
# Causes that are the end of the process itself, which the message of the failure already states.
STATED_BY_EXIT = _GENERAL | {
    *("killed", "terminated", "hung_up", "segmentation_fault", "bus_error", "illegal_instruction"),
    *("arithmetic", "aborted", "cpu_limit", "forbidden_call"),
}
_CAUSES = {  # ids of causes that are no plain text without their underscores
    "arithmetic": "arithmetic error",
    "memory": "memory allocation failed",
    "not_a_number": "NaN or infinite value",
    "quota": "disk quota used up",
    "read_only": "read-only file system",
    "shared_memory": "shared memory full",
}
_ACRONYMS = {"cuda": "CUDA", "gpu": "GPU", "nccl": "NCCL", "cpu": "CPU", "io": "I/O"}  # in the ids of causes
# Why generations end before their run.
EARLY_ENDS = {
    "failure": "a worker failed",
    "loss": "a node was lost",
    "drain": "a node was drained",
    "join": "a node joined",
    "request": "an operator restarted the run",
    "latecomer": "a node reconnected late",
}
_OUTCOMES = {outcome.value: outcome.text for outcome in Outcome}


def fields_of(struct: msgspec.Struct, *names: str) -> dict[str, Any]:
    """Return these fields by name, for a view that has them too."""
    return {name: getattr(struct, name) for name in names}


def format_goodput(goodput: Goodput | None) -> str:
    """Return one line without a full stop; empty if it is not known or no time has passed."""
    if goodput is None or not 0 < goodput.spent.total_s < float("inf"):  # infinite in a damaged journal
        return ""
    spent = goodput.spent
    total_s = spent.total_s
    line = f"{percent(spent.training_s, total_s)} of {format_duration(total_s)} was training"
    failures = goodput.to_detect.count + goodput.to_recover.count
    had_trouble = bool(failures or goodput.lost_steps or spent.lost_s + spent.hung_s > 0)
    if total_s < _SHORT_S and not had_trouble:
        return line
    parts, count = [], goodput.lost_steps
    repeated = f" ({count:,} {'step' if count == 1 else 'steps'} repeated)" if count else ""
    for part in _PARTS:
        seconds: float = getattr(spent, f"{part}_s")
        steps = repeated if part == "lost" else ""
        if round(100 * seconds / total_s):
            parts.append(f"{part} {percent(seconds, total_s)}{steps}")
        elif steps:  # they took some time, even if it rounds to 0 %
            parts.append(f"{part} {_ALMOST_NONE}{steps}")
    whose = "its" if goodput.survivors == 1 else "their"
    survived = f"{counted(goodput.survivors, 'worker')} kept {whose} process" if goodput.survivors else ""
    return "; ".join(each for each in (line, ", ".join(parts), format_failures(goodput), survived) if each)


def format_failures(goodput: Goodput) -> str:
    """Return how fast failures were detected and recovered from; empty if there were none."""
    parts = []
    if (to_detect_s := goodput.to_detect.seconds) is not None:
        parts.append(f"detected in {'< 1 ms' if to_detect_s < _INSTANT_S else format_duration(to_detect_s)}")
    if (to_recover_s := goodput.to_recover.seconds) is not None:
        parts.append(f"recovered in {format_duration(to_recover_s)}")
    if not parts:
        return ""
    count = max(goodput.to_detect.count, goodput.to_recover.count)
    return f"{'the failure' if count == 1 else 'failures'} {' and '.join(parts)}{' on average' if count > 1 else ''}"


def percent(part: float, whole: float) -> str:
    """Return whole percent, or one decimal rounded down above 99.5 %, so that 100 % means all."""
    share = 100 * part / whole if whole > 0 else 0.0
    if 99.5 <= share < 100:
        return f"{int(share * 10) / 10:.1f} %"
    if 0 < share < 0.5:
        return _ALMOST_NONE
    return f"{share:.0f} %"


def format_moment(at: float) -> str:
    """Return ``2026-11-16 08:02:39 UTC``; ``?`` for a time out of range, as in a damaged journal."""
    return _formatted("%Y-%m-%d %H:%M:%S UTC", at)


def format_local_moment(at: float, zone_s: int) -> str:
    """Return ``08:02:39 (2026-11-16, +01:00)``. ``zone_s``: the zone's offset from UTC."""
    minutes = abs(zone_s) // 60
    zone = f"{'-' if zone_s < 0 else '+'}{minutes // 60:02}:{minutes % 60:02}"
    return _formatted(f"%H:%M:%S (%Y-%m-%d, {zone})", at + zone_s)


def _formatted(form: str, at: float) -> str:
    try:
        return time.strftime(form, time.gmtime(at))
    except (OverflowError, OSError, ValueError):
        return "?"


def kind_of(cause: str, error_type: str, exit_code: int) -> str:
    """Return the cause if it is specific, else the exception's class, else how the process ended."""
    if cause and cause not in _GENERAL:
        return cause
    # A class as a traceback shows it: an identifier with an upper-case letter after its last dot.
    is_class = error_type.replace(".", "").isidentifier() and error_type.rpartition(".")[2][:1].isupper()
    if is_class and len(error_type) <= _MAX_NAME:
        return error_type
    return exit_summary(exit_code) if cause in ("", "signal", "exit_code") else cause


def exit_summary(exit_code: int) -> str:
    """Return ``SIGKILL`` or ``exit code 3``. A negative code is the number of the signal."""
    return f"exit code {exit_code}" if exit_code >= 0 else signal_name(-exit_code)


def cause_text(kind: str) -> str:
    """Return the kind of a failure for people: ``CUDA out of memory``."""
    return _CAUSES.get(kind) or " ".join(_ACRONYMS.get(word, word) for word in kind.split("_"))


def end_text(ended_by: str) -> str:
    """Return why a generation ended; if it ended with the run, how the run ended."""
    return EARLY_ENDS.get(ended_by) or outcome_text(ended_by)


def outcome_label(outcome: str) -> str:
    """Return the outcome of a run as a label: ``cancelled``."""
    return _OUTCOMES[outcome] if outcome == "broken" else outcome


def outcome_text(outcome: str) -> str:
    """Return what happened to a run: ``was cancelled``."""
    return _OUTCOMES.get(outcome, outcome)
