"""EtcdKeys: the layout of an etcd store below its prefix.

- ``<prefix><key>``: a value, under the user's key. ``%`` and NUL bytes in the key are escaped, so that no user key
  contains a NUL.
- ``<prefix><key>\\0q<order>``: an item of the queue of that name. It sorts right after the key, so that one range, and
  one watch, covers everything that makes a key exist.
- ``<prefix>\\0values/<id>/<number>``: parts of values that are too large for one request (``_etcd_values``).
- ``<prefix>\\0writers/<id>``: the last change of each writer (``_etcd_writer``).
"""

from __future__ import annotations

from tenax._io.etcd.operations import prefix_end
from tenax.store._api import as_bytes, as_text

_QUEUE = b"\0q"
_AFTER_QUEUE = b"\0r"
_VALUES = b"\0values/"
_WRITERS = b"\0writers/"
_ORDER_DIGITS = 20


class EtcdKeys:
    """The etcd keys below one prefix, which ends with a slash."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix if prefix.endswith("/") else f"{prefix}/"
        self.start = as_bytes(self.prefix)
        self.end = prefix_end(self.start)

    def value(self, key: str) -> bytes:
        return self.start + as_bytes(key).replace(b"%", b"%25").replace(b"\0", b"%00")

    def existence(self, key: str) -> tuple[bytes, bytes]:
        """Return the range that is non-empty if the key or its queue exists. The value, if any, comes first."""
        name = self.value(key)
        return name, name + _AFTER_QUEUE

    def queue(self, key: str) -> tuple[bytes, bytes]:
        """Return the range of a queue, in the order of its items."""
        name = self.value(key)
        return name + _QUEUE, name + _AFTER_QUEUE

    def queued(self, key: str, revision: int, unique: str) -> bytes:
        """Return the key of a queue item that comes after all items pushed up to this revision."""
        return self.value(key) + _QUEUE + b"%0*d-" % (_ORDER_DIGITS, revision) + unique.encode()

    def parts(self, value_id: bytes) -> bytes:
        """Return the prefix of a value's parts."""
        return self.start + _VALUES + value_id + b"/"

    def writer(self, writer_id: str) -> bytes:
        return self.start + _WRITERS + writer_id.encode()

    def users_key(self, name: bytes) -> str | None:
        """Return the user's key for this etcd key; None if it is internal."""
        if b"\0" in name:
            return None
        return as_text(name[len(self.start) :].replace(b"%00", b"\0").replace(b"%25", b"%"))
