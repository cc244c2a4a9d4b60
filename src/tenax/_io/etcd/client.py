"""The client: calls to etcd over its JSON gateway, in a loop that does something else meanwhile.

No threads (but for looking up names), no blocking, nothing imported that is not needed. How calls are repeated, and
what callers must know about that, is law in ``call.py``: a call may be carried out more than once, and after
``EtcdUnavailable`` with ``is_certain`` False it may still be.
"""

from __future__ import annotations

from typing import TypeVar, cast

from tenax._io.etcd.address import Place
from tenax._io.etcd.call import EtcdCall, in_words
from tenax._io.etcd.pool import Pool
from tenax._io.etcd.token import Token

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._io.etcd.errors import EtcdError
    from tenax._io.etcd.operations import AnyOperation, Authenticate, AuthenticateAnswer, Operation
    from tenax._io.etcd.settings import EtcdSettings
    from tenax._io.etcd.watch_stream import WatchStream
    from tenax._io.ports import EventLoop

A = TypeVar("A")
PATIENCE_S = 5.0


class EtcdClient:
    """All calls of one process to one etcd. Begins with the member that answered last."""

    def __init__(self, loop: EventLoop, settings: EtcdSettings) -> None:
        self.loop = loop
        self.settings = settings
        self.pool = Pool(loop, settings.tls)
        self.token = Token(settings.user, settings.password, self._authenticate, settings.waits_for_users)
        self._places = [Place(index, text) for index, text in enumerate(settings.endpoints)]
        self.best_place = self._places[0]
        self._calls: set[EtcdCall] = set()
        self._streams: set[WatchStream] = set()
        self._troubles: dict[str, str] = {}
        self._local_address = ""
        self._is_closed = False

    def call(
        self,
        operation: Operation[A],
        done: Callable[[A], None],
        failed: Callable[[EtcdError], None],
        *,
        patience_s: float = PATIENCE_S,
    ) -> EtcdCall:
        """Ask for it. ``done`` or ``failed`` is called once, never from within; a closed client calls neither."""
        call = EtcdCall(self, cast("AnyOperation", operation), done, failed, patience_s)
        if not self._is_closed:
            self._calls.add(call)
            call.start()
        return call

    def _authenticate(
        self,
        operation: Authenticate,
        done: Callable[[AuthenticateAnswer], None],
        failed: Callable[[EtcdError], None],
    ) -> EtcdCall:
        return self.call(operation, done, failed)

    def local_address(self) -> str:
        """This host's address on the last connection that worked; empty before."""
        return self._local_address

    @property
    def trouble(self) -> str:
        """What went wrong last, in words, place by place; empty if the last call went well."""
        return in_words(self._troubles)

    def close(self) -> None:
        """End everything, silently."""
        self._is_closed = True
        for call in list(self._calls):
            call.cancel()
        for stream in list(self._streams):
            stream.close()
        self.pool.close()

    # --- for calls and watches ----------------------------------------------------------------------------------------

    @property
    def place_count(self) -> int:
        return len(self._places)

    def place_after(self, place: Place) -> Place:
        """Where to go when this place failed. The next call begins there, too."""
        successor = self._places[(place.index + 1) % len(self._places)]
        if self.best_place is place:
            self.best_place = successor
        return successor

    def went_well(self, place: Place, local_address: str) -> None:
        self.best_place = place
        self._local_address = local_address
        self._troubles = {}

    def went_badly(self, troubles: dict[str, str]) -> None:
        self._troubles = {**self._troubles, **troubles}

    def forget_call(self, call: EtcdCall) -> None:
        self._calls.discard(call)

    def add_stream(self, stream: WatchStream) -> None:
        self._streams.add(stream)

    def forget_stream(self, stream: WatchStream) -> None:
        self._streams.discard(stream)


__all__ = ["PATIENCE_S", "EtcdCall", "EtcdClient"]
