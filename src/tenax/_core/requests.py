"""Requests of operators to a run, typed and tagged for the wire.

The coordinator answers them, and forwards to a node what only that node can answer (``OfNode``).
"""

from __future__ import annotations

import msgspec

from tenax._core.bounds import LocalRank, Name, NumberOrAll, Reason, Seconds, Text, Time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    R = TypeVar("R")
    Reply = Callable[[Any, str], None]


class Request(msgspec.Struct, frozen=True, tag=True, tag_field="request", omit_defaults=True):
    """Base of all requests."""


class AgentRequest(Request, frozen=True):
    """Identify the agent. The agent that receives this answers it, connected to a coordinator or not."""


class StatusRequest(Request, frozen=True):
    """Return the status of the run."""

    mark: Text = ""  # of the last answer: wait until the status differs from it
    wait_s: Seconds = 0.0  # the maximum wait
    with_activity: bool = False  # first let the nodes report what their workers do


class StopRequest(Request, frozen=True):
    """End the run on every node."""

    why: Reason


class RestartRequest(Request, frozen=True):
    """Restart all workers. Uncharged."""

    why: Reason


class DrainRequest(Request, frozen=True):
    """Drain one node."""

    node: Name  # its name, host, rank or id
    why: Reason


class NodeRequest(Request, frozen=True):
    """Resolve a name to the id of a node."""

    node: Name  # its name, host, rank or id


class LogsRequest(Request, frozen=True):
    """Return output of one node's workers, as a ``LogAnswer``.

    Without a cursor, return the last lines. With a cursor, return the lines after it, oldest first.
    """

    node: Name
    local_rank: LocalRank = -1  # -1: all workers of the node
    generation: NumberOrAll = 0  # 0: the last one and, with a cursor, all later ones; -1: all known ones
    stream: Name = ""  # "stdout", "stderr"; empty: both
    cursor: Text = ""  # where the last answer ended; "start": the beginning of the logs; empty: their end
    last: NumberOrAll = 100  # number of lines without a cursor; -1: all
    wait_s: Seconds = 0.0  # the maximum wait for new lines after the cursor
    ranks: Text = ""  # "0,3-5": only these global ranks; empty: all
    containing: Text = ""  # only lines that contain this text
    since: Time = 0.0  # seconds since the epoch: only lines from then on
    unfinished: bool = False  # include a last line without a line break; it is sent again once complete


class StacksRequest(Request, frozen=True):
    """Return the stacks of one node's workers, as a list of ``WorkerStacks``."""

    node: Name
    local_rank: LocalRank = -1  # -1: all workers of the node
    native: bool = False  # with native frames, if the node has py-spy


class ActivityRequest(Request, frozen=True):
    """Report to the coordinator what one node's workers do, now and for a while. Answered when it was sent."""

    node: Name


class WorkerStacks(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker and the stacks of its threads."""

    rank: int
    pid: int
    host: str = ""
    stacks: str = ""
    why: str = ""  # why there are none
    note: str = ""  # what is missing in them


OfNode = LogsRequest | StacksRequest | ActivityRequest
AnyRequest = AgentRequest | StatusRequest | StopRequest | RestartRequest | DrainRequest | NodeRequest | OfNode


def answer_safely(answer: Callable[[R, Reply], None], request: R, reply: Reply) -> None:
    """Answer a request, and turn an exception into an error reply.

    A request must not end the run: not by a bug, and not by files of another tenax version installed meanwhile.
    """
    has_replied = False

    def reply_once(value: Any, error: str) -> None:
        nonlocal has_replied
        reply(value, error)
        has_replied = True

    try:
        answer(request, reply_once)
    except Exception as error:
        if has_replied:
            raise  # the request was accepted, so the error is in the run itself
        reply(None, f"could not answer the request: {type(error).__name__}: {error}")
