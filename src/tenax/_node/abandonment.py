"""The time that a process may survive SIGKILL before it is abandoned."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
_DEFAULT_S = 10.0


def abandon_s_from(environ: Mapping[str, str], given: float | None = None) -> float:
    """Return ``given``, else the variable, else 10 s. Raises ValueError.

    As in TorchElastic, a value of 0 or less counts as not given.
    """
    if given is not None and given > 0:
        return given
    written = environ.get(TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, "")
    try:
        seconds = float(written or 0)
    except ValueError:
        seconds = float("nan")
    if seconds <= 0:
        return _DEFAULT_S
    if not seconds < float("inf"):
        raise ValueError(f"{TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT} is {written!r}; expected a number of seconds")
    return seconds
