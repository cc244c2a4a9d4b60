"""The token: what etcd gives for a user and a password. Asked for once at a time, for all calls that wait for it."""

from __future__ import annotations

from tenax._io.etcd.errors import EtcdRejected, EtcdUnavailable
from tenax._io.etcd.operations import Authenticate, AuthenticateAnswer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._io.etcd.errors import EtcdError

    Ready = Callable[[str], None]
    Failed = Callable[[EtcdError], None]
    Ask = Callable[[Authenticate, Callable[[AuthenticateAnswer], None], Failed], object]


class TokenWait:
    """One call's wait for a token."""

    def __init__(self, ready: Ready, failed: Failed) -> None:
        self.ready = ready
        self.failed = failed
        self.is_wanted = True

    def cancel(self) -> None:
        self.is_wanted = False


class Token:
    """The token of one client. Without a user there is none, and none is needed."""

    def __init__(self, user: str, password: str, ask: Ask, waits_for_users: bool = False) -> None:
        self._user = user
        self._password = password
        self._ask = ask
        self._waits_for_users = waits_for_users
        self.is_without_users = False  # etcd has none: the user and the password were not asked for
        self._token: str | None = None if user else ""
        self._waits: list[TokenWait] = []

    @property
    def has_user(self) -> bool:
        return bool(self._user)

    def get(self, ready: Ready, failed: Failed) -> TokenWait | None:
        """``ready`` is called now if the token is known; else the wait is returned."""
        if self._token is not None:
            ready(self._token)
            return None
        wait = TokenWait(ready, failed)
        self._waits.append(wait)
        if len(self._waits) == 1:
            self._ask(Authenticate(self._user, self._password), self._arrived, self._refused)
        return wait

    def was_refused(self, token: str) -> None:
        """This one is not good any more, wherever it came from."""
        if self._user and token == self._token:
            self._token = None

    def _arrived(self, answer: AuthenticateAnswer) -> None:
        self._token = answer.token
        for wait in self._take_waits():
            if wait.is_wanted:
                wait.ready(answer.token)

    def _refused(self, error: EtcdError) -> None:
        if isinstance(error, EtcdRejected) and "not enabled" in error.sentence:
            if not self._waits_for_users:
                self.is_without_users = True
                self._arrived(AuthenticateAnswer(""))  # etcd knows no users (yet): it serves everybody
                return
            error = EtcdUnavailable("etcd has no users yet", is_certain=True)
        for wait in self._take_waits():
            if wait.is_wanted:
                wait.failed(error)

    def _take_waits(self) -> list[TokenWait]:
        waits, self._waits = self._waits, []
        return waits
