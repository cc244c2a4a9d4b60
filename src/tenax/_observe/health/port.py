"""The port of health checks, from the environment."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
_MAX_PORT = 65535


def health_check_port(environ: Mapping[str, str]) -> int | None:
    """Return the port, 0 for any free port, or None for no health checks. Raises ValueError with a message."""
    written = environ.get(TORCHELASTIC_HEALTH_CHECK_PORT, "").strip()
    if not written:
        return None
    if not (written.isascii() and written.isdecimal() and int(written) <= _MAX_PORT):
        raise ValueError(
            f"{TORCHELASTIC_HEALTH_CHECK_PORT} is {written!r}; expected a port from 0 to {_MAX_PORT}, "
            "or unset for no health checks"
        )
    return int(written)
