"""Goodput in words: what the time of a run was spent on, in one line for people. Pure.

The same sentence stands under a run in the terminal, in a report and on a page.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._core.ledger import Goodput

_SHORT_S = 10.0  # of a run that took no longer, and in which nothing failed, only the first part is said
_AT_ONCE_S = 0.0005
_ENDLESS = float("inf")  # what a broken journal may come to
_NEARLY_NONE = "under 1 %"
_PARTS = (
    ("starting_s", "starting"),
    ("waiting_s", "waiting"),
    ("stopping_s", "stopping"),
    ("lost_s", "lost"),
)


def goodput_in_words(goodput: Goodput) -> str:
    """One line without a full stop. Empty: no time has passed, so there is nothing to say."""
    spent = goodput.spent
    total_s = spent.total_s
    if not 0 < total_s < _ENDLESS:
        return ""
    line = f"{percent(spent.training_s, total_s)} of {duration_in_words(total_s)} was training"
    had_trouble = bool(goodput.to_detect.count or goodput.to_recover.count or goodput.lost_steps or spent.lost_s > 0)
    if total_s < _SHORT_S and not had_trouble:
        return line
    parts = []
    for name, words in _PARTS:
        seconds: float = getattr(spent, name)
        steps = _steps(goodput.lost_steps) if name == "lost_s" else ""
        if round(100 * seconds / total_s):
            parts.append(f"{words} {percent(seconds, total_s)}{steps}")
        elif steps:  # they took some time, however little of it is known
            parts.append(f"{words} {_NEARLY_NONE}{steps}")
    return "; ".join(each for each in (line, ", ".join(parts), failures_in_words(goodput)) if each)


def failures_in_words(goodput: Goodput) -> str:
    """How fast failures were noticed and got over. Empty: there were none."""
    said = []
    if (to_detect_s := goodput.to_detect.seconds) is not None:
        said.append("detected at once" if to_detect_s < _AT_ONCE_S else f"detected in {duration_in_words(to_detect_s)}")
    if (to_recover_s := goodput.to_recover.seconds) is not None:
        said.append(f"recovered in {duration_in_words(to_recover_s)}")
    if not said:
        return ""
    count = max(goodput.to_detect.count, goodput.to_recover.count)
    return f"{'the failure' if count == 1 else 'failures'} {' and '.join(said)}{' on average' if count > 1 else ''}"


def percent(part: float, whole: float) -> str:
    """In whole percent. Nearly all is not all: then it has a decimal, and is rounded down."""
    share = 100 * part / whole if whole > 0 else 0.0
    if 99.5 <= share < 100:
        return f"{int(share * 10) / 10:.1f} %"
    if 0 < share < 0.5:
        return _NEARLY_NONE
    return f"{share:.0f} %"


def duration_in_words(seconds: float) -> str:
    """The two units that matter: ``140 ms``, ``2.5 s``, ``12 s``, ``2 min 3 s``, ``2 h 3 min``, ``3 d 4 h``."""
    seconds = max(0.0, seconds)
    if seconds == _ENDLESS:
        return "?"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    # Rounded first: 59 minutes and 59 seconds and a half are an hour, not 60 minutes.
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if round(seconds) < 3600:
        return _two(round(seconds), 60, "min", "s")
    return _two(minutes, 60, "h", "min") if minutes < 1440 else _two(hours, 24, "d", "h")


def _two(count: int, per: int, unit: str, smaller: str) -> str:
    many, rest = divmod(count, per)
    return f"{many} {unit} {rest} {smaller}" if rest else f"{many} {unit}"


def _steps(count: int) -> str:
    return f" ({count:,} {'step' if count == 1 else 'steps'} done again)" if count else ""
