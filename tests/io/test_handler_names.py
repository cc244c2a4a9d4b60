"""Handlers by name: lists, arguments, packages of others, and sentences for what cannot be had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tenax._io.handler_names import UnknownHandler, check_names, make_handlers, parse_names


class Handler:
    """Takes events, and notes that it was closed."""

    def __init__(self, name: str, raises: Exception | None = None) -> None:
        self.name = name
        self.is_closed = False
        self._raises = raises

    def record(self, event: object) -> None:
        """Nothing comes here in these tests."""

    def close(self) -> None:
        self.is_closed = True
        if self._raises is not None:
            raise self._raises


OWN = {
    "console": lambda argument: Handler(f"console({argument})"),
    "jsonl": lambda argument: Handler(f"jsonl({argument})"),
}


def made(text: str, own: Mapping[str, Callable[[str], object]] = OWN, group: str = "nobody.offers") -> list[str]:
    return [handler.name for handler in make_handlers(text, "event handler", own, group, "record")]


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
    assert made("jsonl:x,console") == ["jsonl(x)", "console()"]


def test_a_name_that_nobody_knows_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnknownHandler) as refused:
        made("splunk", group="tenax.event_handlers")
    assert str(refused.value).startswith("there is no event handler 'splunk'; known are console, jsonl")
    assert "entry point group 'tenax.event_handlers'" in str(refused.value)


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """A package as pip would have laid it down."""
    info = folder / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tests.handlers]\ntheirs = {target}\n")
    (folder / "their_handlers.py").write_text(
        "class Theirs:\n"
        "    def __init__(self, argument): self.name = f'theirs({argument})'\n"
        "    def record(self, event): pass\n"
        "def tired(argument): raise OSError('no\\nserver')\n"
    )
    monkeypatch.syspath_prepend(folder)


def test_an_installed_package_offers_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, "their_handlers:Theirs")
    assert made("theirs:42", group="tests.handlers") == ["theirs(42)"]


def test_a_package_that_is_broken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, "their_handlers:gone")
    with pytest.raises(UnknownHandler, match=r"the event handler 'theirs' of 'their_handlers:gone' cannot be loaded"):
        made("theirs", group="tests.handlers")


def test_one_that_cannot_be_made_is_named_on_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, "their_handlers:tired")
    with pytest.raises(UnknownHandler) as refused:
        made("theirs", group="tests.handlers")
    assert str(refused.value) == "the event handler 'theirs' cannot be made (OSError: no server)"


@pytest.mark.parametrize(
    ("maker", "what"),
    [(lambda _: None, "None"), (lambda _: "text", "of type 'str'"), (lambda _: Handler, "the class Handler")],
    ids=["nothing", "something else", "a class"],
)
def test_what_is_no_handler_is_refused(maker: Callable[[str], object], what: str) -> None:
    """Before a job runs, and not at its first event."""
    with pytest.raises(UnknownHandler) as refused:
        made("mine", {"mine": maker})
    assert str(refused.value) == (
        f"the event handler 'mine' is {what}; its maker must return an object with a method 'record'"
    )


def test_those_that_were_made_are_closed_when_a_later_one_cannot_be() -> None:
    first, second = Handler("first", OSError("gone")), Handler("second")
    own = {"first": lambda _: first, "second": lambda _: second}
    with pytest.raises(UnknownHandler) as refused:
        made("first,second,third", own)
    assert first.is_closed
    assert second.is_closed
    assert str(refused.value).startswith("there is no event handler 'third'; known are first, second; ")
    assert str(refused.value).endswith("; one that was made before could not be closed (OSError: gone)")


def test_a_check_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses a name that is nobody's and a package that cannot be loaded."""
    _install(tmp_path, monkeypatch, "their_handlers:tired")

    def check(text: str) -> None:
        check_names(text, "event handler", {"own": lambda _: pytest.fail("was made")}, "tests.handlers")

    check("own:x, theirs:y,")
    with pytest.raises(UnknownHandler, match="there is no event handler 'splunk'; known are own, theirs; "):
        check("own,splunk")


def test_a_check_refuses_a_package_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, "their_handlers:gone")
    with pytest.raises(UnknownHandler, match=r"the event handler 'theirs' of 'their_handlers:gone' cannot be loaded"):
        check_names("theirs", "event handler", {}, "tests.handlers")
