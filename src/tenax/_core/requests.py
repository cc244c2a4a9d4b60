"""What an operator may want of a run. These travel, so they are typed and tagged.

The coordinator answers; what only a node knows (``OfNode``) it passes on to that node.
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
    """Base of all of them."""


class AgentRequest(Request, frozen=True):
    """Who are you? Answered by the agent that was asked, whether it has a coordinator or not."""


class StatusRequest(Request, frozen=True):
    """What is the run doing?"""

    mark: Text = ""  # of the last answer: this one may wait until something has changed
    wait_s: Seconds = 0.0  # for so long at most


class StopRequest(Request, frozen=True):
    """End the run on every node."""

    why: Reason


class RestartRequest(Request, frozen=True):
    """Start all workers again. Costs no restart of the budget."""

    why: Reason


class DrainRequest(Request, frozen=True):
    """Let one node leave."""

    node: Name  # its name, host, rank or id
    why: Reason


class NodeRequest(Request, frozen=True):
    """Who is meant by this name? The answer is the node's id."""

    node: Name  # its name, host, rank or id


class LogsRequest(Request, frozen=True):
    """What workers of one node have printed. The answer is a ``view.log_lines.LogAnswer``.

    Without a cursor it is the end of what there is: the last lines. With one it is what follows, from the oldest on.
    """

    node: Name
    local_rank: LocalRank = -1  # -1: all of the node
    generation: NumberOrAll = 0  # 0: the last one and, with a cursor, all that follow; -1: all that are known
    stream: Name = ""  # "stdout", "stderr"; empty: both
    cursor: Text = ""  # where the last answer ended; "start": the beginning of what there is; empty: its end
    last: NumberOrAll = 100  # lines, if there is no cursor; -1: all
    wait_s: Seconds = 0.0  # how long the answer may wait until there is something new after the cursor
    ranks: Text = ""  # "0,3-5": only these, by their rank in the generation; empty: all
    containing: Text = ""  # only lines with this text in them
    since: Time = 0.0  # seconds since the epoch: nothing older
    unfinished: bool = False  # also a last line that has no end yet; it will come again when it has one


OfNode = LogsRequest
AnyRequest = AgentRequest | StatusRequest | StopRequest | RestartRequest | DrainRequest | NodeRequest | LogsRequest


def answer_safely(answer: Callable[[R, Reply], None], request: R, reply: Reply) -> None:
    """Let it be answered. Whatever is wrong with that (a bug of ours; files of another version, if tenax was replaced
    while the run goes on) is an answer too, and never the end of the run that was asked about."""
    has_replied = False

    def reply_once(value: Any, error: str) -> None:
        nonlocal has_replied
        reply(value, error)
        has_replied = True

    try:
        answer(request, reply_once)
    except Exception as error:
        if has_replied:
            raise  # it was understood, and begun: what broke is the run itself
        reply(None, f"this cannot be answered: {type(error).__name__}: {error}")
