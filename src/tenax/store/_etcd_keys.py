"""EtcdKeys: where an etcd store keeps what, below its prefix.

- ``<prefix><key>``: a value, under the user's own key, as it is. ``%`` and NUL bytes in the key are escaped, so that no
  user's key has a NUL.
- ``<prefix><key>\\0q<order>``: what is in the queue of that name. Right behind the key, so that one range, and so one
  watch, has all that makes a key exist.
- ``<prefix>\\0values/<id>/<number>``: parts of values that are too large for one request (``etcd_values``).
- ``<prefix>\\0writers/<id>``: the last change of every writer (``etcd_writer``).
"""

from __future__ import annotations

from tenax._io.etcd.operations import prefix_end
from tenax.store._api import as_bytes, as_text

_QUEUE = b"\0q"
_BEHIND_QUEUE = b"\0r"
_VALUES = b"\0values/"
_WRITERS = b"\0writers/"
_ORDER_DIGITS = 20


class EtcdKeys:
    """The names below one prefix, which ends with a slash."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix if prefix.endswith("/") else f"{prefix}/"
        self.start = as_bytes(self.prefix)
        self.end = prefix_end(self.start)

    def value(self, key: str) -> bytes:
        return self.start + as_bytes(key).replace(b"%", b"%25").replace(b"\0", b"%00")

    def existence(self, key: str) -> tuple[bytes, bytes]:
        """The range that is not empty when the key, or its queue, is there. The value, if there is one, comes first."""
        name = self.value(key)
        return name, name + _BEHIND_QUEUE

    def queue(self, key: str) -> tuple[bytes, bytes]:
        """The range of a queue, in the order in which it is to be taken out."""
        name = self.value(key)
        return name + _QUEUE, name + _BEHIND_QUEUE

    def queued(self, key: str, revision: int, unique: str) -> bytes:
        """One place in a queue: behind everything that was pushed up to this revision."""
        return self.value(key) + _QUEUE + b"%0*d-" % (_ORDER_DIGITS, revision) + unique.encode()

    def parts(self, value_id: bytes) -> bytes:
        """What the names of a value's parts begin with."""
        return self.start + _VALUES + value_id + b"/"

    def writer(self, writer_id: str) -> bytes:
        return self.start + _WRITERS + writer_id.encode()

    def users_key(self, name: bytes) -> str | None:
        """The user's key under this name; None: it is a name of ours."""
        if b"\0" in name:
            return None
        return as_text(name[len(self.start) :].replace(b"%00", b"\0").replace(b"%25", b"%"))
