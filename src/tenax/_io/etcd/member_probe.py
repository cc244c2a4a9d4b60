"""The member probe: before a member without data starts, query the others about its name.

    no cluster      every other control host refuses connections. Known at once
    standing        a cluster with a majority answered: whether the name was ever started, and the list of members
    silence         other hosts do not answer: they are forming the cluster, are starting, or cannot be reached. Retried
                    by a timer until the timeout; then treated as no cluster

The timeout is short because members that form a cluster wait for each other. The result need not be certain: a server
that starts as new although its name was started before is rejected by the other servers, or by its own check, and
exits. Then the caller probes again, with a longer timeout.
"""

from __future__ import annotations

import errno

import msgspec

from tenax._core.etcd.operations import Member, Members, Range
from tenax._io.connect import ConnectAttempt
from tenax._io.endpoint import Lookup
from tenax._io.etcd.client import EtcdClient
from tenax._io.loop import NO_TIMER

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from tenax._core.etcd.errors import EtcdError
    from tenax._core.etcd.operations import MembersAnswer, RangeAnswer
    from tenax._io.endpoint import Address
    from tenax._io.etcd.control_host import ControlHost
    from tenax._io.etcd.settings import EtcdSettings
    from tenax._io.interfaces import Cancellable, EventLoop

_PAUSE_S = 0.25
_ANSWER_S = 1.5


class Standing(msgspec.Struct, frozen=True):
    """What a running cluster reports about a name."""

    has_key: bool
    members: tuple[Member, ...]

    def of(self, host: ControlHost) -> tuple[Member, ...]:
        """Return the members with this host's peer URL; an earlier attempt may have left more than one."""
        return tuple(member for member in self.members if host.peer_url in member.peer_urls)

    def was_started(self, host: ControlHost) -> bool:
        """Return True if the member was ever started. Client URLs appear a moment before the key is written."""
        return self.has_key or any(member.client_urls for member in self.of(host))


class MemberProbe(msgspec.Struct, eq=False):
    """Calls ``answered`` once, from the loop: with the standing, or None if there was none."""

    _loop: EventLoop
    _others: tuple[ControlHost, ...]
    _key: bytes
    _settings: EtcdSettings
    _patience_s: float
    answered: Callable[[Standing | None], None]
    _until: float = 0.0
    _client: EtcdClient | None = None
    _probes: list[_PortProbe] = []
    _timer: Cancellable = NO_TIMER
    _is_querying: bool = False

    def start(self) -> None:
        now = self._loop.now()
        self._until = now + self._patience_s
        if self._others:
            self._client = EtcdClient(self._loop, self._settings)
        self._timer = self._loop.at(now, self._probe_ports if self._others else lambda: self._answer(None))

    def _probe_ports(self) -> None:
        self._probes = [_PortProbe(self._loop, host, self._port_known) for host in self._others]
        for probe in self._probes:
            probe.start()

    def _port_known(self) -> None:
        results = [probe.result for probe in self._probes]
        if "open" in results:
            self._query()
        elif all(results):
            self._try_again(may_exist=set(results) != {"refused"})

    def _query(self) -> None:
        if self._client is not None and not self._is_querying:
            self._is_querying = True
            self._client.call(Range(self._key), self._query_members, self._query_failed, patience_s=_ANSWER_S)

    def _query_members(self, answer: RangeAnswer) -> None:
        assert self._client is not None
        has_key = bool(answer.kvs)

        def received(members: MembersAnswer) -> None:
            self._answer(Standing(has_key, members.members))

        self._client.call(Members(), received, self._query_failed, patience_s=_ANSWER_S)

    def _query_failed(self, _: EtcdError) -> None:
        self._is_querying = False
        self._try_again()

    def _try_again(self, *, may_exist: bool = True) -> None:
        if not may_exist or self._loop.now() >= self._until:
            self._answer(None)
            return
        self._close_probes()
        self._timer = self._loop.at(self._loop.now() + _PAUSE_S, self._probe_ports)

    def _answer(self, standing: Standing | None) -> None:
        self.close()
        self.answered(standing)

    def _close_probes(self) -> None:
        for probe in self._probes:
            probe.close()
        self._probes = []

    def close(self) -> None:
        self._timer.cancel()
        self._close_probes()
        if self._client is not None:
            self._client.close()
            self._client = None


class _PortProbe(msgspec.Struct, eq=False):
    """Checks whether a control host accepts connections. ``result``: open, refused or silent; empty until known."""

    _loop: EventLoop
    _host: ControlHost
    _known: Callable[[], None]
    result: str = ""
    _opening: Lookup | ConnectAttempt | None = None

    def start(self) -> None:
        self._opening = Lookup(self._loop, self._host.endpoint, self._connect, lambda _: self._end("silent"))
        self._opening.start()

    def _connect(self, addresses: list[Address]) -> None:
        self._opening = ConnectAttempt(self._loop, addresses, self._connected, self._failed)
        self._opening.start()

    def _connected(self, sock: socket.socket) -> None:
        sock.close()
        self._end("open")

    def _failed(self, errors: list[int]) -> None:
        self._end("refused" if set(errors) == {errno.ECONNREFUSED} else "silent")

    def _end(self, result: str) -> None:
        self.result = result
        self._known()

    def close(self) -> None:
        if self._opening is not None:
            self._opening.close()
