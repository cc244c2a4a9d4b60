"""TorchElastic's module for the store in etcd, which is ``tenax.store.EtcdStore``."""

from __future__ import annotations

import random
import time

from tenax.store import EtcdStore

__all__ = ["EtcdStore", "cas_delay"]

_MAX_CAS_DELAY_S = 0.1


def cas_delay() -> None:
    """Sleep for a random time before retrying a failed compare-and-set, so that nodes do not collide again.

    For third-party code. The store itself does not need it: its writes are transactions.
    """
    time.sleep(random.uniform(0, _MAX_CAS_DELAY_S))  # noqa: S311 - spreads nodes, hides nothing
