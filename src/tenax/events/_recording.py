"""Records events: sends one event to all its handlers.

Synchronous: all handlers have received the event when these functions return, even if one raises. The exception reaches
the caller.
"""

from __future__ import annotations

import os
import sys

from tenax.events._configured import configured_handlers
from tenax.events.handlers import handlers_of, receives_rendezvous_events

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from collections.abc import Sequence

    from tenax.events._configured import EventHandler
    from tenax.events.api import Event, NodeState, RdzvEvent

_RENDEZVOUS = "dynamic_rendezvous"


def record(event: Event, destination: str = "null") -> None:
    """Send the event to the handlers of this name (or list of names), and to every configured one.

    Raises ``ValueError`` if there is no handler of that name.
    """
    _send(event, [*handlers_of(destination), *configured_handlers()])


def record_rdzv_event(event: RdzvEvent) -> None:
    """Send the event to ``dynamic_rendezvous``, TorchElastic's name for these, and to every configured handler."""
    _send(event, [*handlers_of(_RENDEZVOUS), *configured_handlers()])


def _get_or_create_logger(destination: str = "null") -> logging.Logger:
    """Return TorchElastic's logger of a destination: it has that destination's handler and does not propagate.

    Not used in tenax; launchers based on TorchElastic's write serialized events to it.
    """
    import logging

    from tenax.events.handlers import get_logging_handler

    logger = logging.getLogger(f"torchelastic-events-{destination}")
    handler = get_logging_handler(destination)
    if handler not in logger.handlers:
        logger.setLevel(os.environ.get("LOGLEVEL", "INFO"))
        logger.propagate = False
        logger.addHandler(handler)
    return logger


def has_rendezvous_receiver() -> bool:
    """Return True if a handler receives rendezvous events. Otherwise they need not be created."""
    return bool(configured_handlers()) or receives_rendezvous_events()


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Create and record a rendezvous event, if a handler receives such events.

    ``name``: the action; default: the calling function. It is prefixed with the caller's file. ``hostname``, ``pid``:
    of the node; default: this one's. With the state FAILED, the event contains the current exception's traceback.
    """
    if not has_rendezvous_receiver():
        return
    from tenax.events.api import NodeState, RdzvEvent

    caller = sys._getframe(1).f_code
    record_rdzv_event(
        RdzvEvent(
            name=f"{os.path.basename(caller.co_filename)}:{name or caller.co_name}",
            run_id=run_id,
            message=message,
            hostname=hostname or os.uname().nodename,
            pid=pid or os.getpid(),
            node_state=node_state,
            master_endpoint=master_endpoint,
            rank=rank,
            local_id=local_id,
            error_trace=present_traceback() if node_state is NodeState.FAILED else "",
        )
    )


def present_traceback() -> str:
    """Return the traceback of the exception being handled; empty if there is none."""
    if sys.exc_info()[1] is None:
        return ""
    import traceback

    return traceback.format_exc()


def _send(event: Event | RdzvEvent, receivers: Sequence[EventHandler]) -> None:
    for position, receiver in enumerate(receivers):
        try:
            receiver.record(event)
        except BaseException:
            # Send it to the others first. Their exceptions are chained to this one.
            _send(event, receivers[position + 1 :])
            raise
