"""Prints the properties of public names of torch or tenax: ``python shapes.py MODULE...``.

As JSON: module -> name -> bases, defaults, members of an enumeration, fields, abstract methods, properties, and the
value of a constant.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import sys
from typing import Any


def shown(value: Any) -> str:
    """Return a default as text. For objects without a short repr, only that they exist."""
    if isinstance(value, enum.IntFlag):
        return str(int(value))
    if isinstance(value, (bool, int, float, str, tuple, type(None))):
        return repr(value)
    return "<object>"


def defaults(thing: Any) -> dict[str, str]:
    """Return the defaults of a callable."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {each.name: shown(each.default) for each in parameters if each.default is not each.empty}


def members(thing: type) -> dict[str, Any]:
    """Return the public members, and the private ones that TorchElastic documents as hooks."""
    return {name: getattr(thing, name) for name in dir(thing) if not name.startswith("_") or name in HOOKS}


HOOKS = {
    *("_start_workers", "_stop_workers", "_monitor_workers", "_shutdown", "_rendezvous", "_assign_worker_ranks"),
    *("_initialize_workers", "_restart_workers", "_exit_barrier", "_invoke_run", "_get_error_file_path"),
    "_write_error_file",
}


def shape(thing: Any) -> dict[str, Any]:
    """Return the properties of one name."""
    if not inspect.isclass(thing):
        return {"defaults": defaults(thing)} if callable(thing) else {"value": shown(thing)}
    found: dict[str, Any] = {
        "bases": [each.__name__ for each in thing.__mro__[1:] if each is not object],
        "defaults": defaults(thing),
        "abstract": sorted(getattr(thing, "__abstractmethods__", ())),
        "properties": sorted(
            name for name in members(thing) if isinstance(inspect.getattr_static(thing, name), property)
        ),
        "methods": {name: defaults(each) for name, each in members(thing).items() if inspect.isroutine(each)},
        "dataclass": [each.name for each in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else [],
        "frozen": dataclasses.is_dataclass(thing) and thing.__dataclass_params__.frozen,  # type: ignore[attr-defined]
    }
    if issubclass(thing, enum.Enum):
        return {"bases": found["bases"], "values": {each.name: each.value for each in thing}}
    return found


def main(modules: list[str]) -> None:
    """Print the properties of all names in these modules."""
    answer: dict[str, dict[str, Any]] = {}
    for name in modules:
        module = importlib.import_module(name)
        names = getattr(module, "__all__", None) or [
            each for each, value in vars(module).items() if getattr(value, "__module__", "") == name
        ]
        answer[name] = {each: shape(getattr(module, each)) for each in names if not each.startswith("_")}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
