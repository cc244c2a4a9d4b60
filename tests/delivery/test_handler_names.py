"""Handlers by name: lists, arguments, packages of others, and sentences for what cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenax.handler_names import UnknownHandler, make_handlers, parse_names

OWN = {"console": lambda argument: f"console({argument})", "jsonl": lambda argument: f"jsonl({argument})"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("null", [("null", "")]),
        ("console,jsonl:/tmp/a b.jsonl", [("console", ""), ("jsonl", "/tmp/a b.jsonl")]),
        (" console , ,statsd:host:8125 ", [("console", ""), ("statsd", "host:8125")]),
    ],
)
def test_a_list_of_names(text: str, names: list[tuple[str, str]]) -> None:
    assert parse_names(text) == names


def test_each_name_makes_its_handler() -> None:
    assert make_handlers("jsonl:x,console", "event handler", OWN, "nobody.offers") == ["jsonl(x)", "console()"]


def test_a_name_that_nobody_knows_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnknownHandler) as refused:
        make_handlers("splunk", "event handler", OWN, "tenax.event_handlers")
    assert str(refused.value).startswith("there is no event handler 'splunk'; known are console, jsonl")
    assert "entry point group 'tenax.event_handlers'" in str(refused.value)


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """A package as pip would have laid it down."""
    info = folder / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tests.handlers]\ntheirs = {target}\n")
    (folder / "their_handlers.py").write_text("def make(argument):\n    return f'theirs({argument})'\n")
    monkeypatch.syspath_prepend(folder)


def test_an_installed_package_offers_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, "their_handlers:make")
    assert make_handlers("theirs:42", "event handler", OWN, "tests.handlers") == ["theirs(42)"]


def test_a_package_that_is_broken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, "their_handlers:gone")
    with pytest.raises(UnknownHandler, match=r"the event handler 'theirs' of 'their_handlers:gone' cannot be loaded"):
        make_handlers("theirs", "event handler", OWN, "tests.handlers")
