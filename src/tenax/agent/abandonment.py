"""How long a process may survive SIGKILL before it is abandoned: a variable, or a default."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
_DEFAULT_S = 10.0


def abandon_s_from(environ: Mapping[str, str]) -> float:
    """Raises ValueError with a sentence."""
    written = environ.get(TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, "")
    if not written:
        return _DEFAULT_S
    try:
        seconds = float(written)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(
            f"{TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT} is {written!r}; expected a positive number of seconds"
        )
    return seconds
