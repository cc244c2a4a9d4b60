"""The lease: a node that is cut off has stopped before the others start without it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tenax._core.lease import Lease, LeaseTerms

CORE = settings.get_profile("core")

delays = st.floats(0, 6)
beats = st.lists(
    st.tuples(
        st.floats(0.01, 3),  # how long after the one before it was sent
        delays,  # how long it took to the coordinator
        st.none() | delays,  # how long the answer took; None: it was lost
    ),
    min_size=1,
    max_size=12,
)
looks = st.lists(st.floats(0, 40), max_size=4)  # when the node asks its system whether all has arrived
terms = st.builds(LeaseTerms, st.floats(0.1, 2), st.floats(0.5, 30))


@given(terms=terms, beats=beats, cut_after=st.integers(0, 12), looks=looks, killing=st.floats(0, 1, exclude_max=True))
@settings(CORE, max_examples=400)
def test_no_worker_of_a_node_that_was_cut_off_is_alive_when_the_others_start(
    terms, beats, cut_after, looks, killing
) -> None:
    """The law: the node begins to kill at ``ends_at``, needs less than ``lease_s - fence_s``, and is done before the
    coordinator, which counts from the last beat that it heard, may declare it dead; whatever was delayed or lost."""
    lease = Lease(terms, proven_at=0.0)
    sent_at = arrived_at = 0.0
    arrivals: list[tuple[float, float]] = [(0.0, 0.0)]  # (sent, arrived); that we were accepted is the first
    happenings: list[tuple[float, int, int]] = [(at, 2, 0) for at in looks]  # 0: send, 1: an answer, 2: a look
    for number, (gap, to_it, to_us) in enumerate(beats, 1):
        sent_at += gap
        arrived_at = max(arrived_at, sent_at + to_it) if number <= cut_after else float("inf")  # a link keeps the order
        arrivals.append((sent_at, arrived_at))
        happenings.append((sent_at, 0, number))
        if to_us is not None and number <= cut_after:
            happenings.append((arrived_at + to_us, 1, number))
    for now, what, number in sorted(happenings):
        if now > lease.ends_at():
            break  # it has fenced itself
        if what == 0:
            assert lease.beat(now) == number
        elif what == 1:
            lease.answered(number)
        elif all(arrived <= now for sent, arrived in arrivals if sent <= now):
            lease.all_has_arrived()
    gone_at = lease.ends_at() + killing * (terms.lease_s - terms.fence_s)
    last_heard_at = max(arrived for sent, arrived in arrivals if sent <= lease.ends_at() and arrived < float("inf"))
    assert gone_at <= last_heard_at + terms.lease_s


@given(terms=terms, gaps=st.lists(st.floats(0.01, 3), min_size=1, max_size=8), arrived=st.integers(0, 7))
@settings(CORE)
def test_what_the_other_host_has_acknowledged_counts(terms, gaps, arrived: int) -> None:
    """A coordinator that is paused answers nothing. Its host has all that we sent, so we are not cut off."""
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


def test_an_answer_proves_its_own_beat_and_none_after_it() -> None:
    """It counts from when the beat was sent, not from when the answer came: the coordinator may have heard it then."""
    lease = Lease(LeaseTerms(beat_s=1.0, lease_s=10.0), proven_at=0.0)
    first, second, third = lease.beat(1.0), lease.beat(2.0), lease.beat(3.0)
    assert lease.ends_at() == 8.6
    lease.answered(second)
    assert lease.proven_at == 2.0
    lease.answered(first)  # late, and no news
    lease.answered(second)
    lease.answered(99)  # never sent
    assert lease.proven_at == 2.0
    lease.answered(third)
    assert lease.proven_at == 3.0


@given(numbers=st.lists(st.integers(-1, 8), max_size=20))
@settings(CORE)
def test_what_is_proven_stays_proven(numbers: list[int]) -> None:
    """Answers in any order, told twice or made up, never shorten what we know."""
    lease = Lease(LeaseTerms(), proven_at=5.0)
    for at in range(6, 12):
        lease.beat(float(at))
    proven = lease.proven_at
    for number in numbers:
        lease.answered(number)
        assert lease.proven_at >= proven
        proven = lease.proven_at
    assert proven <= 11.0


def test_a_new_connection_goes_on_with_what_was_proven() -> None:
    """Only ``proven_at`` outlives a connection: beats without an answer on the old one prove nothing on the new."""
    old = Lease(LeaseTerms(), proven_at=1.0)
    old.answered(old.beat(2.0))
    old.beat(3.0)
    new = Lease(LeaseTerms(), old.proven_at)
    assert new.ends_at() == old.ends_at() == 2.0 + LeaseTerms().fence_s


def test_the_default_terms_survive_a_pause_of_three_seconds() -> None:
    """A beat that was due just before the pause, three seconds of silence, and the next beat: still ours."""
    terms = LeaseTerms()
    assert terms.beat_s + 3.0 < terms.fence_s < terms.lease_s


def test_an_acknowledgement_does_not_date_what_the_coordinator_sends() -> None:
    """A link that stalls on the way to the node proves its beats by acknowledgements, and what arrives at last may be
    older than a lease. Only an answer shows that what follows it on the link is recent."""
    lease = Lease(LeaseTerms(beat_s=1.0, lease_s=5.0), proven_at=0.0)
    for at in range(1, 8):
        lease.beat(float(at))
        lease.all_has_arrived()
    assert lease.ends_at() > 7.0
    assert not lease.is_answered(7.0)
    lease.answered(7)
    assert lease.is_answered(7.0)


def test_an_answer_counts_after_later_beats_were_acknowledged() -> None:
    """A coordinator that is slow to answer is not taken for one whose events are old."""
    lease = Lease(LeaseTerms(beat_s=1.0, lease_s=5.0), proven_at=0.0)
    for at in range(1, 10):
        lease.beat(float(at))
        lease.all_has_arrived()
        lease.answered(at - 3)
    assert lease.is_answered(10.0)
