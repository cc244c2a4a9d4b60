"""The auth token of a client. All calls that need a new token share one authentication."""

from __future__ import annotations

from tenax._core.etcd.errors import EtcdRejected, EtcdUnavailable
from tenax._core.etcd.operations import Authenticate, AuthenticateAnswer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.etcd.errors import EtcdError

    Ready = Callable[[str], None]
    Failed = Callable[[EtcdError], None]
    Authenticator = Callable[[Authenticate, Callable[[AuthenticateAnswer], None], Failed], object]


class TokenWait:
    """One call's wait for a token."""

    def __init__(self, ready: Ready, failed: Failed) -> None:
        self.ready = ready
        self.failed = failed
        self.is_active = True

    def cancel(self) -> None:
        self.is_active = False


class Token:
    """The token of one client; empty without a user."""

    def __init__(self, user: str, password: str, authenticate: Authenticator, waits_for_users: bool = False) -> None:
        self._user = user
        self._password = password
        self._authenticate = authenticate
        self._waits_for_users = waits_for_users
        self.is_without_users = False  # etcd has no users, so the user and the password were ignored
        self._token: str | None = None if user else ""
        self._waits: list[TokenWait] = []

    @property
    def has_user(self) -> bool:
        return bool(self._user)

    def get(self, ready: Ready, failed: Failed) -> TokenWait | None:
        """Call ``ready`` now if the token is known; otherwise return a wait for it."""
        if self._token is not None:
            ready(self._token)
            return None
        wait = TokenWait(ready, failed)
        self._waits.append(wait)
        if len(self._waits) == 1:
            self._authenticate(Authenticate(self._user, self._password), self._arrived, self._refused)
        return wait

    def was_refused(self, token: str) -> None:
        """Discard the token if it is this one."""
        if self._user and token == self._token:
            self._token = None

    def _arrived(self, answer: AuthenticateAnswer) -> None:
        self._token = answer.token
        for wait in self._take_waits():
            if wait.is_active:
                wait.ready(answer.token)

    def _refused(self, error: EtcdError) -> None:
        if isinstance(error, EtcdRejected) and "not enabled" in error.message:
            if not self._waits_for_users:
                self.is_without_users = True
                self._arrived(AuthenticateAnswer(""))  # without users etcd serves every client
                return
            error = EtcdUnavailable("etcd has no users yet", is_certain=True)
        for wait in self._take_waits():
            if wait.is_active:
                wait.failed(error)

    def _take_waits(self) -> list[TokenWait]:
        waits, self._waits = self._waits, []
        return waits
