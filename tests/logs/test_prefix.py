"""The prefix of a worker's lines."""

from __future__ import annotations

from tenax._logs.specs import line_prefix


def test_the_default_prefix_has_role_and_local_rank() -> None:
    """The same as torchrun's."""
    assert line_prefix(None, role_name="trainer", rank=12, local_rank=4) == "[trainer4]:"


def test_a_template_is_filled_in() -> None:
    """It may contain the role, both ranks, the generation and the host."""
    filled = line_prefix(
        "[${host}/${role_name} g${generation} rank $rank (${local_rank})] ",
        role_name="trainer",
        rank=12,
        local_rank=4,
        generation=3,
        host="node7",
    )
    assert filled == "[node7/trainer g3 rank 12 (4)] "


def test_unknown_macros_are_kept() -> None:
    """So are macros without a value, and a lone dollar."""
    template = "${unknown} ${host} 5$ $$: "
    assert line_prefix(template, role_name="r", rank=0, local_rank=0) == "${unknown} ${host} 5$ $: "


def test_an_empty_template_gives_no_prefix() -> None:
    assert line_prefix("", role_name="r", rank=0, local_rank=0) == ""
