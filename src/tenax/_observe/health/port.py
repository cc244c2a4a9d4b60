"""Where health checks are answered: a variable, or nowhere."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
_HIGHEST = 65535


def health_check_port(environ: Mapping[str, str]) -> int | None:
    """The port, 0 for any that is free; None: nobody wants health checks. Raises ValueError with a sentence."""
    written = environ.get(TORCHELASTIC_HEALTH_CHECK_PORT, "").strip()
    if not written:
        return None
    if not (written.isascii() and written.isdecimal() and int(written) <= _HIGHEST):
        raise ValueError(
            f"{TORCHELASTIC_HEALTH_CHECK_PORT} is {written!r}; expected the number of a port from 0 to {_HIGHEST}, "
            "or leave it unset for no health checks"
        )
    return int(written)
