"""Whether scopes are watched, and through which pipe: two variables, read here and nowhere else."""

from __future__ import annotations

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"


class WatchdogPlan(msgspec.Struct, frozen=True):
    """The watchdog is on."""

    timer_file: str = ""  # where its pipe is to be; empty: anywhere


def watchdog_plan(environ: Mapping[str, str]) -> WatchdogPlan | None:
    """None: nobody asked for it. Raises ValueError with a sentence if the pipe cannot be where it should be."""
    if environ.get(TORCHELASTIC_ENABLE_FILE_TIMER) != "1":
        return None
    # In a worker, the variable names the pipe of the agent above us; ours is another.
    timer_file = "" if "TENAX_GENERATION" in environ else environ.get(TORCHELASTIC_TIMER_FILE, "")
    if timer_file:
        from tenax.timer._watchdog_pipe import check_path

        check_path(timer_file)
    return WatchdogPlan(timer_file)


def watchdog_note(environ: Mapping[str, str]) -> str:
    """What a person should know who meant to switch it on and did not; empty if nobody did."""
    value = environ.get(TORCHELASTIC_ENABLE_FILE_TIMER, "")
    if value.strip().lower() in ("", "0", "1", "false", "no", "off") and value.strip() == value:
        return ""
    return (
        f"{TORCHELASTIC_ENABLE_FILE_TIMER} is {value[:40]!r}, and only '1' switches the watchdog on: nobody watches "
        "whether workers leave their scopes"
    )
