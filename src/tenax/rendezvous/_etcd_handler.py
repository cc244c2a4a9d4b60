"""The rendezvous handler of the etcd engine: parses its options; its blocking methods use a backend in etcd."""

from __future__ import annotations

import msgspec

from tenax._core.authority import AuthorityTerms
from tenax._engines.etcd.engine import EtcdEngine, EtcdEngineSettings
from tenax._io.etcd.gateway import ROOT
from tenax.rendezvous._engine_handler import PolledRendezvousHandler
from tenax.rendezvous._options import etcd_settings_from, port, seconds
from tenax.rendezvous._tcp_handler import linked_settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tenax._engines.etcd.managed import ManagedSettings
    from tenax._io.etcd.settings import EtcdSettings
    from tenax.rendezvous.api import RendezvousParameters
    from tenax.rendezvous.dynamic_rendezvous import RendezvousBackend


# torchrun's options that have no effect with this engine, and the value that a launcher sets by default.
_UNUSED = {"timeout": 900} | dict.fromkeys(
    ("close_timeout", "heartbeat_timeout", "read_timeout", "use_libuv", "etcd_prefix", "is_host", "store_type")
)


class EtcdEngineHandler(PolledRendezvousHandler):
    """etcd elects the node that hosts the coordinator."""

    def __init__(self, params: RendezvousParameters) -> None:
        super().__init__(params)
        self.settings = etcd_engine_settings(params)

    def _make_engine(self, master_addr: str | None, master_port: int | None) -> EtcdEngine:
        return EtcdEngine(self.settings, master_addr or "", master_port or 0)

    def _create_backend(self) -> tuple[RendezvousBackend, Any]:
        from tenax.rendezvous.etcd_rendezvous_backend import create_backend

        return create_backend(self._params)


def etcd_engine_settings(params: RendezvousParameters) -> EtcdEngineSettings:
    """Return the settings of the engine from ``--rdzv-conf``. Raises ValueError."""
    if not params.endpoint:
        raise ValueError(
            "the rendezvous backend 'etcd' needs the addresses of etcd; set --rdzv-endpoint HOST:PORT,HOST:PORT,..."
        )
    etcd = etcd_settings_from(params)
    if etcd.tls is not None:
        etcd.tls.for_client()  # checks the files
    linked = linked_settings(params, AuthorityTerms().lease)
    managed = _managed(params, etcd, linked["secret"])
    if managed is not None and managed.password:
        etcd = msgspec.structs.replace(etcd, user=ROOT, password=managed.password, waits_for_users=True)
    link_port = port(params, "link_port")
    if link_port and link_port == linked["store_port"]:
        raise ValueError(
            f"the rendezvous options 'link_port' and 'store_port' are both {link_port}; expected two different ports"
        )
    link_tls = bool(params.get_as_bool("link_tls", True))
    settings = EtcdEngineSettings(
        **linked,
        etcd=etcd,
        outage_s=seconds(params, "outage_timeout", AuthorityTerms().outage_s),
        managed=managed,
        link_port=link_port,
        link_tls=link_tls,
        unused=tuple(name for name, default in _UNUSED.items() if params.get(name) not in (None, "", default)),
        tls=etcd.tls if link_tls and etcd.tls is not None and etcd.tls.cert and etcd.tls.ca else None,
    )
    if settings.tls is not None:
        from tenax._engines.etcd.link_tls import OwnCertificate

        OwnCertificate(settings.tls)  # checks that other nodes would accept it
    if managed is not None and settings.link_port:
        for host in managed.hosts:
            if settings.link_port in (host.client_port, host.peer_port):
                raise ValueError(
                    f"the rendezvous option 'link_port' is {settings.link_port}, which the managed etcd on "
                    f"{host.name} uses; choose another"
                )
    return settings


def _managed(params: RendezvousParameters, etcd: EtcdSettings, secret: bytes) -> ManagedSettings | None:
    if not params.get_as_bool("managed", False):
        if params.get("managed_only"):
            raise ValueError(
                "the rendezvous option 'managed_only' is given without managed=true; give both, or neither"
            )
        return None
    from tenax._engines.etcd.managed import managed_settings

    if etcd.user:
        raise ValueError(
            "the rendezvous options user and password cannot be used with managed=true, because tenax creates the "
            "users of the etcd members that it starts; remove them, and set token_file"
        )
    if secret and etcd.tls is not None and etcd.tls.cert and etcd.tls.ca:
        from tenax._engines.etcd.link_tls import OwnCertificate

        if name := OwnCertificate(etcd.tls).common_name:
            raise ValueError(
                f"the certificate {etcd.tls.cert} has the Common Name {name!r}, which etcd does not accept when it "
                "has users; use one without a Common Name, or leave out the secret (token, token_file, "
                "TENAX_RDZV_TOKEN)"
            )
    only = str(params.get("managed_only") or "")
    return managed_settings(params.endpoint, params.run_id, tls=etcd.tls, only=only, secret=secret)
