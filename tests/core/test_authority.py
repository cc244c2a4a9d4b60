"""When the answers of a leader count (``_core/authority.py``): the four cases, at their limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenax._core.authority import Authority, AuthorityTerms
from tenax._core.lease import LeaseTerms

TERMS = AuthorityTerms(LeaseTerms(1.0, 6.0), outage_s=60.0)
LAPSED = TERMS.sure_s  # since the last proof
FOREVER = 1e12


def make_authority(proven_at: float = 0.0, recorded_until: float = FOREVER) -> Authority:
    authority = Authority(TERMS, proven_at)
    authority.keep_record(recorded_until)
    return authority


def counts(now: float, *members: float | None, is_at_work: bool = True) -> bool:
    return make_authority().counts(now, is_at_work, members)


def test_answers_count_under_a_proven_lease() -> None:
    assert counts(LAPSED - 0.01, None, None)
    assert not counts(LAPSED, None, None)


def test_answers_count_while_no_generation_runs() -> None:
    assert counts(1e6, None, None, is_at_work=False)


def test_without_a_lease_every_member_must_have_sent_recently() -> None:
    now = 100.0
    fresh, stale = now - TERMS.settle_s + 0.01, now - TERMS.settle_s
    assert counts(now, fresh, now)
    assert not counts(now, stale, now)
    assert not counts(now, None, now), "a disconnected member may follow another leader"


def test_a_single_member_continues_only_for_a_limited_time() -> None:
    """However recent its own messages are."""
    assert counts(TERMS.outage_s - 0.01, TERMS.outage_s - 0.01)
    assert not counts(TERMS.outage_s, TERMS.outage_s)


def test_answers_do_not_count_longer_than_the_record_exists() -> None:
    """Otherwise other nodes would start the run again and wait for no node."""
    authority = make_authority(recorded_until=1000.0)
    last = 1000.0 - TERMS.lease.lease_s
    assert authority.counts(last - 0.01, True, [last, last])
    assert not authority.counts(last, True, [last, last])


def test_the_members_of_another_generation_are_checked_again() -> None:
    authority = make_authority()
    assert authority.counts(100.0, True, [100.0, 100.0])
    assert authority.counts(101.0, True, [None, None]), "checked again too early"
    authority.lapse()
    assert not authority.counts(101.0, True, [None, None])


@given(
    beat_s=st.floats(0.05, 10), beats=st.floats(2, 50), outage_s=st.floats(1, 1000), sent_at=st.lists(st.floats(0, 100))
)
def test_a_successor_waits_longer_than_any_answer_counts(
    beat_s: float, beats: float, outage_s: float, sent_at: list[float]
) -> None:
    """For any terms: a member that does not return in time has begun to stop, and had time to kill its workers."""
    terms = AuthorityTerms(LeaseTerms(beat_s, beat_s * beats), outage_s)
    killing_s = terms.lease.lease_s - terms.lease.fence_s
    assert terms.sure_s < terms.ttl_s
    assert terms.return_s >= terms.settle_s + terms.lease.fence_s + killing_s - 1e-9
    assert terms.alone_s >= terms.outage_s + terms.lease.fence_s + killing_s - 1e-9
    # No answer counts longer than this after the last message of a member.
    authority = Authority(terms, proven_at=-1e9)
    authority.keep_record(FOREVER)
    if len(sent_at) > 1:
        last = min(sent_at)
        assert not authority.counts(last + terms.settle_s, True, sent_at)


@pytest.mark.parametrize("lease_s", [0.5, 2.0, 6.0, 30.0, 300.0])
def test_nodes_find_a_new_leader_before_they_must_stop(lease_s: float) -> None:
    """If etcd's leases can be short enough (its minimum is 2 s)."""
    terms = AuthorityTerms(LeaseTerms(lease_s / 6, lease_s))
    assert terms.ttl_s >= 2
    if lease_s >= 4:
        assert terms.ttl_s < terms.lease.fence_s
