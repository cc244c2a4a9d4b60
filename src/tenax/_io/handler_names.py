"""Handlers by name: ``console``, ``jsonl:/var/log/events.jsonl``, or the name of a third-party handler.

A name may have an argument after a colon; commas separate several names. Third-party handlers are published under an
entry point group, as a callable that takes the argument (a string, possibly empty) and returns the handler.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    Factory = Callable[[str], Any]


class UnknownHandler(ValueError):
    """There is no such handler, or it cannot be created. The message gives the next step."""


def parse_names(text: str) -> list[tuple[str, str]]:
    """Parse ``"console,jsonl:x"`` into ``[("console", ""), ("jsonl", "x")]``. Empty parts are skipped."""
    parts = (part.strip().partition(":") for part in text.split(","))
    return [(name, argument) for name, _, argument in parts if name]


def make_handlers(text: str, kind: str, own: Mapping[str, Factory], group: str, method: str) -> list[Any]:
    """Create the handlers of this list. Raises ``UnknownHandler``, after closing those already created.

    ``kind`` is the name that messages use: 'event handler'. ``method`` is the method that each must have: 'record'.
    """
    handlers: list[Any] = []
    try:
        for name, argument in parse_names(text):
            factory = _factory(name, kind, own, group)
            try:
                handler = factory(argument)
            except UnknownHandler:
                raise
            except Exception as error:
                raise UnknownHandler(f"could not create the {kind} {name!r} ({_format_error(error)})") from error
            _check_method(handler, name, kind, method)
            handlers.append(handler)
    except BaseException as error:
        close_errors = close_all(handlers)
        if close_errors and isinstance(error, UnknownHandler):
            raise UnknownHandler(
                f"{error}; a handler created before it could not be closed ({_format_error(close_errors[0])})"
            ) from error
        raise
    return handlers


def make_one(text: str, kind: str, own: Mapping[str, Any], group: str, method: str) -> Any:
    """Create the handler ``NAME[:ARGUMENT]`` or ``MODULE:CLASS[:ARGUMENT]``. Raises ``UnknownHandler``.

    Its factory gets the argument only if there is one. An object that has the method already is the handler.
    """
    name, _, argument = text.partition(":")
    known = own if name in own else {**own, **_offered(group)}
    expected = f"known: {', '.join(sorted(known))}, or MODULE:CLASS"
    if name in known:
        found: Any = _factory(name, kind, own, group)
    elif argument:
        attribute, _, argument = argument.partition(":")
        try:
            found = _imported(name, attribute)
        except Exception as error:
            raise UnknownHandler(f"could not load the {kind} {text!r} ({_format_error(error)}); {expected}") from error
    else:
        raise UnknownHandler(f"unknown {kind} {name!r}; {expected}")
    if isinstance(found, type) or not hasattr(found, method):
        try:
            found = found(argument) if argument else found()
        except Exception as error:
            raise UnknownHandler(f"could not create the {kind} {text!r} ({_format_error(error)})") from error
    elif argument:
        raise UnknownHandler(f"the {kind} {text!r} takes no argument; leave out ':{argument}'")
    _check_method(found, text, kind, method)
    return found


def check_names(text: str, kind: str, own: Mapping[str, Factory], group: str) -> None:
    """Raise ``UnknownHandler`` if a name is unknown or its factory cannot be loaded. Creates no handlers."""
    for name, _ in parse_names(text):
        _factory(name, kind, own, group)


def close_all(handlers: Iterable[Any]) -> list[Exception]:
    """Close every handler that has a ``close`` method. Return the exceptions, which the caller reports."""
    errors = []
    for handler in handlers:
        try:
            getattr(handler, "close", lambda: None)()
        except Exception as error:
            errors.append(error)
    return errors


def _check_method(handler: object, name: str, kind: str, method: str) -> None:
    if isinstance(handler, type):
        found = f"the class {handler.__name__}"
    elif callable(getattr(handler, method, None)):
        return
    else:
        found = "None" if handler is None else f"of type {type(handler).__name__!r}"
    raise UnknownHandler(f"the {kind} {name!r} is {found}; its factory must return an object with a method {method!r}")


def _offered(group: str) -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=group)}


def _imported(module: str, attribute: str) -> Any:
    import importlib
    import os
    import sys

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for a console script the path has only its own folder
    return getattr(importlib.import_module(module), attribute)


def _factory(name: str, kind: str, own: Mapping[str, Factory], group: str) -> Factory:
    if name in own:
        return own[name]
    offered = _offered(group)
    if name not in offered:
        known = ", ".join(sorted({*own, *offered}))
        raise UnknownHandler(
            f"unknown {kind} {name!r}; known: {known}; your own needs an entry point in the group {group!r}"
        )
    try:
        factory: Factory = offered[name].load()
    except Exception as error:
        raise UnknownHandler(
            f"could not load the {kind} {name!r} from {offered[name].value!r} ({_format_error(error)})"
        ) from error
    return factory


def _format_error(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
