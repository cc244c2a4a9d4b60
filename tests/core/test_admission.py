"""Admission: a flood from one address evicts its own connections, and nobody else's."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tenax
from tenax._core.admission import Admission, peer_group

CORE = settings.get_profile("core")
GROUPS = ("a", "b", "c", "d")


@given(
    max_total=st.integers(1, 12),
    max_per_group=st.integers(1, 12),
    steps=st.lists(st.tuples(st.sampled_from(GROUPS), st.booleans(), st.integers(0, 40)), max_size=80),
)
@settings(CORE, max_examples=400)
def test_it_evicts_what_a_slow_and_simple_model_evicts(max_total: int, max_per_group: int, steps) -> None:
    """Whatever comes and goes: the limits hold, a newcomer has a place, and who is evicted is the oldest of its own
    group if that is full, else the oldest of a group that has most connections."""
    max_per_group = min(max_per_group, max_total)
    admission: Admission[int] = Admission(max_total, max_per_group)
    model: list[tuple[int, str]] = []
    for number, (group, is_release, pick) in enumerate(steps):
        if is_release:
            key = model.pop(pick % len(model))[0] if model else -1
            admission.release(key)
        else:
            sizes = {each: sum(1 for _, of in model if of == each) for each in GROUPS}
            evicted = admission.admit(number, group, float(number))
            if sizes[group] >= max_per_group:
                allowed = {group}
            elif len(model) >= max_total:
                allowed = {each for each in GROUPS if sizes[each] == max(sizes.values())}
            else:
                allowed = set()
            oldest = {each: next(key for key, of in model if of == each) for each in allowed}
            assert len(evicted) == bool(allowed)
            assert all(key in oldest.values() for key in evicted)
            model = [(key, of) for key, of in model if key not in evicted] + [(number, group)]
            assert number in admission
        assert len(admission) == len(model) <= max_total
        assert admission.expired(1e9, 0.0) == [key for key, _ in model]


def test_a_flood_from_one_address_leaves_the_others_alone() -> None:
    """An honest connection from another address outlives ten thousand of a flood."""
    admission: Admission[str] = Admission(max_total=64, max_per_group=64)
    admission.admit("honest", "10.0.0.2", 0.0)
    closed = [key for number in range(10_000) for key in admission.admit(f"{number}", "10.0.0.66", 0.0)]
    assert "honest" in admission
    assert len(admission) == 64
    assert len(closed) == admission.evicted == 10_000 - 63


def test_an_honest_peer_of_the_flooding_address_has_a_place_for_as_long_as_the_group_is_large() -> None:
    """From the same address the newest connections are kept, so that an honest one has time to authenticate."""
    admission: Admission[str] = Admission(max_total=64, max_per_group=32)
    for number in range(100):
        admission.admit(f"{number}", "10.0.0.66", 0.0)
    admission.admit("honest", "10.0.0.66", 0.0)
    for number in range(100, 131):
        admission.admit(f"{number}", "10.0.0.66", 0.0)
        assert "honest" in admission
    assert admission.admit("last", "10.0.0.66", 0.0) == ["honest"]


def test_only_what_is_too_old_has_expired() -> None:
    """Connections expire by their age, the oldest first, and hold their place until they are released."""
    admission: Admission[str] = Admission(8, 8)
    admission.admit("old", "a", 0.0)
    admission.admit("new", "b", 4.0)
    assert admission.expired(5.0, 5.0) == []
    assert admission.expired(5.5, 5.0) == ["old"]
    assert admission.expired(9.5, 5.0) == ["old", "new"]
    admission.release("old")
    assert admission.expired(9.5, 5.0) == ["new"]


@pytest.mark.parametrize(("total", "per_group"), [(0, 0), (4, 0), (4, 5)])
def test_limits_without_a_meaning_are_rejected(total: int, per_group: int) -> None:
    """A group can hold one connection at least, and not more than all groups together."""
    with pytest.raises(ValueError, match="must hold"):
        Admission(total, per_group)


@given(st.integers(0, (1 << 128) - 1), st.integers(0, (1 << 64) - 1))
@settings(CORE)
def test_addresses_of_one_ipv6_network_are_one_group(number: int, host: int) -> None:
    """A host can choose the last 64 bits of its address as it likes: they do not make it another peer."""
    one = ipaddress.IPv6Address(number)
    other = ipaddress.IPv6Address((number >> 64 << 64) | host)
    if one.ipv4_mapped or other.ipv4_mapped:
        return
    assert peer_group(str(one)) == peer_group(str(other))
    assert peer_group(str(one)) == peer_group(f"{one}%eth0")
    assert peer_group(str(one)) != peer_group(str(ipaddress.IPv6Address(number ^ (1 << 64))))


def test_ipv4_addresses_are_groups_of_their_own() -> None:
    """Also where a socket for both families prints them as IPv6."""
    assert peer_group("10.0.0.1") == peer_group("::ffff:10.0.0.1") == "10.0.0.1"
    assert peer_group("127.0.0.1") != peer_group("127.0.0.2")
    assert peer_group("") == ""


def test_from_the_middle_neither_the_oldest_nor_the_newest_of_a_flood_are_evicted() -> None:
    """A connection that was idle before a flood outlasts it, and one that comes during it has time for half a group."""
    admission: Admission[int] = Admission(8, 8, from_middle=True)
    evicted = [key for number in range(100) for key in admission.admit(number, "a", float(number))]
    assert [number in admission for number in range(4)] == [True] * 4
    assert [number in admission for number in range(96, 100)] == [True] * 4
    assert evicted == list(range(4, 96))


def test_a_connection_can_be_evicted_for_another_reason_than_the_limits() -> None:
    """The caller has no descriptors left: one connection of the largest group gives up its place."""
    admission: Admission[int] = Admission(8, 8)
    assert admission.evict_one() == []
    assert admission.oldest_since() is None
    for number, group in enumerate("abba"):
        admission.admit(number, group, float(number))
    admission.admit(4, "b", 4.0)
    assert admission.evict_one() == [1]
    assert admission.oldest_since() == 0.0
    assert len(admission) == 4


@pytest.mark.process
def test_importing_it_imports_nothing_that_is_slow() -> None:
    """The store's process imports it when the first worker connects, which waits for that."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import tenax._core.admission; print('typing' in sys.modules)"
    command = [sys.executable, "-S", "-I", "-c", code, str(Path(tenax.__file__).parents[1])]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
