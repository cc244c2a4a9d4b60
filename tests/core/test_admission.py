"""Admission: a flood from one address evicts only connections of that address."""

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
def test_admission_evicts_what_a_simple_model_evicts(max_total: int, max_per_group: int, steps) -> None:
    """The limits hold, a new connection is admitted, and the evicted one is the oldest of the new connection's group if
    that is full, else the oldest of a group with the most connections."""
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


def test_a_flood_from_one_address_does_not_evict_others() -> None:
    """A connection from another address survives a flood of ten thousand."""
    admission: Admission[str] = Admission(max_total=64, max_per_group=64)
    admission.admit("legitimate", "10.0.0.2", 0.0)
    closed = [key for number in range(10_000) for key in admission.admit(f"{number}", "10.0.0.66", 0.0)]
    assert "legitimate" in admission
    assert len(admission) == 64
    assert len(closed) == admission.evicted == 10_000 - 63


def test_a_connection_of_a_flooding_address_is_kept_for_the_size_of_its_group() -> None:
    """The newest connections of an address are kept, so that a legitimate one has time to authenticate."""
    admission: Admission[str] = Admission(max_total=64, max_per_group=32)
    for number in range(100):
        admission.admit(f"{number}", "10.0.0.66", 0.0)
    admission.admit("legitimate", "10.0.0.66", 0.0)
    for number in range(100, 131):
        admission.admit(f"{number}", "10.0.0.66", 0.0)
        assert "legitimate" in admission
    assert admission.admit("last", "10.0.0.66", 0.0) == ["legitimate"]


def test_connections_expire_by_age() -> None:
    """The oldest come first, and they count until they are released."""
    admission: Admission[str] = Admission(8, 8)
    admission.admit("old", "a", 0.0)
    admission.admit("new", "b", 4.0)
    assert admission.expired(5.0, 5.0) == []
    assert admission.expired(5.5, 5.0) == ["old"]
    assert admission.expired(9.5, 5.0) == ["old", "new"]
    admission.release("old")
    assert admission.expired(9.5, 5.0) == ["new"]


@pytest.mark.parametrize(("total", "per_group"), [(0, 0), (4, 0), (4, 5)])
def test_invalid_limits_are_rejected(total: int, per_group: int) -> None:
    """A group must hold at least one connection, and not more than all groups together."""
    with pytest.raises(ValueError, match="must hold"):
        Admission(total, per_group)


@given(st.integers(0, (1 << 128) - 1), st.integers(0, (1 << 64) - 1))
@settings(CORE)
def test_addresses_of_one_ipv6_network_are_one_group(number: int, host: int) -> None:
    """A host can choose the last 64 bits of its address, so they are ignored."""
    one = ipaddress.IPv6Address(number)
    other = ipaddress.IPv6Address((number >> 64 << 64) | host)
    if one.ipv4_mapped or other.ipv4_mapped:
        return
    assert peer_group(str(one)) == peer_group(str(other))
    assert peer_group(str(one)) == peer_group(f"{one}%eth0")
    assert peer_group(str(one)) != peer_group(str(ipaddress.IPv6Address(number ^ (1 << 64))))


def test_each_ipv4_address_is_its_own_group() -> None:
    """Also if a dual-stack socket prints it as IPv6."""
    assert peer_group("10.0.0.1") == peer_group("::ffff:10.0.0.1") == "10.0.0.1"
    assert peer_group("127.0.0.1") != peer_group("127.0.0.2")
    assert peer_group("") == ""


def test_from_middle_keeps_the_oldest_and_the_newest_connections() -> None:
    """A connection from before a flood survives it, and one during the flood is kept for half a group."""
    admission: Admission[int] = Admission(8, 8, from_middle=True)
    evicted = [key for number in range(100) for key in admission.admit(number, "a", float(number))]
    assert [number in admission for number in range(4)] == [True] * 4
    assert [number in admission for number in range(96, 100)] == [True] * 4
    assert evicted == list(range(4, 96))


def test_a_connection_can_be_evicted_below_the_limits() -> None:
    """If the caller has no descriptors left, one connection of the largest group is evicted."""
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
def test_importing_it_imports_no_slow_module() -> None:
    """The store process imports it while the first worker waits for its connection."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import tenax._core.admission; print('typing' in sys.modules)"
    command = [sys.executable, "-S", "-I", "-c", code, str(Path(tenax.__file__).parents[1])]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
