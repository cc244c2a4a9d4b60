"""When a leader's answers count (``_core/authority.py``): the four cases, at their edges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenax._core.authority import Authority, AuthorityTerms
from tenax._core.lease import LeaseTerms

TERMS = AuthorityTerms(LeaseTerms(1.0, 6.0), outage_s=60.0)
LAPSED = TERMS.sure_s  # since the last proof


FOR_EVER = 1e12


def made(proven_at: float = 0.0, recorded_until: float = FOR_EVER) -> Authority:
    authority = Authority(TERMS, proven_at)
    authority.keep_record(recorded_until)
    return authority


def counts(now: float, *members: float | None, is_at_work: bool = True) -> bool:
    return made().counts(now, is_at_work, members)


def test_a_proven_lease_is_enough() -> None:
    assert counts(LAPSED - 0.01, None, None)
    assert not counts(LAPSED, None, None)


def test_nothing_is_at_stake_while_nobody_works() -> None:
    assert counts(1e6, None, None, is_at_work=False)


def test_together_needs_a_fresh_word_of_every_member() -> None:
    now = 100.0
    fresh, stale = now - TERMS.settle_s + 0.01, now - TERMS.settle_s
    assert counts(now, fresh, now)
    assert not counts(now, stale, now)
    assert not counts(now, None, now), "one that is not linked may be with another leader"


def test_one_member_is_not_together_with_itself() -> None:
    """It goes on for a while, however fresh its own word is."""
    assert counts(TERMS.outage_s - 0.01, TERMS.outage_s - 0.01)
    assert not counts(TERMS.outage_s, TERMS.outage_s)


def test_together_lasts_no_longer_than_the_record() -> None:
    """Else others would begin the run anew, and see nobody to wait for."""
    authority = made(recorded_until=1000.0)
    last = 1000.0 - TERMS.lease.lease_s
    assert authority.counts(last - 0.01, True, [last, last])
    assert not authority.counts(last, True, [last, last])


def test_another_generation_has_other_members() -> None:
    authority = made()
    assert authority.counts(100.0, True, [100.0, 100.0])
    assert authority.counts(101.0, True, [None, None]), "not looked at again: what was seen is good enough"
    authority.lapse()
    assert not authority.counts(101.0, True, [None, None])


@given(
    beat_s=st.floats(0.05, 10), beats=st.floats(2, 50), outage_s=st.floats(1, 1000), words=st.lists(st.floats(0, 100))
)
def test_a_successor_waits_longer_than_any_answer_counts(
    beat_s: float, beats: float, outage_s: float, words: list[float]
) -> None:
    """Whatever the terms: who is not seen in time has begun to stop, and has time to kill its workers."""
    terms = AuthorityTerms(LeaseTerms(beat_s, beat_s * beats), outage_s)
    killing_s = terms.lease.lease_s - terms.lease.fence_s
    assert terms.sure_s < terms.ttl_s
    assert terms.return_s >= terms.settle_s + terms.lease.fence_s + killing_s - 1e-9
    assert terms.alone_s >= terms.outage_s + terms.lease.fence_s + killing_s - 1e-9
    # The last moment at which an answer counts, if a member is not heard after its last word.
    authority = Authority(terms, proven_at=-1e9)
    authority.keep_record(FOR_EVER)
    if len(words) > 1:
        last = min(words)
        assert not authority.counts(last + terms.settle_s, True, words)


@pytest.mark.parametrize("lease_s", [0.5, 2.0, 6.0, 30.0, 300.0])
def test_nodes_find_a_new_leader_before_they_must_stop(lease_s: float) -> None:
    """Where etcd's leases can be that short (2 s is its least)."""
    terms = AuthorityTerms(LeaseTerms(lease_s / 6, lease_s))
    assert terms.ttl_s >= 2
    if lease_s >= 4:
        assert terms.ttl_s < terms.lease.fence_s
