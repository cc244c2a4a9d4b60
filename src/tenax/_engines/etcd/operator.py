"""An operator's connection to a run with the etcd engine: reads the leader and the secret of its links from etcd.

An operator needs read access to the run's keys, and the run's own secret if there is one. Nothing is written to etcd.
"""

from __future__ import annotations

from tenax._core.etcd.errors import EtcdError, EtcdRefused
from tenax._core.etcd.operations import Range
from tenax._core.leadership.keys import Keys, read_leader
from tenax._engines.etcd.leader_address import this_machine
from tenax._engines.tcp.operator import AccessDenied, OperatorConnection, Unreachable, connect_to_coordinator
from tenax._io.endpoint import is_loopback, literal
from tenax._io.etcd.blocking import BlockingEtcd

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl

    from tenax._core.leadership.keys import Leader
    from tenax._engines.etcd.engine import EtcdEngineSettings

_ETCD_S = 10.0


def connect_through_etcd(settings: EtcdEngineSettings) -> OperatorConnection:
    """Connect to the leader. Raises ``Unreachable`` and ``AccessDenied``."""
    etcd = BlockingEtcd(settings.etcd, _ETCD_S)
    try:
        answer = etcd.call(Range(Keys(settings.run_id).leader))
        leader = read_leader(answer.kvs[0]) if answer.kvs else None
    except EtcdError as error:
        is_hint = isinstance(error, EtcdRefused) and settings.secret and not settings.etcd.user
        hint = "; if tenax runs this etcd, add managed=true to --rdzv-conf" if is_hint else ""
        raise Unreachable(error.message + hint) from error
    finally:
        etcd.close()
    if leader is None:
        raise Unreachable(
            f"etcd at {settings.endpoint} has no coordinator for it: it is not running, or is electing one; try again"
        )
    return _connect_to_leader(leader, settings)


def _connect_to_leader(leader: Leader, settings: EtcdEngineSettings) -> OperatorConnection:
    address = leader.address
    if is_loopback(address.addr) and address.machine != this_machine():
        raise Unreachable(
            f"its coordinator on {address.host} listens at {address.addr}, which only that host can reach"
        )
    addresses = literal(address.addr, address.port)
    try:
        tls = _tls(leader, settings)
        return connect_to_coordinator(addresses, settings.run_id, settings.secret + leader.secret, tls, address.addr)
    except Unreachable as error:
        raise Unreachable(f"cannot reach its coordinator on {address.host}: {error}") from error


def _tls(leader: Leader, settings: EtcdEngineSettings) -> ssl.SSLContext | None:
    if not leader.certificate:
        if settings.tls is not None:
            raise AccessDenied(
                f"its coordinator on {leader.address.host} does not use TLS, but this command has TLS files; if that "
                "is intended, add link_tls=false to --rdzv-conf"
            )
        return None
    if settings.tls is None:
        raise AccessDenied(
            f"its coordinator on {leader.address.host} requires TLS; add ssl_cert, ssl_cert_key and ca_cert to "
            "--rdzv-conf"
        )
    from tenax._engines.etcd.link_tls import follower_context

    return follower_context(settings.tls, leader.certificate)
