"""A call: one operation, tried at one endpoint after the other until it is answered or times out.

Invariants:

1. ``done`` or ``failed`` is called once, and only after ``client.call`` has returned; neither after ``cancel``.
2. A call may be executed more than once, and after ``EtcdUnavailable`` with ``is_certain`` False it may still be
   executed. So callers make their writes idempotent, or guard them with comparisons.
3. Every endpoint is tried before any is tried again, with a pause between rounds. The time for one attempt doubles with
   every round, so that a slow etcd is not taken for a dead one.
4. A final error is not retried. A TLS error is final only if all endpoints report one.
"""

from __future__ import annotations

import msgspec

from tenax._core.etcd.errors import EtcdRejected, EtcdUnavailable
from tenax._core.etcd.operations import Authenticate
from tenax._core.text import format_seconds
from tenax._io.etcd import gateway
from tenax._io.etcd.attempt import Attempt
from tenax._io.etcd.gateway import Fault
from tenax._io.loop import NO_TIMER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tenax._core.etcd.errors import EtcdError
    from tenax._core.etcd.operations import Operation
    from tenax._io.etcd.client import EtcdClient
    from tenax._io.etcd.http_connection import EtcdEndpoint
    from tenax._io.interfaces import Cancellable

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
_AUTHENTICATE_S = 1.0  # at least: bcrypt is slow on purpose
_MAX_TOKENS = 3  # tokens refused in one call before it fails


class EtcdCall(msgspec.Struct, eq=False):
    _client: EtcdClient
    _operation: Operation[Any]
    _done: Callable[[Any], None]
    _failed: Callable[[EtcdError], None]
    _patience_s: float
    begun_at: float
    _endpoint: EtcdEndpoint
    sent_at: float = 0.0  # when the attempt that was answered was sent
    _tried_in_round: int = 0
    _tls_in_round: int = 0
    _round: int = 0
    _tokens_refused: int = 0
    _is_certain: bool = True
    _troubles: dict[str, str] = {}
    _attempt: Attempt | None = None
    _timer: Cancellable = NO_TIMER
    _is_over: bool = False

    @property
    def _until(self) -> float:
        return self.begun_at + self._patience_s

    def start(self) -> None:
        try:
            gateway.encode(self._operation)
        except EtcdRejected as error:
            self._timer = self._client.loop.at(self.begun_at, lambda error=error: self._fail(error))  # type: ignore[misc]
            return
        self._continue()

    def _continue(self) -> None:
        if self._client.loop.now() >= self._until and self._troubles:
            self._give_up()
        elif isinstance(self._operation, Authenticate):
            self._send("")
        else:
            self._client.token.get(self._send, self._no_token)
            if self._attempt is None:  # it waits for a token
                self._timer = self._client.loop.at(self._until, self._give_up)

    def _send(self, token: str) -> None:
        if self._is_over:
            return
        self._timer.cancel()
        client = self._client
        left_s = max(0.001, self._until - client.loop.now())
        limit_s = client.settings.attempt_s * 2**self._round
        if isinstance(self._operation, Authenticate):
            limit_s = max(limit_s, _AUTHENTICATE_S)
        self._attempt = Attempt(client, self._endpoint, token, self._operation, self._attempt_ended)
        self._attempt.start(limit_s, left_s)

    # --- results of an attempt ----------------------------------------------------------------------------------------

    def _attempt_ended(self, found: Any) -> None:
        assert self._attempt is not None
        attempt, self._attempt = self._attempt, None
        if isinstance(found, Fault):
            self._attempt_failed(attempt.token, found)
        else:
            self.sent_at = attempt.sent_at
            self._client.note_success(self._endpoint, attempt.local_address)
            self.cancel()
            self._done(found)

    def _attempt_failed(self, token: str, fault: Fault) -> None:
        is_certain = fault.is_certain or not gateway.has_side_effects(self._operation)
        self._is_certain = self._is_certain and is_certain
        match fault.kind:
            case "token" if self._client.token.has_user and self._tokens_refused < _MAX_TOKENS:
                self._tokens_refused += 1
                self._client.token.was_refused(token)
                self._continue()
            case "again" | "tls":
                self._try_next(fault)
            case _:
                self._client.note_failure({self._endpoint.name: fault.message})
                self._fail(fault.error(self._endpoint.name))

    def _try_next(self, fault: Fault) -> None:
        self._troubles[self._endpoint.name] = fault.message
        self._client.note_failure(self._troubles)
        self._tried_in_round += 1
        self._tls_in_round += fault.kind == "tls"
        tried = self._endpoint.name
        self._endpoint = self._client.endpoint_after(self._endpoint)
        if self._tried_in_round < self._client.endpoint_count:
            self._continue()
            return
        if self._tls_in_round == self._tried_in_round:
            self._fail(fault.error(tried))
            return
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._round)
        self._tried_in_round = self._tls_in_round = 0
        self._round += 1
        self._timer = self._client.loop.at(min(self._client.loop.now() + pause_s, self._until), self._continue)

    def _no_token(self, error: EtcdError) -> None:
        if self._is_over:
            return
        self._timer.cancel()
        if isinstance(error, EtcdUnavailable) and self._client.loop.now() < self._until:
            self._troubles = {self._endpoint.name: "no auth token"} | self._troubles | self._client.troubles
            self._timer = self._client.loop.at(self._client.loop.now() + _FIRST_PAUSE_S, self._continue)
        else:
            self._fail(error)

    def _give_up(self) -> None:
        troubles = format_troubles(self._troubles) or self._client.trouble or "no auth token"
        why = f"etcd did not answer within {format_seconds(self._patience_s)}: {troubles}"
        self._fail(EtcdUnavailable(why, self._is_certain))

    # --- the end ------------------------------------------------------------------------------------------------------

    def _fail(self, error: EtcdError) -> None:
        self.cancel()
        if isinstance(error, EtcdUnavailable) and not self._is_certain:
            error = EtcdUnavailable(error.message, is_certain=False)
        self._failed(error)

    def cancel(self) -> None:
        """Stop without a callback. A request that was sent may still be executed."""
        self._is_over = True
        self._timer.cancel()
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None
        self._client.calls.discard(self)


def format_troubles(troubles: dict[str, str]) -> str:
    return "; ".join(f"{name}: {trouble}" for name, trouble in troubles.items())
