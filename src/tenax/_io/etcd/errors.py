"""Errors: how a call to etcd can fail, by what can be done about it. Each is one sentence for people."""

from __future__ import annotations


class EtcdError(Exception):
    """A call that failed. ``sentence`` says why."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


class EtcdUnavailable(EtcdError):
    """Nobody answered in time, or none that could: trying again may help.

    ``is_certain``: what was asked was not carried out and will not be. Else it may have been, or may still be.
    """

    def __init__(self, sentence: str, is_certain: bool = False) -> None:
        super().__init__(sentence)
        self.is_certain = is_certain


class EtcdRefused(EtcdError):
    """Wrong user, password or certificate, or no permission: final, until somebody changes something."""


class EtcdRejected(EtcdError):
    """etcd will never take this request: it is too large, or means nothing to it. Final."""


class EtcdFull(EtcdError):
    """etcd's database has reached its quota; it takes no writes until somebody makes room."""


class EtcdCompacted(EtcdError):
    """The revision that was asked for is forgotten; the oldest that is left is ``compact_revision`` (0: not told)."""

    def __init__(self, sentence: str, compact_revision: int = 0) -> None:
        super().__init__(sentence)
        self.compact_revision = compact_revision
