"""Guard: what bytes must pass before h11 parses them.

h11's regular expressions take quadratic time for one thing: a long run of blanks (h11 0.16: 16 KB of spaces and a
vertical tab as a header cost 1.4 s, as a chunk's first line 0.2 s). The guard rejects such a run, however it was cut
into pieces; then h11's work is linear, which the tests of this package measure. No header, chunk line or answer of etcd
has one.
"""

from __future__ import annotations

MAX_BLANKS = 128
_RUN = b" " * (MAX_BLANKS + 1)


class Guard:
    """For the bytes of one message."""

    def __init__(self) -> None:
        self._tail = b""

    def admits(self, data: bytes) -> bool:
        """Return False if there is too long a run of blanks up to the end of ``data``."""
        seen = (self._tail + data).replace(b"\t", b" ")
        self._tail = seen[-MAX_BLANKS:]
        return _RUN not in seen
