"""A non-blocking client for etcd over its JSON gateway.

It uses no threads except for host name lookups. ``call.py`` states how calls are retried: a call may be executed more
than once, and after ``EtcdUnavailable`` with ``is_certain`` False it may still be executed.
"""

from __future__ import annotations

from typing import TypeVar, cast

from tenax._io.etcd.call import EtcdCall, format_troubles
from tenax._io.etcd.endpoint import EtcdEndpoint
from tenax._io.etcd.pool import Pool
from tenax._io.etcd.token import Token

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.etcd.errors import EtcdError
    from tenax._core.etcd.operations import AnyOperation, Authenticate, AuthenticateAnswer, Operation
    from tenax._io.etcd.settings import EtcdSettings
    from tenax._io.etcd.watch_stream import WatchStream
    from tenax._io.interfaces import EventLoop

A = TypeVar("A")
PATIENCE_S = 5.0


class EtcdClient:
    """All calls of one process to one etcd cluster. A call tries the endpoint that answered last first."""

    def __init__(self, loop: EventLoop, settings: EtcdSettings) -> None:
        self.loop = loop
        self.settings = settings
        self.pool = Pool(loop, settings.tls)
        self.token = Token(settings.user, settings.password, self._authenticate, settings.waits_for_users)
        self._endpoints = [EtcdEndpoint(index, text) for index, text in enumerate(settings.endpoints)]
        self.preferred_endpoint = self._endpoints[0]
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
        """Start a call. ``done`` or ``failed`` is called once, never within this method; neither if closed."""
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
        """Return this host's address on the last connection that worked, or ""."""
        return self._local_address

    @property
    def trouble(self) -> str:
        """The latest failures by endpoint, as text; empty if the last call succeeded."""
        return format_troubles(self._troubles)

    def close(self) -> None:
        """Cancel all calls and close all streams and connections, without callbacks."""
        self._is_closed = True
        for call in list(self._calls):
            call.cancel()
        for stream in list(self._streams):
            stream.close()
        self.pool.close()

    # --- for calls and watches ----------------------------------------------------------------------------------------

    @property
    def endpoint_count(self) -> int:
        return len(self._endpoints)

    def endpoint_after(self, endpoint: EtcdEndpoint) -> EtcdEndpoint:
        """Return the endpoint to try after this one failed. Later calls prefer it, too."""
        successor = self._endpoints[(endpoint.index + 1) % len(self._endpoints)]
        if self.preferred_endpoint is endpoint:
            self.preferred_endpoint = successor
        return successor

    def note_success(self, endpoint: EtcdEndpoint, local_address: str) -> None:
        self.preferred_endpoint = endpoint
        self._local_address = local_address
        self._troubles = {}

    def note_failure(self, troubles: dict[str, str]) -> None:
        self._troubles = {**self._troubles, **troubles}

    def remove_call(self, call: EtcdCall) -> None:
        self._calls.discard(call)

    def add_stream(self, stream: WatchStream) -> None:
        self._streams.add(stream)

    def remove_stream(self, stream: WatchStream) -> None:
        self._streams.discard(stream)


__all__ = ["PATIENCE_S", "EtcdCall", "EtcdClient"]
