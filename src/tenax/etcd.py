"""A client for etcd, used by ``tenax.store.EtcdStore`` and the rendezvous backends, and the errors it raises."""

from tenax._core.etcd.errors import EtcdCompacted, EtcdError, EtcdFull, EtcdRefused, EtcdRejected, EtcdUnavailable
from tenax._io.etcd.blocking import BlockingEtcd
from tenax._io.etcd.client import EtcdClient
from tenax._io.etcd.settings import EtcdSettings, etcd_settings
from tenax._io.tls import TlsFiles

__all__ = [
    "BlockingEtcd",
    "EtcdClient",
    "EtcdCompacted",
    "EtcdError",
    "EtcdFull",
    "EtcdRefused",
    "EtcdRejected",
    "EtcdSettings",
    "EtcdUnavailable",
    "TlsFiles",
    "etcd_settings",
]
