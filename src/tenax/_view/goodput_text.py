"""Formats goodput and durations for people. Pure.

The terminal, the reports and the pages show the same line.
"""

from __future__ import annotations

from tenax._core.text import format_duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._core.ledger import Goodput

_SHORT_S = 10.0  # a shorter run without failures gets only the first part of the line
_INSTANT_S = 0.0005
_ALMOST_NONE = "under 1 %"
_PARTS = (
    ("starting_s", "starting"),
    ("waiting_s", "waiting"),
    ("stopping_s", "stopping"),
    ("lost_s", "lost"),
)


def format_goodput(goodput: Goodput) -> str:
    """Return one line without a full stop; empty if no time has passed."""
    spent = goodput.spent
    total_s = spent.total_s
    if not 0 < total_s < float("inf"):  # infinite in a damaged journal
        return ""
    line = f"{percent(spent.training_s, total_s)} of {format_duration(total_s)} was training"
    had_trouble = bool(goodput.to_detect.count or goodput.to_recover.count or goodput.lost_steps or spent.lost_s > 0)
    if total_s < _SHORT_S and not had_trouble:
        return line
    parts = []
    for name, label in _PARTS:
        seconds: float = getattr(spent, name)
        steps = _steps(goodput.lost_steps) if name == "lost_s" else ""
        if round(100 * seconds / total_s):
            parts.append(f"{label} {percent(seconds, total_s)}{steps}")
        elif steps:  # they took some time, even if it rounds to 0 %
            parts.append(f"{label} {_ALMOST_NONE}{steps}")
    return "; ".join(each for each in (line, ", ".join(parts), format_failures(goodput)) if each)


def format_failures(goodput: Goodput) -> str:
    """Return how fast failures were detected and recovered from; empty if there were none."""
    parts = []
    if (to_detect_s := goodput.to_detect.seconds) is not None:
        parts.append(
            "detected in < 1 ms" if to_detect_s < _INSTANT_S else f"detected in {format_duration(to_detect_s)}"
        )
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


def _steps(count: int) -> str:
    return f" ({count:,} {'step' if count == 1 else 'steps'} repeated)" if count else ""
