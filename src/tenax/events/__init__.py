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
    from tenax.events.api import Event as Event
    from tenax.events.api import EventMetadataValue as EventMetadataValue
    from tenax.events.api import EventSource as EventSource
    from tenax.events.api import NodeState as NodeState
    from tenax.events.api import RdzvEvent as RdzvEvent
    from tenax.events.handlers import ConsoleEventHandler as ConsoleEventHandler
    from tenax.events.handlers import JsonLinesEventHandler as JsonLinesEventHandler
    from tenax.events.handlers import NullEventHandler as NullEventHandler
    from tenax.events.handlers import get_logging_handler as get_logging_handler
    from tenax.events.handlers import make_handlers as make_handlers
    from tenax.events.handlers import register_handler as register_handler
    from tenax.events.handlers._logging import LoggingEventHandler as LoggingEventHandler

_HOMES = {
    "ConsoleEventHandler": "handlers",
    "Event": "api",
    "EventHandler": "_configured",
    "EventMetadataValue": "api",
    "EventSource": "api",
    "JsonLinesEventHandler": "handlers",
    "LoggingEventHandler": "handlers._logging",
    "NodeState": "api",
    "NullEventHandler": "handlers",
    "RdzvEvent": "api",
    "configure": "_configured",
    "configured_handlers": "_configured",
    "construct_and_record_rdzv_event": "_recording",
    "get_logging_handler": "handlers",
    "make_handlers": "handlers",
    "record": "_recording",
    "record_rdzv_event": "_recording",
    "register_handler": "handlers",
    "unconfigure": "_configured",
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
