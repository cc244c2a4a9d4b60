"""The store in etcd, under TorchElastic's name for its module. It is ``tenax.store.EtcdStore``."""

from __future__ import annotations

from tenax.store._etcd import EtcdStore

__all__ = ["EtcdStore", "cas_delay"]

_MAX_CAS_DELAY_S = 0.1


def cas_delay() -> None:
    """Wait for a random time before a compare-and-set that failed is tried again, so that nodes do not collide again.

    The store here needs none: its writes are transactions. For third-party loops that compare and set.
    """
    import random
    import time

    time.sleep(random.uniform(0, _MAX_CAS_DELAY_S))  # noqa: S311 - spreads nodes, hides nothing
