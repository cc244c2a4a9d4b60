"""The rendezvous handler of the tcp engine: parses its options; its blocking methods use a store at the endpoint."""

from __future__ import annotations

from tenax._core.bounds import MAX_SECONDS
from tenax._core.lease import LeaseTerms
from tenax._engines.secret import TLS_OPTIONS, configured_secret, user_secret
from tenax._engines.store_address import may_use_agent_store, store_allow
from tenax._engines.tcp.engine import TcpEngine, TcpSettings
from tenax._io.endpoint import Endpoint
from tenax._io.tls import TlsFiles
from tenax.rendezvous._engine_handler import PolledRendezvousHandler
from tenax.rendezvous._options import name, port, seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tenax.rendezvous.api import RendezvousParameters
    from tenax.rendezvous.dynamic_rendezvous import RendezvousBackend


class TcpRendezvousHandler(PolledRendezvousHandler):
    """The coordinator is served at the endpoint by one of the nodes."""

    def __init__(self, params: RendezvousParameters) -> None:
        super().__init__(params)
        self.settings = tcp_settings(params)

    def _make_engine(self, master_addr: str | None, master_port: int | None) -> TcpEngine:
        return TcpEngine(self.settings, master_addr or "", master_port or 0)

    def _create_backend(self) -> tuple[RendezvousBackend, Any]:
        from tenax.rendezvous.c10d_rendezvous_backend import create_backend

        return create_backend(self._params)


def tcp_settings(params: RendezvousParameters) -> TcpSettings:
    """Return the settings of the engine from ``--rdzv-conf``. Raises ValueError."""
    if not params.endpoint:
        raise ValueError("a run of several nodes needs an endpoint; set --rdzv-endpoint HOST[:PORT]")
    tls = TlsFiles(*(str(params.get(key, "") or "") for key in TLS_OPTIONS))
    linked = linked_settings(params, LeaseTerms())
    uses_user_secret = not linked["secret"] and Endpoint.parse(params.endpoint).is_loopback
    settings = TcpSettings(**linked, tls=tls if tls != TlsFiles() else None, uses_user_secret=uses_user_secret)
    if uses_user_secret:
        try:
            user_secret(create=False)
        except OSError as error:
            raise ValueError(str(error)) from error
    if settings.tls is not None:
        settings.tls.for_client()  # checks the files
    TcpEngine(settings)  # checks the endpoint
    return settings


def linked_settings(params: RendezvousParameters, terms: LeaseTerms) -> dict[str, Any]:
    """Return the settings common to all engines with links. ``terms`` are the engine's defaults."""
    beat_s = seconds(params, "keep_alive_interval", terms.beat_s)
    attempts = seconds(params, "keep_alive_max_attempt", terms.lease_s / terms.beat_s)
    if attempts < 2:
        raise ValueError(
            f"the rendezvous option 'keep_alive_max_attempt' is {attempts:g}; expected at least 2 heartbeats"
        )
    scale_up = str(params.get("scale_up", "now"))
    if scale_up not in ("now", "restart"):
        raise ValueError(f"the rendezvous option 'scale_up' is {scale_up!r}; expected 'now' or 'restart'")
    return {
        "endpoint": params.endpoint,
        "run_id": params.run_id,
        "min_nodes": params.min_nodes,
        "max_nodes": params.max_nodes,
        "secret": configured_secret(params),
        "terms": LeaseTerms(beat_s, min(beat_s * attempts, MAX_SECONDS)),
        "join_timeout_s": seconds(params, "join_timeout", 600.0),
        "last_call_s": seconds(params, "last_call_timeout", 5.0, least=0.0),
        "scale_up": scale_up == "now",
        "node_rank": params.get_as_int("rank", -1) or 0 if params.get("rank") is not None else -1,
        "node_name": name(params, "node_name", "TENAX_NODE_NAME"),
        "node_order": name(params, "node_order", "TENAX_NODE_ORDER"),
        "local_addr": params.local_addr or "",
        "store_port": port(params, "store_port"),
        "use_agent_store": may_use_agent_store(params),
        "store_allow": store_allow(params),
    }
