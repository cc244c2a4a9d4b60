"""The lease: a node that is cut off has stopped before the others start without it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tenax._core.lease import Lease, LeaseTerms

CORE = settings.get_profile("core")

delays = st.floats(0, 6)
beats = st.lists(
    st.tuples(
        st.floats(0.01, 3),  # time since the last beat
        delays,  # delay to the coordinator
        st.none() | delays,  # delay of the answer; None: lost
    ),
    min_size=1,
    max_size=12,
)
checks = st.lists(st.floats(0, 40), max_size=4)  # when the node checks whether all data is acknowledged
terms = st.builds(LeaseTerms, st.floats(0.1, 2), st.floats(0.5, 30))


@given(terms=terms, beats=beats, cut_after=st.integers(0, 12), checks=checks, killing=st.floats(0, 1, exclude_max=True))
@settings(CORE, max_examples=400)
def test_no_worker_of_a_node_that_was_cut_off_is_alive_when_the_others_start(
    terms, beats, cut_after, checks, killing
) -> None:
    """The node begins to kill its workers at ``ends_at`` and needs less than ``lease_s - fence_s``. The coordinator
    declares it lost ``lease_s`` after the last beat it received, which is later, whatever was delayed or lost."""
    lease = Lease(terms, proven_at=0.0)
    sent_at = arrived_at = 0.0
    arrivals: list[tuple[float, float]] = [(0.0, 0.0)]  # (sent, arrived); the first is the accepted connection
    steps: list[tuple[float, int, int]] = [(at, 2, 0) for at in checks]  # 0: beat, 1: answer, 2: check
    for number, (gap, there_s, back_s) in enumerate(beats, 1):
        sent_at += gap
        arrived_at = (
            max(arrived_at, sent_at + there_s) if number <= cut_after else float("inf")
        )  # a link keeps the order
        arrivals.append((sent_at, arrived_at))
        steps.append((sent_at, 0, number))
        if back_s is not None and number <= cut_after:
            steps.append((arrived_at + back_s, 1, number))
    for now, what, number in sorted(steps):
        if now > lease.ends_at():
            break  # it has fenced itself
        if what == 0:
            assert lease.beat(now) == number
        elif what == 1:
            lease.answered(number)
        elif all(arrived <= now for sent, arrived in arrivals if sent <= now):
            lease.all_has_arrived()
    gone_at = lease.ends_at() + killing * (terms.lease_s - terms.fence_s)
    last_received_at = max(arrived for sent, arrived in arrivals if sent <= lease.ends_at() and arrived < float("inf"))
    assert gone_at <= last_received_at + terms.lease_s


@given(terms=terms, gaps=st.lists(st.floats(0.01, 3), min_size=1, max_size=8), arrived=st.integers(0, 7))
@settings(CORE)
def test_acknowledged_beats_extend_the_lease(terms, gaps, arrived: int) -> None:
    """A suspended coordinator does not answer, but its host acknowledges what the node sends, so it is not cut off."""
    lease = Lease(terms, proven_at=0.0)
    now = 0.0
    sent = [now := now + gap for gap in gaps]
    proven = 0.0
    for index, at in enumerate(sent):
        lease.beat(at)
        if index == arrived:
            lease.all_has_arrived()
            proven = at
    assert lease.proven_at == proven
    assert lease.ends_at() == proven + terms.fence_s


def test_an_answer_proves_its_own_beat_but_no_later_one() -> None:
    """It counts from when the beat was sent, not from when the answer arrived."""
    lease = Lease(LeaseTerms(beat_s=1.0, lease_s=10.0), proven_at=0.0)
    first, second, third = lease.beat(1.0), lease.beat(2.0), lease.beat(3.0)
    assert lease.ends_at() == 8.6
    lease.answered(second)
    assert lease.proven_at == 2.0
    lease.answered(first)  # late
    lease.answered(second)
    lease.answered(99)  # never sent
    assert lease.proven_at == 2.0
    lease.answered(third)
    assert lease.proven_at == 3.0


@given(numbers=st.lists(st.integers(-1, 8), max_size=20))
@settings(CORE)
def test_no_answer_shortens_the_lease(numbers: list[int]) -> None:
    """Answers may arrive in any order, twice, or for beats that were never sent."""
    lease = Lease(LeaseTerms(), proven_at=5.0)
    for at in range(6, 12):
        lease.beat(float(at))
    proven = lease.proven_at
    for number in numbers:
        lease.answered(number)
        assert lease.proven_at >= proven
        proven = lease.proven_at
    assert proven <= 11.0


def test_only_beats_whose_answer_can_renew_the_lease_are_remembered() -> None:
    """A coordinator may be suspended for a day, while the node has left and waits for its workers to exit."""
    lease = Lease(LeaseTerms(beat_s=1.0, lease_s=5.0), proven_at=0.0)
    for at in range(1, 101):
        lease.beat(float(at))
    assert list(lease._sent.values()) == [96.0, 97.0, 98.0, 99.0, 100.0]
    lease.answered(95)
    assert lease.proven_at == 0.0
    lease.answered(96)
    assert lease.proven_at == 96.0


def test_a_new_connection_continues_from_the_last_proof() -> None:
    """Only ``proven_at`` outlives a connection; its unanswered beats do not count on the next one."""
    old = Lease(LeaseTerms(), proven_at=1.0)
    old.answered(old.beat(2.0))
    old.beat(3.0)
    new = Lease(LeaseTerms(), old.proven_at)
    assert new.ends_at() == old.ends_at() == 2.0 + LeaseTerms().fence_s


def test_the_default_terms_survive_a_pause_of_three_seconds() -> None:
    """The time from one beat to the next is then ``beat_s`` + 3 s, which is less than the fence."""
    terms = LeaseTerms()
    assert terms.beat_s + 3.0 < terms.fence_s < terms.lease_s


def test_an_acknowledgement_does_not_prove_that_received_events_are_recent() -> None:
    """If the link to the node stalls, its beats are acknowledged, but what finally arrives may be older than a lease.
    Only an answer shows that what follows it on the link is recent."""
    lease = Lease(LeaseTerms(beat_s=1.0, lease_s=5.0), proven_at=0.0)
    for at in range(1, 8):
        lease.beat(float(at))
        lease.all_has_arrived()
    assert lease.ends_at() > 7.0
    assert not lease.is_answered(7.0)
    lease.answered(7)
    assert lease.is_answered(7.0)


def test_an_answer_counts_after_later_beats_were_acknowledged() -> None:
    """Events of a coordinator that answers slowly are not taken as old."""
    lease = Lease(LeaseTerms(beat_s=1.0, lease_s=5.0), proven_at=0.0)
    for at in range(1, 10):
        lease.beat(float(at))
        lease.all_has_arrived()
        lease.answered(at - 3)
    assert lease.is_answered(10.0)
