"""An operator's way to a run that meets through etcd: who leads is read there, with the secret of its links.

Whoever may read the run's keys may ask it, if it knows the job's own secret too. Nothing is written to etcd.
"""

from __future__ import annotations

from tenax.endpoint import is_loopback, literal
from tenax.etcd.blocking import BlockingEtcd
from tenax.etcd.errors import EtcdError
from tenax.etcd.operations import Range
from tenax.rendezvous.etcd.handler import etcd_rendezvous_settings
from tenax.rendezvous.etcd.keys import Keys, read_leader
from tenax.rendezvous.etcd.place import this_machine
from tenax.rendezvous.tcp.operator import OperatorLine, Unreachable, at_endpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.rendezvous.api import RendezvousParameters
    from tenax.rendezvous.etcd.keys import Leader

_ETCD_S = 10.0


def line_through_etcd(parameters: RendezvousParameters) -> OperatorLine:
    """The line to the leader. Raises ``Unreachable`` and ``NotLetIn``; ValueError where the settings are wrong."""
    settings = etcd_rendezvous_settings(parameters)
    etcd = BlockingEtcd(settings.etcd, _ETCD_S)
    try:
        answer = etcd.call(Range(Keys(settings.run_id).leader))
        leader = read_leader(answer.kvs[0]) if answer.kvs else None
    except EtcdError as error:
        raise Unreachable(error.sentence) from error
    finally:
        etcd.close()
    if leader is None:
        raise Unreachable(
            f"etcd at {settings.endpoint} knows no coordinator of it: it is not running, or chooses one just now"
        )
    return _line_to(leader, settings.run_id, settings.secret)


def _line_to(leader: Leader, run_id: str, secret: bytes) -> OperatorLine:
    place = leader.place
    if is_loopback(place.addr) and place.machine != this_machine():
        raise Unreachable(f"its coordinator, on {place.host}, listens at {place.addr}, which only that host can reach")
    addresses = literal(place.addr, place.port)
    try:
        return at_endpoint(addresses, run_id, secret + leader.secret)
    except Unreachable as error:
        raise Unreachable(f"its coordinator, on {place.host}, cannot be reached: {error}") from error
