"""Modules of TorchElastic that tenax does not have, each with what to do instead."""

from __future__ import annotations

_NO_ETCD = "etcd as a meeting place is not in this release; use the rendezvous 'tcp', which needs no server of its own"

# ours, if we had it -> the reason
ABSENT_MODULES = {
    "tenax.rendezvous.etcd_rendezvous": _NO_ETCD,
    "tenax.rendezvous.etcd_rendezvous_backend": _NO_ETCD,
    "tenax.rendezvous.etcd_server": _NO_ETCD,
    "tenax.rendezvous.etcd_store": f"{_NO_ETCD}, and the stores of tenax.store",
}
