"""Prefix: what stands before a line."""

from __future__ import annotations

from tenax._logs.prefix import line_prefix


def test_default_names_role_and_local_rank() -> None:
    """Without a template a line begins as torchrun's do."""
    assert line_prefix(None, role_name="trainer", rank=12, local_rank=4) == "[trainer4]:"


def test_template_is_filled_in() -> None:
    """A template may name the role, both ranks, the generation and the host."""
    filled = line_prefix(
        "[${host}/${role_name} g${generation} rank $rank (${local_rank})] ",
        role_name="trainer",
        rank=12,
        local_rank=4,
        generation=3,
        host="node7",
    )
    assert filled == "[node7/trainer g3 rank 12 (4)] "


def test_unknown_macros_stay() -> None:
    """A macro that means nothing stays as written, also one whose value nobody gave, and a lone dollar."""
    template = "${nobody} ${host} 5$ $$: "
    assert line_prefix(template, role_name="r", rank=0, local_rank=0) == "${nobody} ${host} 5$ $: "


def test_empty_template_is_no_prefix() -> None:
    """An empty template asks for bare lines."""
    assert line_prefix("", role_name="r", rank=0, local_rank=0) == ""
