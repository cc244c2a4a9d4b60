"""Std: how a person says which streams are meant."""

from __future__ import annotations

import pytest

from tenax._logs.std import Std, to_map


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", Std.NONE),
        ("1", Std.OUT),
        ("2", Std.ERR),
        ("3", Std.ALL),
        ("0:3", {0: Std.ALL}),
        ("0:1,1:2,2:0", {0: Std.OUT, 1: Std.ERR, 2: Std.NONE}),
        ("7:3,12:1,107:2", {7: Std.ALL, 12: Std.OUT, 107: Std.ERR}),
    ],
)
def test_a_number_is_for_all_and_a_list_is_for_ranks(text: str, expected: object) -> None:
    """One digit means every worker; a list names local ranks, of any number of digits."""
    assert Std.from_str(text) == expected


@pytest.mark.parametrize("text", ["", "4", "-1", "00", "a", "0:4", "0:", ":1", "0:1,", "0:1;1:1", "1\n", "0:1\n", "٣"])
def test_nonsense_is_refused_in_one_sentence(text: str) -> None:
    """Anything else is refused, and the sentence says what to write instead."""
    with pytest.raises(ValueError, match="does not say which streams are meant: write 0") as refusal:
        Std.from_str(text)
    assert repr(text) in str(refusal.value)


def test_flags_combine_as_numbers_do() -> None:
    """OUT and ERR are bits of ALL, so that tee and redirects can be joined."""
    assert Std.OUT | Std.ERR == Std.ALL
    assert Std.ALL & Std.ERR == Std.ERR
    assert not Std.NONE


def test_a_map_is_spread_over_the_local_ranks() -> None:
    """One value goes to every rank; ranks that a map does not name get none; ranks that do not exist are ignored."""
    assert to_map(Std.OUT, 2) == {0: Std.OUT, 1: Std.OUT}
    assert to_map({0: Std.ALL, 10: Std.ERR, 99: Std.ALL}, 12) == {
        **dict.fromkeys(range(12), Std.NONE),
        0: Std.ALL,
        10: Std.ERR,
    }
