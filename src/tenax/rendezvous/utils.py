"""Parses rendezvous endpoints (``host:port``) and options (``key=value,key=value``) of the command line."""

from __future__ import annotations

import random
import re
import socket
import time

__all__ = ["parse_rendezvous_endpoint"]

_HOST = re.compile(r"[\w.:-]+")
_PORT = re.compile(r"[0-9]{1,5}")
_MAX_PORTS = 1 << 16
_MIN_DELAY_S = 0.01

STORE_ERRORS = (RuntimeError, ValueError, OSError)  # of the stores of torch and tenax; TimeoutError is an OSError


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Return host and port of ``host``, ``host:port``, ``[v6]`` or ``[v6]:port``. An empty endpoint is this host.

    An IPv6 address needs brackets: without them the text after the last colon is the port.
    """
    text = (endpoint or "").strip()
    if not text:
        return "localhost", default_port
    host, port = text, default_port
    is_bracketed = text.startswith("[") and text.endswith("]")
    if not is_bracketed and ":" in text:
        host, _, digits = text.rpartition(":")
        port = int(digits) if _PORT.fullmatch(digits) else _MAX_PORTS
        if port >= _MAX_PORTS:
            raise ValueError(
                f"the port of the rendezvous endpoint {text!r} is {digits!r}; expected a number below 65536"
            )
    if len(host) > 1 and host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not _HOST.fullmatch(host):
        raise ValueError(f"the host of the rendezvous endpoint {text!r} is {host!r}; expected a name or an IP address")
    return host, port


def _parse_rendezvous_config(config_str: str) -> dict[str, str]:
    """Parse ``key=value,key=value``. Every option needs a value."""
    config: dict[str, str] = {}
    if not config_str.strip():
        return config
    for option in config_str.strip().split(","):
        key, _, value = (part.strip() for part in option.partition("="))
        if not key:
            raise ValueError(f"a rendezvous option in {config_str!r} has no name; write key=value,key=value")
        if not value:
            raise ValueError(f"the rendezvous option {key!r} has no value; write {key}=value")
        config[key] = value
    return config


def _delay(seconds: float | tuple[float, float]) -> None:
    """Sleep for that long, or for a random time between two bounds. Less than 10 ms is skipped.

    Not used in tenax; third-party launchers and handlers import it.
    """
    if isinstance(seconds, tuple):
        seconds = random.uniform(*seconds)  # noqa: S311 - spreads nodes, hides nothing
    if seconds >= _MIN_DELAY_S:
        time.sleep(seconds)


def _matches_machine_hostname(host: str) -> bool:
    """Return whether this name or address is one of this machine's.

    Not used in tenax; third-party launchers import it.
    """
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        return can_bind(host, 0)
    except OSError:
        return False


def can_bind(host: str, port: int) -> bool:
    """Return whether the host has an address of this machine with a free port. Raises OSError if it has none at all."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, proto, _, address in found:
        try:
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                return True
        except OSError:
            continue
    return False
