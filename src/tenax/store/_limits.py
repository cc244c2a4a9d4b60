"""Limits: how much of everything a store takes. Whoever asks for more loses the connection, and nothing else happens.

The wire has no word for "no": closing the connection is its only error. Key, value and keys per request are what
torch's own server allows; the others are ours, because there it knows none.
"""

from __future__ import annotations


class Limits:
    """Frozen. The defaults suit some thousand workers; tests and small hosts pass less."""

    __slots__ = (
        "answer_bytes",
        "connections",
        "handshake_s",
        "held_bytes",
        "idle_per_address",
        "key_bytes",
        "keys_per_request",
        "request_bytes",
        "silent_per_address",
        "total_bytes",
        "total_keys",
        "unread_bytes",
        "value_bytes",
        "waiting_keys",
    )

    key_bytes: int
    value_bytes: int  # also of a value that was appended to
    keys_per_request: int
    request_bytes: int  # of one request with many keys, with what Python needs to keep them
    answer_bytes: int  # of one answer with many values
    total_keys: int
    total_bytes: int  # keys, values, queues and who waits for what, with what Python needs to keep them
    connections: int
    unread_bytes: int  # answers that one client does not read; then its requests are not read either
    waiting_keys: int  # that one client waits for
    held_bytes: int  # unread answers and unfinished requests of all clients; then whoever has most is dropped
    handshake_s: float  # until a new connection must have greeted
    silent_per_address: int  # connections that have not greeted; then the oldest of them is closed
    idle_per_address: int  # that greeted and sent no request; then the one in the middle, by age, is closed

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
        for name in self.__slots__:
            if given[name] <= 0:
                raise ValueError(f"the limit {name} must be greater than zero, not {given[name]}")
            object.__setattr__(self, name, given[name])

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"limits are frozen: make new ones with {name}={value!r}")

    def __repr__(self) -> str:
        return f"Limits({', '.join(f'{name}={getattr(self, name)!r}' for name in self.__slots__)})"
