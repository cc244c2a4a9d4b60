"""Handlers by name: lists, arguments, third-party packages, and errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tenax._io.handler_names import UnknownHandler, check_names, make_handlers, parse_names


class Handler:
    """Accepts events and records that it was closed."""

    def __init__(self, name: str, raises: Exception | None = None) -> None:
        self.name = name
        self.is_closed = False
        self._raises = raises

    def record(self, event: object) -> None:
        """Not called in these tests."""

    def close(self) -> None:
        self.is_closed = True
        if self._raises is not None:
            raise self._raises


OWN = {
    "console": lambda argument: Handler(f"console({argument})"),
    "jsonl": lambda argument: Handler(f"jsonl({argument})"),
}


def names_of(text: str, own: Mapping[str, Callable[[str], object]] = OWN, group: str = "tests.empty") -> list[str]:
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
def test_names_and_arguments_are_parsed(text: str, names: list[tuple[str, str]]) -> None:
    assert parse_names(text) == names


def test_each_name_creates_its_handler() -> None:
    assert names_of("jsonl:x,console") == ["jsonl(x)", "console()"]


def test_an_unknown_name_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(UnknownHandler) as caught:
        names_of("splunk", group="tenax.event_handlers")
    assert str(caught.value).startswith("unknown event handler 'splunk'; known: console, jsonl")
    assert "entry point in the group 'tenax.event_handlers'" in str(caught.value)


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Write a package as pip installs it."""
    info = folder / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tests.handlers]\ntheirs = {target}\n")
    (folder / "their_handlers.py").write_text(
        "class Theirs:\n"
        "    def __init__(self, argument): self.name = f'theirs({argument})'\n"
        "    def record(self, event): pass\n"
        "def failing(argument): raise OSError('no\\nserver')\n"
    )
    monkeypatch.syspath_prepend(folder)


def test_an_installed_package_provides_a_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, "their_handlers:Theirs")
    assert names_of("theirs:42", group="tests.handlers") == ["theirs(42)"]


def test_a_broken_package_is_reported_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, "their_handlers:gone")
    with pytest.raises(UnknownHandler, match=r"could not load the event handler 'theirs' from 'their_handlers:gone'"):
        names_of("theirs", group="tests.handlers")


def test_a_failing_factory_is_reported_on_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, "their_handlers:failing")
    with pytest.raises(UnknownHandler) as caught:
        names_of("theirs", group="tests.handlers")
    assert str(caught.value) == "could not create the event handler 'theirs' (OSError: no server)"


@pytest.mark.parametrize(
    ("factory", "found"),
    [(lambda _: None, "None"), (lambda _: "text", "of type 'str'"), (lambda _: Handler, "the class Handler")],
    ids=["none", "another type", "a class"],
)
def test_a_factory_that_returns_no_handler_is_rejected(factory: Callable[[str], object], found: str) -> None:
    """Before the job runs, not at its first event."""
    with pytest.raises(UnknownHandler) as caught:
        names_of("mine", {"mine": factory})
    assert str(caught.value) == (
        f"the event handler 'mine' is {found}; its factory must return an object with a method 'record'"
    )


def test_created_handlers_are_closed_if_a_later_one_fails() -> None:
    first, second = Handler("first", OSError("gone")), Handler("second")
    own = {"first": lambda _: first, "second": lambda _: second}
    with pytest.raises(UnknownHandler) as caught:
        names_of("first,second,third", own)
    assert first.is_closed
    assert second.is_closed
    assert str(caught.value).startswith("unknown event handler 'third'; known: first, second; ")
    assert str(caught.value).endswith("; a handler created before it could not be closed (OSError: gone)")


def test_check_names_creates_no_handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It rejects an unknown name."""
    _install(tmp_path, monkeypatch, "their_handlers:failing")

    def check(text: str) -> None:
        check_names(text, "event handler", {"own": lambda _: pytest.fail("created")}, "tests.handlers")

    check("own:x, theirs:y,")
    with pytest.raises(UnknownHandler, match="unknown event handler 'splunk'; known: own, theirs; "):
        check("own,splunk")


def test_check_names_rejects_a_package_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, "their_handlers:gone")
    with pytest.raises(UnknownHandler, match=r"could not load the event handler 'theirs' from 'their_handlers:gone'"):
        check_names("theirs", "event handler", {}, "tests.handlers")
