"""Events of a run for programs, under TorchElastic's names, and handlers that receive them.

``configure(handler)`` adds a handler for every event; ``record(event, destination)`` records an event of your own.
Names are imported on first use, so that an agent without event handlers does not pay for them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tenax.events import api as api
    from tenax.events import handlers as handlers
    from tenax.events._configured import EventHandler as EventHandler
    from tenax.events._configured import configure as configure
    from tenax.events._configured import configured_handlers as configured_handlers
    from tenax.events._configured import unconfigure as unconfigure
    from tenax.events._recording import _get_or_create_logger as _get_or_create_logger
    from tenax.events._recording import construct_and_record_rdzv_event as construct_and_record_rdzv_event
    from tenax.events._recording import record as record
    from tenax.events._recording import record_rdzv_event as record_rdzv_event
    from tenax.events.api import *  # noqa: F403
    from tenax.events.handlers import ConsoleEventHandler as ConsoleEventHandler
    from tenax.events.handlers import JsonLinesEventHandler as JsonLinesEventHandler
    from tenax.events.handlers import NullEventHandler as NullEventHandler
    from tenax.events.handlers import get_logging_handler as get_logging_handler
    from tenax.events.handlers import make_handlers as make_handlers
    from tenax.events.handlers import register_handler as register_handler
    from tenax.events.handlers._logging import LoggingEventHandler as LoggingEventHandler

_FUNCTIONS = ("get_logging_handler", "make_handlers", "register_handler")  # of `handlers`
_HOMES = {
    name: module
    for module, names in {
        "_configured": ("EventHandler", "configure", "configured_handlers", "unconfigure"),
        "_recording": ("construct_and_record_rdzv_event", "record", "record_rdzv_event"),
        "api": ("Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"),
        "handlers": ("ConsoleEventHandler", "JsonLinesEventHandler", "NullEventHandler", *_FUNCTIONS),
        "handlers._logging": ("LoggingEventHandler",),
    }.items()
    for name in names
}
__all__ = [  # noqa: PLE0604 - the names of the table above
    *_HOMES
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name == "_get_or_create_logger":  # private in TorchElastic, and imported by launchers based on it
        return import_module(f"{__name__}._recording")._get_or_create_logger
    if name in ("api", "handlers"):  # TorchElastic's package imports them eagerly
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
