"""Where OTLP over HTTP goes: what a person wrote, or what OpenTelemetry's own variables say. Pure."""

from __future__ import annotations

from tenax._core.text import hide_passwords

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def otlp_address(written: str, signal: str, env: Mapping[str, str]) -> str:
    """The whole address for a signal ("metrics", "traces"); empty: nobody says. Raises ValueError for a wrong one."""
    if written and not written.startswith(("http://", "https://")):
        shown = hide_passwords(written)
        raise ValueError(f"{shown!r} is not an endpoint; expected one such as http://localhost:4318")
    if written:
        return with_path(written, signal)
    base = env.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    # One variable is for this signal and is taken as it is; the other is for everything, without the path.
    whole = f"{base.rstrip('/')}/v1/{signal}" if base else ""
    return env.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT") or whole


def with_path(endpoint: str, signal: str) -> str:
    """An address without a path means the usual one."""
    path = endpoint.partition("://")[2].partition("/")[2]
    return endpoint if path else f"{endpoint.rstrip('/')}/v1/{signal}"
