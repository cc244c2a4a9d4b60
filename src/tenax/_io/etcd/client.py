"""A non-blocking client for etcd over its JSON gateway.

It uses no threads except for host name lookups. ``call.py`` states how calls are retried.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tenax._core.etcd.errors import EtcdRejected, EtcdUnavailable
from tenax._core.etcd.operations import Authenticate, AuthenticateAnswer
from tenax._io.etcd.call import EtcdCall, format_troubles
from tenax._io.etcd.http_connection import EtcdEndpoint, Pool

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.etcd.errors import EtcdError
    from tenax._core.etcd.operations import Operation
    from tenax._io.etcd.settings import EtcdSettings
    from tenax._io.etcd.subscription import WatchStream
    from tenax._io.interfaces import EventLoop

    Ready = Callable[[str], None]
    Failed = Callable[[EtcdError], None]
    Authenticator = Callable[[Authenticate, Callable[[AuthenticateAnswer], None], Failed], object]

A = TypeVar("A")
PATIENCE_S = 5.0


class Token(msgspec.Struct, eq=False):
    """The auth token of one client; empty without a user. All calls that need a new one share one authentication."""

    _user: str
    _password: str
    _waits_for_users: bool
    _authenticate: Authenticator
    is_without_users: bool = False  # etcd has no users, so the user and the password were ignored
    _token: str | None = None
    _waits: list[tuple[Ready, Failed]] = []

    @property
    def has_user(self) -> bool:
        return bool(self._user)

    def get(self, ready: Ready, failed: Failed) -> None:
        """Call one of the two: at once if the token is known. A caller that has stopped waiting ignores the call."""
        if not self._user:
            ready("")
        elif self._token is not None:
            ready(self._token)
        else:
            self._waits.append((ready, failed))
            if len(self._waits) == 1:
                self._authenticate(Authenticate(self._user, self._password), self._arrived, self._refused)

    def was_refused(self, token: str) -> None:
        """Discard the token if it is this one."""
        if token == self._token:
            self._token = None

    def _arrived(self, answer: AuthenticateAnswer) -> None:
        self._token = answer.token
        waits, self._waits = self._waits, []
        for ready, _ in waits:
            ready(answer.token)

    def _refused(self, error: EtcdError) -> None:
        if isinstance(error, EtcdRejected) and "not enabled" in error.message:
            if not self._waits_for_users:
                self.is_without_users = True
                self._arrived(AuthenticateAnswer(""))  # without users etcd serves every client
                return
            error = EtcdUnavailable("etcd has no users yet", is_certain=True)
        waits, self._waits = self._waits, []
        for _, failed in waits:
            failed(error)


class EtcdClient:
    """All calls of one process to one etcd cluster. A call tries the endpoint that answered last first."""

    def __init__(self, loop: EventLoop, settings: EtcdSettings) -> None:
        self.loop = loop
        self.settings = settings
        self.pool = Pool(loop, settings.tls)
        self.token = Token(settings.user, settings.password, settings.waits_for_users, self.call)
        self._endpoints = [EtcdEndpoint(index, text) for index, text in enumerate(settings.endpoints)]
        self.preferred_endpoint = self._endpoints[0]
        self.calls: set[EtcdCall] = set()
        self.streams: set[WatchStream] = set()
        self.troubles: dict[str, str] = {}
        self._local_address = ""
        self._is_closed = False

    def call(
        self, operation: Operation[A], done: Callable[[A], None], failed: Failed, *, patience_s: float = PATIENCE_S
    ) -> EtcdCall:
        """Start a call. ``done`` or ``failed`` is called once, never within this method; neither if closed."""
        call = EtcdCall(self, operation, done, failed, patience_s, self.loop.now(), self.preferred_endpoint)
        if not self._is_closed:
            self.calls.add(call)
            call.start()
        return call

    def local_address(self) -> str:
        """Return this host's address on the last connection that worked, or ""."""
        return self._local_address

    @property
    def trouble(self) -> str:
        """The latest failures by endpoint, as text; empty if the last call succeeded."""
        return format_troubles(self.troubles)

    def close(self) -> None:
        """Cancel all calls and close all streams and connections, without callbacks."""
        self._is_closed = True
        for call in list(self.calls):
            call.cancel()
        for stream in list(self.streams):
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
        self.troubles = {}

    def note_failure(self, troubles: dict[str, str]) -> None:
        self.troubles = {**self.troubles, **troubles}
