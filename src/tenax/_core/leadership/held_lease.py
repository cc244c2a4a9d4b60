"""A lease that is granted and kept alive until it is ended, or lost.

Invariants:

1. ``proven_at`` is conservative: the time at which the answered request was sent, not when the answer arrived. After a
   slow grant a keep-alive must succeed before the lease is ``held``, since it may be as old as the first attempt. The
   lease does not expire before ``proven_at`` + TTL.
2. ``lost`` is called once, and only if etcd itself reports that the lease does not exist; silence of etcd is trouble,
   not loss. A new leader may not know a lease yet, so a lease that should be alive is checked twice.
3. Failures are reported to ``troubled``, and retried without a limit.
"""

from __future__ import annotations

import msgspec

from tenax._core.etcd.errors import EtcdUnavailable
from tenax._core.etcd.operations import GrantLease, KeepAlive, LeaseAnswer, RevokeLease

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.etcd.errors import EtcdError
    from tenax._core.leadership.calls import Call, Calls, Timer

_REVOKE_S = 1.0
_MAX_PATIENCE_S = 10.0  # for long leases, too, so that trouble is reported soon
_CHECK_AGAIN_S = 0.2
_MAX_RETRY_S = 1.0  # after a failed call


class KeepAlives(msgspec.Struct, frozen=True, array_like=True):
    """What keep-alives change of a lease."""

    proven_at: float
    timer_at: float | None
    call: int  # its number; 0: none is pending
    is_doubted: bool


class HeldLease:
    """One lease. Its ``id`` is known from the start; it is usable once it is ``held``."""

    def __init__(
        self,
        client: Calls,
        lease_id: int,
        ttl_s: int,
        *,
        held: Callable[[], None],
        lost: Callable[[str], None],
        troubled: Callable[[EtcdError], None],
        every_s: float | None = None,
        on_proven: Callable[[], None] | None = None,
    ) -> None:
        """``lease_id`` is random, because it must be unique in etcd."""
        self.id = lease_id
        self.ttl_s = ttl_s
        self.proven_at = 0.0
        self.is_held = False
        self.on_proven = on_proven
        self._client = client
        self._every_s = ttl_s / 4 if every_s is None else every_s
        self._held = held
        self._lost = lost
        self._troubled = troubled
        self._call: Call | None = None
        self._timer: Timer | None = None
        self._first_sent_at: float | None = None
        self._is_doubted = False
        self._is_over = False

    def start(self) -> None:
        self._grant()

    # --- the grant ----------------------------------------------------------------------------------------------------

    def _grant(self) -> None:
        self._timer = None
        grant = GrantLease(self.ttl_s, self.id)
        self._call = self._client.call(
            grant, self._granted, self._not_granted, patience_s=min(self.ttl_s, _MAX_PATIENCE_S)
        )
        if self._first_sent_at is None:
            self._first_sent_at = self._call.begun_at

    def _granted(self, _: LeaseAnswer) -> None:
        assert self._first_sent_at is not None
        self._call = None
        if self._client.loop.now() < self._first_sent_at + self._every_s:
            self._prove(self._first_sent_at)
        else:
            self._keep_alive()

    def _not_granted(self, error: EtcdError) -> None:
        self._call = None
        if not isinstance(error, EtcdUnavailable) or error.is_certain:
            self._first_sent_at = None
        self._retry(self._grant)
        self._troubled(error)

    def _prove(self, when: float) -> None:
        self.proven_at = when
        self._set_timer(when + self._every_s, self._keep_alive)
        if not self.is_held:
            self.is_held = True
            self._held()
        if self.on_proven is not None and not self._is_over:
            self.on_proven()

    # --- keeping it alive ---------------------------------------------------------------------------------------------

    def _keep_alive(self) -> None:
        self._timer = None
        self._call = self._client.call(
            KeepAlive(self.id), self._kept, self._not_kept, patience_s=min(self.ttl_s, _MAX_PATIENCE_S)
        )

    def _kept(self, answer: LeaseAnswer) -> None:
        assert self._call is not None
        call, self._call = self._call, None
        if answer.ttl_s > 0:
            self._is_doubted = False
            self._prove(call.sent_at)
        elif not self.is_held:  # expired before it was usable
            self._first_sent_at = None
            self._grant()
        elif not self._is_doubted and self._client.loop.now() < self.proven_at + self.ttl_s:
            self._is_doubted = True
            self._set_timer(self._client.loop.now() + _CHECK_AGAIN_S, self._keep_alive)
        else:
            self.close()
            self._lost(f"lease {self.id:x} expired or was revoked")

    def _not_kept(self, error: EtcdError) -> None:
        self._call = None
        self._retry(self._keep_alive)
        self._troubled(error)

    def _retry(self, call: Callable[[], None]) -> None:
        self._set_timer(self._client.loop.now() + min(self._every_s, _MAX_RETRY_S), call)

    def quiet_state(self) -> KeepAlives:
        """Return what keep-alives have changed, for a journal that does not record each of them."""
        timer_at = self._timer.when if self._timer is not None else None
        return KeepAlives(
            self.proven_at, timer_at, self._call.number if self._call is not None else 0, self._is_doubted
        )

    def set_quiet_state(self, state: KeepAlives) -> None:
        was = self.quiet_state()
        self.proven_at, self._is_doubted = state.proven_at, state.is_doubted
        if (was.timer_at, was.call) == (state.timer_at, state.call):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if state.timer_at is None else self._client.loop.at(state.timer_at, self._keep_alive)
        self._call = self._client.replace(self._call, state.call, self._kept, self._not_kept)

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self, then: Callable[[], None] | None = None) -> None:
        """Revoke the lease, for at most ``_REVOKE_S``. ``then`` is called in any case."""
        self.close()

        def ended(_: object) -> None:
            if then is not None:
                then()

        self._client.call(RevokeLease(self.id), ended, ended, patience_s=_REVOKE_S)

    def close(self) -> None:
        """Stop without callbacks. The lease expires by itself."""
        self._is_over = True
        self.is_held = False
        for thing in (self._call, self._timer):
            if thing is not None:
                thing.cancel()
        self._call = self._timer = None

    def _set_timer(self, when: float, call: Callable[[], None]) -> None:
        if not self._is_over:
            self._timer = self._client.loop.at(when, call)
