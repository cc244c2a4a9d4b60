"""Handlers by name: ``console``, ``jsonl:/var/log/events.jsonl``, or one that an installed package offers.

A name may carry an argument after a colon; several are separated by commas. Handlers of others are found under an entry
point group: a callable that takes the argument (text, empty when there is none) and returns the handler.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
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


def make_handlers(text: str, kind: str, own: Mapping[str, Maker], group: str, method: str) -> list[Any]:
    """The handlers of this list: all of them, or none is left open. Raises ``UnknownHandler``.

    ``kind`` is what a person calls them: 'event handler'. ``method`` is the one that each must have: 'record'.
    """
    made: list[Any] = []
    try:
        for name, argument in parse_names(text):
            handler = _made(name, argument, kind, own, group)
            _check_method(handler, name, kind, method)
            made.append(handler)
    except BaseException as error:
        troubles = close_all(made)
        if troubles and isinstance(error, UnknownHandler):
            raise UnknownHandler(
                f"{error}; one that was made before could not be closed ({_in_words(troubles[0])})"
            ) from error
        raise
    return made


def check_names(text: str, kind: str, own: Mapping[str, Maker], group: str) -> None:
    """Raises ``UnknownHandler`` if a name is nobody's or cannot be loaded. Makes and opens nothing."""
    for name, _ in parse_names(text):
        _maker(name, kind, own, group)


def close_all(handlers: Iterable[Any]) -> list[Exception]:
    """Close each that can be closed, whatever the others do. Returns what they raised."""
    errors = []
    for handler in handlers:
        try:
            getattr(handler, "close", lambda: None)()
        except Exception as error:  # told by the caller
            errors.append(error)
    return errors


def _made(name: str, argument: str, kind: str, own: Mapping[str, Maker], group: str) -> Any:
    make = _maker(name, kind, own, group)
    try:
        return make(argument)
    except UnknownHandler:
        raise
    except Exception as error:
        raise UnknownHandler(f"the {kind} {name!r} cannot be made ({_in_words(error)})") from error


def _check_method(handler: object, name: str, kind: str, method: str) -> None:
    if isinstance(handler, type):
        found = f"the class {handler.__name__}"
    elif callable(getattr(handler, method, None)):
        return
    else:
        found = "None" if handler is None else f"of type {type(handler).__name__!r}"
    raise UnknownHandler(f"the {kind} {name!r} is {found}; its maker must return an object with a method {method!r}")


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
            f"the {kind} {name!r} of {offered[name].value!r} cannot be loaded ({_in_words(error)})"
        ) from error
    return made


def _in_words(error: Exception) -> str:
    """On one line, whatever its text is."""
    return " ".join(f"{type(error).__name__}: {error}".split())
