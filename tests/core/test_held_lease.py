"""A held lease without a network: what is requested, and when."""

from __future__ import annotations

from tenax._core.etcd.errors import EtcdUnavailable
from tenax._core.etcd.operations import GrantLease, LeaseAnswer
from tenax._core.leadership.calls import Calls, Cancel, Request
from tenax._core.leadership.held_lease import HeldLease


def test_a_failed_grant_of_a_long_lease_is_tried_again_soon() -> None:
    """Not after the time between two keep-alives, which is an hour for a lease of a day."""
    requests: list[Request | Cancel] = []
    held: list[str] = []
    calls = Calls(100.0, requests.append)
    lease = HeldLease(
        calls, 7, 86_400, held=lambda: held.append("held"), lost=held.append, troubled=lambda _: None, every_s=3600.0
    )
    lease.start()
    calls.loop.set(110.0)
    calls.failed(1, EtcdUnavailable("no answer"))
    deadline = calls.loop.next_deadline()
    assert deadline is not None
    assert deadline <= 111.0
    calls.loop.set(deadline)
    calls.loop.fire()
    assert isinstance(requests[-1], Request)
    assert requests[-1].operation == GrantLease(86_400, 7)
    calls.answered(2, LeaseAnswer(id=7, ttl_s=86_400), deadline)
    assert held == ["held"]
