"""How a call to etcd can fail, by what the caller can do about it."""

from __future__ import annotations


class EtcdError(Exception):
    """A call failed. ``message`` is the message for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class EtcdUnavailable(EtcdError):
    """No member gave a usable answer in time. A retry may help.

    ``is_certain``: the operation was not executed and will not be. Otherwise it may have been, or may still be.
    """

    def __init__(self, message: str, is_certain: bool = False) -> None:
        super().__init__(message)
        self.is_certain = is_certain


class EtcdRefused(EtcdError):
    """Wrong user, password or certificate, or no permission. A retry does not help."""


class EtcdRejected(EtcdError):
    """etcd will never accept this request: it is too large or invalid. A retry does not help."""


class EtcdFull(EtcdError):
    """etcd's database has reached its quota. It accepts no writes until an operator frees space."""


class EtcdCompacted(EtcdError):
    """The requested revision is compacted. ``compact_revision`` is the oldest that is left (0: unknown)."""

    def __init__(self, message: str, compact_revision: int = 0) -> None:
        super().__init__(message)
        self.compact_revision = compact_revision
