"""The address for OTLP over HTTP, from a flag or from OpenTelemetry's variables. Pure."""

from __future__ import annotations

from tenax._core.text import hide_passwords

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def otlp_address(written: str, signal: str, env: Mapping[str, str]) -> str:
    """Return the full address for a signal ("metrics", "traces"); empty if none is configured. Raises ValueError."""
    if written and not written.startswith(("http://", "https://")):
        shown = hide_passwords(written)
        raise ValueError(f"invalid endpoint {shown!r}; expected a URL such as http://localhost:4318")
    if written:
        return with_path(written, signal)
    base = env.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    # The variable of this signal is a full address; the general one has no path.
    whole = f"{base.rstrip('/')}/v1/{signal}" if base else ""
    return env.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT") or whole


def with_path(endpoint: str, signal: str) -> str:
    """Add the default path to an address without one."""
    path = endpoint.partition("://")[2].partition("/")[2]
    return endpoint if path else f"{endpoint.rstrip('/')}/v1/{signal}"
