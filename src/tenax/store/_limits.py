"""Limits of a store server. A client that exceeds one is disconnected; nothing else happens.

The protocol has no error replies: closing the connection is the only error. The limits for keys, values and keys per
request are those of torch's server, which has no others.
"""

from __future__ import annotations


class Limits:
    """Frozen. The defaults suit several thousand workers; tests and small hosts use less."""

    key_bytes: int
    value_bytes: int  # also after an append
    keys_per_request: int
    request_bytes: int  # one request with many keys, including Python's overhead
    answer_bytes: int  # one answer with many values
    total_keys: int
    total_bytes: int  # keys, values, queues and waiters, including Python's overhead
    connections: int
    unread_bytes: int  # answers that one client has not read; beyond it the server stops reading its requests
    waiting_keys: int  # keys that one client waits for
    held_bytes: int  # unread answers and incomplete requests of all clients; beyond it the largest holder is dropped
    handshake_s: float  # the timeout for the greeting
    silent_per_address: int  # connections without a greeting; beyond it the oldest is closed
    idle_per_address: int  # connections with a greeting but no request; beyond it the median by age is closed

    def __init__(
        self,
        *,
        key_bytes: int = 8 << 10,
        value_bytes: int = 8 << 20,
        keys_per_request: int = 128 << 10,
        request_bytes: int = 64 << 20,
        answer_bytes: int = 256 << 20,
        total_keys: int = 1 << 20,
        total_bytes: int = 1 << 30,
        connections: int = 16 << 10,
        unread_bytes: int = 1 << 20,
        waiting_keys: int = 128 << 10,
        held_bytes: int = 512 << 20,
        handshake_s: float = 5.0,
        silent_per_address: int = 1 << 10,
        idle_per_address: int = 4 << 10,
    ) -> None:
        given = locals()
        for name in type(self).__annotations__:
            if given[name] <= 0:
                raise ValueError(f"the limit {name} must be greater than zero, not {given[name]}")
            object.__setattr__(self, name, given[name])

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"limits are frozen: make new ones with {name}={value!r}")

    def __repr__(self) -> str:
        return f"Limits({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
