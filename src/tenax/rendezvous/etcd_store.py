"""The store in etcd, under TorchElastic's name for its module. It is ``tenax.store.EtcdStore``."""

from __future__ import annotations

from tenax.store.etcd import EtcdStore

__all__ = ["EtcdStore"]
