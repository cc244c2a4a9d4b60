"""The watchdog's settings: two environment variables, read only here."""

from __future__ import annotations

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"


class WatchdogPlan(msgspec.Struct, frozen=True):
    """The settings of an enabled watchdog."""

    timer_file: str = ""  # path of its pipe; empty: a temporary one


def watchdog_plan(environ: Mapping[str, str]) -> WatchdogPlan | None:
    """Return the plan, or None if the watchdog is off. Raises ValueError if the pipe cannot be created there."""
    if environ.get(TORCHELASTIC_ENABLE_FILE_TIMER) != "1":
        return None
    # In a worker, the variable names the pipe of the parent agent, which this nested agent must not use.
    timer_file = "" if "TENAX_GENERATION" in environ else environ.get(TORCHELASTIC_TIMER_FILE, "")
    if timer_file:
        from tenax.timer._watchdog_pipe import check_path

        check_path(timer_file)
    return WatchdogPlan(timer_file)


def watchdog_note(environ: Mapping[str, str]) -> str:
    """Return a warning if the variable is set to a value that does not enable the watchdog, else ""."""
    value = environ.get(TORCHELASTIC_ENABLE_FILE_TIMER, "")
    if value.strip().lower() in ("", "0", "1", "false", "no", "off") and value.strip() == value:
        return ""
    return (
        f"{TORCHELASTIC_ENABLE_FILE_TIMER} is {value[:40]!r}; only '1' enables the watchdog, so scopes are not watched"
    )
