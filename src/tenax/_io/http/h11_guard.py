"""Checks bytes before h11 parses them.

h11's regular expressions take quadratic time for a long run of blanks (h11 0.16: 16 KB of spaces and a vertical tab
cost 1.4 s as a header, 0.2 s as the first line of a chunk). The guard rejects such runs, also across pieces, so that
h11's work is linear; the tests measure this. No legitimate header, chunk line or etcd response contains such a run.
"""

from __future__ import annotations

MAX_BLANKS = 128
_RUN = b" " * (MAX_BLANKS + 1)


class H11Guard:
    """Checks the bytes of one message."""

    def __init__(self) -> None:
        self._tail = b""

    def admits(self, data: bytes) -> bool:
        """Return False if ``data`` contains or completes a run of blanks that is too long."""
        seen = (self._tail + data).replace(b"\t", b" ")
        self._tail = seen[-MAX_BLANKS:]
        return _RUN not in seen
