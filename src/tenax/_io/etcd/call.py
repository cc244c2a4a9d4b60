"""A call: one operation, asked again and again at one place after the other, until it is answered or patience is over.

Laws:

1. ``done`` or ``failed`` is called once, and not before whoever made the call has it in hand; after ``cancel`` neither.
2. A call may be carried out more than once, and after ``EtcdUnavailable`` with ``is_certain`` False it may still be.
   So callers make their writes idempotent, or guard them with comparisons.
3. Every place is asked before any is asked again; between rounds there is a pause. The time for one attempt doubles
   with every round: etcd that is slow is not etcd that is gone.
4. What etcd will never grant is not asked again. Places that differ about TLS are such only if all of them do.
"""

from __future__ import annotations

from tenax._io.etcd import gateway
from tenax._io.etcd.attempt import Attempt
from tenax._io.etcd.errors import EtcdRejected, EtcdUnavailable
from tenax._io.etcd.operations import Authenticate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tenax._io.etcd.address import Place
    from tenax._io.etcd.client import EtcdClient
    from tenax._io.etcd.errors import EtcdError
    from tenax._io.etcd.gateway import Fault
    from tenax._io.etcd.operations import AnyAnswer, AnyOperation
    from tenax._io.etcd.token import TokenWait
    from tenax._io.ports import Cancellable

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
_AUTHENTICATE_S = 1.0  # at least: checking a password is slow on purpose
_MAX_TOKENS = 3  # in one call, before it is clear that none will do


class EtcdCall:
    """One call that is under way. Made by the client."""

    def __init__(
        self,
        client: EtcdClient,
        operation: AnyOperation,
        done: Callable[[Any], None],
        failed: Callable[[EtcdError], None],
        patience_s: float,
    ) -> None:
        self.begun_at = client.loop.now()
        self.sent_at = self.begun_at  # when the attempt that was answered was sent
        self._client = client
        self._operation = operation
        self._done = done
        self._failed = failed
        self._patience_s = patience_s
        self._until = self.begun_at + patience_s
        self._place: Place = client.best_place
        self._asked_in_round = 0
        self._tls_in_round = 0
        self._round = 0
        self._tokens_refused = 0
        self._is_certain = True
        self._troubles: dict[str, str] = {}
        self._attempt: Attempt | None = None
        self._wait: TokenWait | None = None
        self._timer: Cancellable | None = None
        self._is_over = False

    def start(self) -> None:
        try:
            gateway.encode(self._operation)
        except EtcdRejected as error:
            self._timer = self._client.loop.at(self.begun_at, lambda error=error: self._fail(error))  # type: ignore[misc]
            return
        self._go_on()

    def _go_on(self) -> None:
        self._timer = None
        if self._client.loop.now() >= self._until and self._troubles:
            self._give_up()
        elif isinstance(self._operation, Authenticate):
            self._ask("")
        else:
            self._wait = self._client.token.get(self._ask, self._no_token)
            if self._wait is not None:
                self._timer = self._client.loop.at(self._until, self._give_up)

    def _ask(self, token: str) -> None:
        self._wait = None
        self._cancel_timer()
        client = self._client
        left_s = max(0.001, self._until - client.loop.now())
        limit_s = client.settings.attempt_s * 2**self._round
        if isinstance(self._operation, Authenticate):
            limit_s = max(limit_s, _AUTHENTICATE_S)
        self._attempt = Attempt(
            client.loop, client.pool, self._place, self._operation, token, self._answered, self._attempt_failed
        )
        self._attempt.start(limit_s, left_s)

    # --- how an attempt ends ------------------------------------------------------------------------------------------

    def _answered(self, answer: AnyAnswer) -> None:
        assert self._attempt is not None
        self.sent_at = self._attempt.sent_at
        self._client.went_well(self._place, self._attempt.local_address)
        self._finish()
        self._done(answer)

    def _attempt_failed(self, fault: Fault) -> None:
        assert self._attempt is not None
        attempt, self._attempt = self._attempt, None
        is_certain = fault.is_certain or not gateway.changes_something(self._operation)
        self._is_certain = self._is_certain and is_certain
        match fault.kind:
            case "token" if self._client.token.has_user and self._tokens_refused < _MAX_TOKENS:
                self._tokens_refused += 1
                self._client.token.was_refused(attempt.token)
                self._go_on()
            case "again" | "tls":
                self._try_elsewhere(fault)
            case _:
                self._client.went_badly({self._place.name: fault.message})
                self._fail(fault.error(self._place.name))

    def _try_elsewhere(self, fault: Fault) -> None:
        self._troubles[self._place.name] = fault.message
        self._client.went_badly(self._troubles)
        self._asked_in_round += 1
        self._tls_in_round += fault.kind == "tls"
        asked_at = self._place.name
        self._place = self._client.place_after(self._place)
        if self._asked_in_round < self._client.place_count:
            self._go_on()
            return
        if self._tls_in_round == self._asked_in_round:
            self._fail(fault.error(asked_at))
            return
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._round)
        self._asked_in_round = self._tls_in_round = 0
        self._round += 1
        self._timer = self._client.loop.at(min(self._client.loop.now() + pause_s, self._until), self._go_on)

    def _no_token(self, error: EtcdError) -> None:
        """For want of one nothing was sent."""
        self._wait = None
        self._cancel_timer()
        if isinstance(error, EtcdUnavailable) and self._client.loop.now() < self._until:
            self._troubles.setdefault(self._place.name, "no token could be had")
            self._timer = self._client.loop.at(self._client.loop.now() + _FIRST_PAUSE_S, self._go_on)
        else:
            self._fail(error)

    def _give_up(self) -> None:
        self._timer = None
        troubles = in_words(self._troubles) or self._client.trouble or "no token could be had"
        self._fail(EtcdUnavailable(f"etcd gave no answer within {self._patience_s:g} s: {troubles}", self._is_certain))

    # --- the end ------------------------------------------------------------------------------------------------------

    def _fail(self, error: EtcdError) -> None:
        self._finish()
        if isinstance(error, EtcdUnavailable) and not self._is_certain:
            error = EtcdUnavailable(error.sentence, is_certain=False)
        self._failed(error)

    def cancel(self) -> None:
        """Nobody is told anything any more. What was sent may be carried out all the same."""
        self._finish()

    def _finish(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._cancel_timer()
        if self._wait is not None:
            self._wait.cancel()
        if self._attempt is not None:
            self._attempt.cancel()
            self._attempt = None
        self._client.forget_call(self)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def in_words(troubles: dict[str, str]) -> str:
    """What is wrong, place by place."""
    return "; ".join(f"{name}: {trouble}" for name, trouble in troubles.items())
