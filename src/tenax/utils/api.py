"""Utilities for launchers: a required environment variable, a socket with a free port, macros in arguments."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable
    from typing import Any

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]


def get_env_variable_or_raise(env_name: str) -> str:
    """Return the value of an environment variable, which may be empty. Raises ValueError if it is not set."""
    value = os.environ.get(env_name)
    if value is None:
        raise ValueError(f"the environment variable {env_name} is required, but not set")
    return value


def get_socket_with_port() -> socket.socket:
    """Return a socket that listens on a free port of localhost; ``.getsockname()[1]`` is the port.

    Pass on the socket itself where possible. If it is closed and only the number is passed on, another process may take
    the port first.
    """
    from tenax._io.listen import listen

    try:
        return listen("localhost")
    except OSError as error:
        raise RuntimeError(f"could not listen on any address of localhost: {error}; check the hosts file") from error


class macros:
    """The macro in a program's arguments that is replaced by the worker's local rank."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: Iterable[Any], local_rank: str) -> list[Any]:
        """Return the arguments with ``${local_rank}`` replaced. Other text, such as ``$$``, is not changed."""
        return [arg.replace(macros.local_rank, str(local_rank)) if isinstance(arg, str) else arg for arg in args]
