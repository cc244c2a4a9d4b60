"""What a node says to the coordinator. What the coordinator says are events (``events.FromCoordinator``).

These travel between hosts, so they are typed, tagged and hold no time of day: ``sent_at`` is the sender's own clock at
the moment of sending, and the receiver makes a difference out of it. A word about a generation carries its number.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from tenax._core.bounds import (
    MAX_FRAMES,
    MAX_SLOTS,
    Address,
    Generation,
    HostAddress,
    Label,
    LocalRank,
    LongText,
    Name,
    NodeCount,
    NodeId,
    NodeLimit,
    NodeRank,
    Number,
    Pid,
    Port,
    Rank,
    Seconds,
    Slots,
    Step,
    SumSeconds,
    Text,
    Time,
    WorldSize,
)
from tenax._core.model import Failure, Failures, StoppedWorkers

MAX_HOST_ADDRESSES = 16  # that a node announces
Frames = Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_FRAMES)]
# The coordinator adds the address that it sees.
HostAddresses = Annotated[tuple[HostAddress, ...], msgspec.Meta(max_length=MAX_HOST_ADDRESSES + 1)]


class NodeInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who a node is. Nothing in it changes while its agent lives."""

    node_id: NodeId  # random, new at every start: hosts and process ids repeat, this does not
    host: Name  # for people
    slots: Slots = 1  # workers
    role: Name = "default"
    rank: NodeRank = -1  # the group rank that was asked for; -1: any
    name: Name = ""  # a name that outlives the agent: a new node of that name takes the old one's place at once
    order: Name = ""  # where in the order of ranks this node belongs: switch, rack, SLURM_PROCID
    min_nodes: NodeLimit = 1
    max_nodes: NodeLimit = 1


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="message", omit_defaults=True):
    """Base of what a node says."""


class NodeJoined(Message, frozen=True):
    """The first word on every connection: who we are, and what we are doing already."""

    node: NodeInfo
    generation: Generation = 0  # the last one we were part of
    is_running: bool = False  # its workers are alive here
    has_succeeded: bool = False  # its workers all succeeded here
    group_rank: NodeRank = -1
    group_world_size: NodeCount = 0
    coordinator_rank: NodeRank = -1
    restarts_used: Number = 0
    store: Address = ""  # of that generation
    is_free: bool = False  # it was ended because a node came or went: what failed in it is not charged


class NodeReady(Message, frozen=True):
    """Nothing of any generation is alive here: we take a part in the next."""

    generation: Generation  # the last one we were part of
    # Where we would host the store of the workers, if we came to be rank 0; filled in by the edge.
    store_addr: Address = ""
    store_port: Port = 0
    is_agent_store: bool = False
    addresses: HostAddresses = ()  # of our host: where our workers' connections to a store may come from


class WorkersRunning(Message, frozen=True):
    """All our workers of this generation have been started."""

    generation: Generation
    pids: Annotated[tuple[Pid, ...], msgspec.Meta(max_length=MAX_SLOTS)]  # by local rank


class WorkerProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one worker has said of its steps (``tenax.progress``). Times are on its host's clock."""

    local_rank: LocalRank
    first_step: Step
    last_step: Step
    first_at: Time
    last_at: Time
    phase: Text = ""  # what it does besides training, if it says so: "checkpoint"


class NodeProgress(Message, frozen=True):
    """How far our workers of this generation have got."""

    generation: Generation
    sent_at: Time
    workers: Annotated[tuple[WorkerProgress, ...], msgspec.Meta(max_length=MAX_SLOTS)]


class FailureSeen(Message, frozen=True):
    """A worker failed. Sent at once; what can be found out about it follows with ``NodeStopped``."""

    generation: Generation
    failure: Failure
    sent_at: Time


class NodeStopped(Message, frozen=True):
    """All our workers of this generation have ended, not all of them well, and the node is clear."""

    generation: Generation
    sent_at: Time
    failures: Failures = ()
    stopped: StoppedWorkers = ()
    was_cut_off: bool = False  # the lease had run out: whatever failed elsewhere may have failed because of us


class NodeSucceeded(Message, frozen=True):
    """All our workers of this generation succeeded, and the node is clear."""

    generation: Generation


class StackPlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """Workers that are at the same place in their program; or of which that is not known, for the same reason."""

    ranks: tuple[Rank, ...]  # global, ascending
    frames: Frames = ()  # of the main thread, innermost first: "train.py:12 in load"
    beside: Frames = ()  # the innermost frames of its other threads, each once
    stacks: LongText = ""  # of the first of these workers, as it wrote them
    why: Text = ""  # there are none
    # Of the first of them.
    local_rank: LocalRank = -1
    pid: Pid = 0
    host: Label = ""


class NodeQuiet(Message, frozen=True):
    """Nothing has moved here since then: no worker of ours does anything that can be seen."""

    generation: Generation
    sent_at: Time
    since: Time
    why: Text  # what is not seen, for people


class NodeBusy(Message, frozen=True):
    """Our workers move again."""

    generation: Generation


class StacksTaken(Message, frozen=True):
    """Where our workers are, as wanted."""

    generation: Generation
    number: Number  # as the coordinator counts its suspicions
    places: tuple[StackPlace, ...] = ()


class HangReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A generation in which nothing moves, and where its workers are. Made by the coordinator."""

    generation: Generation
    nodes: NodeCount  # that are at work, and quiet
    workers: WorldSize
    quiet_s: SumSeconds
    why: LongText  # what is not seen
    places: tuple[StackPlace, ...] = ()  # the one that fewest workers are at first
    is_odd: bool = False  # that one stands out
    what_follows: LongText = ""  # for people


class NodeDraining(Message, frozen=True):
    """We were asked to leave. Our workers are being asked to end, and have so many seconds."""

    generation: Generation
    grace_s: Seconds
    why: Text


class NodeWillLeave(Message, frozen=True):
    """We shall be asked to leave. Our workers go on for now."""

    generation: Generation
    why: Text
    in_s: Seconds | None = None


class NodeLeft(Message, frozen=True):
    """We go."""

    why: Text
    is_clear: bool = True  # False: a process of ours survived SIGKILL, and this host needs attention


FromNode = (
    NodeJoined
    | NodeReady
    | WorkersRunning
    | NodeProgress
    | FailureSeen
    | NodeStopped
    | NodeSucceeded
    | NodeQuiet
    | NodeBusy
    | StacksTaken
    | NodeDraining
    | NodeWillLeave
    | NodeLeft
)
