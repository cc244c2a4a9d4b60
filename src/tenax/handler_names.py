"""Handlers by name: ``console``, ``jsonl:/var/log/events.jsonl``, or one that an installed package offers.

A name may carry an argument after a colon; several are separated by commas. Handlers of others are found under an entry
point group: a callable that takes the argument (text, empty when there is none) and returns the handler.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    Maker = Callable[[str], Any]


class UnknownHandler(ValueError):
    """There is no such handler, or it cannot be made. The message says what to do."""


def parse_names(text: str) -> list[tuple[str, str]]:
    """``"console,jsonl:x"`` -> ``[("console", ""), ("jsonl", "x")]``. Empty parts are left out."""
    found = []
    for part in text.split(","):
        name, _, argument = part.strip().partition(":")
        if name:
            found.append((name, argument))
    return found


def make_handlers(text: str, kind: str, own: Mapping[str, Maker], group: str) -> list[Any]:
    """The handlers of this list. ``kind`` is what a person calls them: 'event handler'."""
    return [_made(name, argument, kind, own, group) for name, argument in parse_names(text)]


def _made(name: str, argument: str, kind: str, own: Mapping[str, Maker], group: str) -> Any:
    make = _maker(name, kind, own, group)
    try:
        return make(argument)
    except UnknownHandler:
        raise
    except Exception as error:
        raise UnknownHandler(f"the {kind} {name!r} cannot be made ({type(error).__name__}: {error})") from error


def _maker(name: str, kind: str, own: Mapping[str, Maker], group: str) -> Maker:
    if name in own:
        return own[name]
    from importlib.metadata import entry_points

    offered = {entry.name: entry for entry in entry_points(group=group)}
    if name not in offered:
        known = ", ".join(sorted({*own, *offered}))
        raise UnknownHandler(
            f"there is no {kind} {name!r}; known are {known}; publish yours under the entry point group {group!r}"
        )
    try:
        made: Maker = offered[name].load()
    except Exception as error:
        raise UnknownHandler(
            f"the {kind} {name!r} of {offered[name].value!r} cannot be loaded ({type(error).__name__}: {error})"
        ) from error
    return made
