"""Std: selects output streams."""

from __future__ import annotations

import pytest

from tenax._logs.specs import Std, to_map


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
def test_a_number_is_for_all_ranks_and_a_list_for_some(text: str, expected: object) -> None:
    """Local ranks may have any number of digits."""
    assert Std.from_str(text) == expected


@pytest.mark.parametrize("text", ["", "4", "-1", "00", "a", "0:4", "0:", ":1", "0:1,", "0:1;1:1", "1\n", "0:1\n", "٣"])
def test_invalid_text_is_rejected_with_the_expected_format(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid streams .*; expected 0") as rejected:
        Std.from_str(text)
    assert repr(text) in str(rejected.value)


def test_flags_combine_like_bits() -> None:
    """So that tee and redirects can be joined."""
    assert Std.OUT | Std.ERR == Std.ALL
    assert Std.ALL & Std.ERR == Std.ERR
    assert not Std.NONE


def test_a_map_is_extended_to_all_local_ranks() -> None:
    """One value goes to every rank; ranks missing in a map get none; ranks that do not exist are ignored."""
    assert to_map(Std.OUT, 2) == {0: Std.OUT, 1: Std.OUT}
    assert to_map({0: Std.ALL, 10: Std.ERR, 99: Std.ALL}, 12) == {
        **dict.fromkeys(range(12), Std.NONE),
        0: Std.ALL,
        10: Std.ERR,
    }
