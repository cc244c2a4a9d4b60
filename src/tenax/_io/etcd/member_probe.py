"""The scout: before a member without data starts, ask the others what they know of its name.

    nobody runs     every other control host refuses connections: no cluster runs yet. Known at once
    standing        a cluster with a majority answered: whether the name was ever started, and who the members are
    silence         somebody is there, or may be, and does not answer: they form the cluster right now, or are being
                    started, or cannot be reached. Asked again by a timer until the patience is over; then as nobody

Silence must not last long, since members that form a cluster wait for each other. It need not be told from the rest
with certainty: a server that is started as new although its name was started before is turned away by the other
servers, or by its own check, and ends; then we are asked again, with more patience.
"""

from __future__ import annotations

import errno

import msgspec

from tenax._io.connect import Connecting
from tenax._io.endpoint import Lookup
from tenax._io.etcd.client import EtcdClient
from tenax._io.etcd.operations import Member, Members, Range

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from tenax._io.endpoint import Address
    from tenax._io.etcd.control_host import ControlHost
    from tenax._io.etcd.errors import EtcdError
    from tenax._io.etcd.operations import MembersAnswer, RangeAnswer
    from tenax._io.etcd.settings import EtcdSettings
    from tenax._io.ports import Cancellable, EventLoop

_PAUSE_S = 0.25
_ANSWER_S = 1.5


class Standing(msgspec.Struct, frozen=True):
    """What a running cluster knows of a name."""

    has_key: bool
    members: tuple[Member, ...]

    def of(self, host: ControlHost) -> tuple[Member, ...]:
        """The members at this host's place; an earlier attempt may have left more than one."""
        return tuple(member for member in self.members if host.peer_url in member.peer_urls)

    def was_started(self, host: ControlHost) -> bool:
        """The key is written a moment after the server came up; the cluster itself knows its client URLs before."""
        return self.has_key or any(member.client_urls for member in self.of(host))


class MemberProbe:
    """Answers once, from the loop: with the standing, or None if nobody told one."""

    def __init__(
        self,
        loop: EventLoop,
        others: tuple[ControlHost, ...],
        key: bytes,
        settings: EtcdSettings,
        patience_s: float,
        answered: Callable[[Standing | None], None],
    ) -> None:
        self._loop = loop
        self._others = others
        self._key = key
        self._answered = answered
        self._until = loop.now() + patience_s
        self._client = EtcdClient(loop, settings) if others else None
        self._knocks: list[_Knock] = []
        self._timer: Cancellable | None = None
        self._is_asking = False

    def start(self) -> None:
        self._timer = self._loop.at(self._loop.now(), self._knock if self._others else lambda: self._answer(None))

    def _knock(self) -> None:
        self._timer = None
        self._knocks = [_Knock(self._loop, host, self._knocked) for host in self._others]
        for knock in self._knocks:
            knock.start()

    def _knocked(self) -> None:
        results = [knock.result for knock in self._knocks]
        if "open" in results:
            self._ask()
        elif all(results):
            if set(results) == {"refused"}:
                self._answer(None)
            else:
                self._try_again()

    def _ask(self) -> None:
        if self._client is not None and not self._is_asking:
            self._is_asking = True
            self._client.call(Range(self._key), self._ask_members, self._not_told, patience_s=_ANSWER_S)

    def _ask_members(self, answer: RangeAnswer) -> None:
        assert self._client is not None
        has_key = bool(answer.kvs)

        def told(members: MembersAnswer) -> None:
            self._answer(Standing(has_key, members.members))

        self._client.call(Members(), told, self._not_told, patience_s=_ANSWER_S)

    def _not_told(self, _: EtcdError) -> None:
        self._is_asking = False
        self._try_again()

    def _try_again(self) -> None:
        if self._loop.now() >= self._until:
            self._answer(None)
            return
        self._close_knocks()
        self._timer = self._loop.at(self._loop.now() + _PAUSE_S, self._knock)

    def _answer(self, standing: Standing | None) -> None:
        self.close()
        self._answered(standing)

    def _close_knocks(self) -> None:
        for knock in self._knocks:
            knock.close()
        self._knocks = []

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._close_knocks()
        if self._client is not None:
            self._client.close()
            self._client = None


class _Knock:
    """Does anybody listen at a control host? ``result``: open, refused, or silent; empty until known."""

    def __init__(self, loop: EventLoop, host: ControlHost, known: Callable[[], None]) -> None:
        self._loop = loop
        self._known = known
        self._lookup = Lookup(host.endpoint, self._connect, lambda _: self._end("silent"))
        self._is_watched = False
        self._addresses: list[Address] = []
        self._is_refused = True
        self._connecting: Connecting | None = None
        self.result = ""

    def start(self) -> None:
        if self._lookup.start():
            self._is_watched = True
            self._loop.watch(self._lookup)

    def _connect(self, addresses: list[Address]) -> None:
        self._unwatch()
        self._addresses = addresses
        self._try_next()

    def _try_next(self) -> None:
        family, address = self._addresses.pop(0)
        self._connecting = Connecting(self._loop, family, address, self._connected, self._refused)
        self._connecting.start()

    def _connected(self, sock: socket.socket) -> None:
        sock.close()
        self._end("open")

    def _refused(self, number: int) -> None:
        self._is_refused = self._is_refused and number == errno.ECONNREFUSED
        if self._addresses:
            self._try_next()
        else:
            self._end("refused" if self._is_refused else "silent")

    def _end(self, result: str) -> None:
        self._unwatch()
        self._connecting = None
        self.result = result
        self._known()

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.unwatch(self._lookup)

    def close(self) -> None:
        self._unwatch()
        self._lookup.close()
        if self._connecting is not None:
            self._connecting.close()
            self._connecting = None
