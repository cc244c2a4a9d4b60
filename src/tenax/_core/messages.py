"""Messages from a node to the coordinator. The coordinator sends events (``events.FromCoordinator``).

Messages are typed and tagged, and contain no time of day: ``sent_at`` is the sender's clock at the moment of sending,
and the receiver uses only differences to it. A message about a generation carries its number.
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
WorkerCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_SLOTS)]
Frames = Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_FRAMES)]
# One more than a node announces: the coordinator adds the source address of the connection.
HostAddresses = Annotated[tuple[HostAddress, ...], msgspec.Meta(max_length=MAX_HOST_ADDRESSES + 1)]


class NodeInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The identity of a node. Constant while its agent runs."""

    node_id: NodeId  # random and new at every start, because hosts and process ids repeat
    host: Name  # for display
    slots: Slots = 1  # number of workers
    role: Name = "default"
    rank: NodeRank = -1  # the requested group rank; -1: any
    name: Name = ""  # survives the agent: a new node with this name replaces the old one at once
    order: Name = ""  # sort key for ranks: switch, rack, SLURM_PROCID
    min_nodes: NodeLimit = 1
    max_nodes: NodeLimit = 1
    grace_s: Seconds = 0.0  # how long its workers may take to stop

    @property
    def where(self) -> str:
        """Where its workers run, as every view shows it: the host, and the node's name if it has one."""
        return f"{self.host} ({self.name})" if self.name not in ("", self.host) else self.host


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="message", omit_defaults=True):
    """Base of all messages of a node."""


class GenerationMessage(Message, frozen=True):
    """Base of messages about a generation."""

    generation: Generation


class NodeJoined(Message, frozen=True):
    """The first message on every connection: the node's identity and current state."""

    node: NodeInfo
    generation: Generation = 0  # the last one that this node was a member of
    is_running: bool = False  # its workers are alive on this node
    has_succeeded: bool = False  # all its workers succeeded on this node
    group_rank: NodeRank = -1
    group_world_size: NodeCount = 0
    coordinator_rank: NodeRank = -1
    restarts_used: Number = 0
    store: Address = ""  # of that generation
    is_uncharged: bool = False  # uncharged: it ended because a node joined or left, so its failures cost no restart


class NodeReady(Message, frozen=True):
    """The node is clear, or holds workers, and can join the next generation."""

    generation: Generation  # the last one that this node was a member of
    # Where this node hosts the workers' store if it becomes rank 0; filled in by the edge.
    store_addr: Address = ""
    store_port: Port = 0
    is_agent_store: bool = False
    addresses: HostAddresses = ()  # of this host: possible source addresses of its workers' connections to a store
    held: WorkerCount = 0  # number of workers that it holds


class WorkersRunning(GenerationMessage, frozen=True):
    """All workers of this generation have been started on the node."""

    pids: Annotated[tuple[Pid, ...], msgspec.Meta(max_length=MAX_SLOTS)]  # by local rank
    survivors: WorkerCount = 0  # how many of them took part in the generation before


class WorkerProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """The steps that one worker reported (``tenax.progress``), and its activity. Times are on its host's clock."""

    local_rank: LocalRank
    first_step: Step
    last_step: Step
    first_at: Time
    last_at: Time
    phase: Text = ""  # the phase it reported, if not training: "checkpoint"
    output_at: Time = 0.0  # when it last wrote to stdout or stderr; 0: never, or not known
    step_s: Seconds = 0.0  # the duration of its last steps; 0: not known
    cpus: Annotated[float, msgspec.Meta(ge=0, le=1e5)] | None = None  # how many it used lately; None: not known
    gpu: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None  # how busy its GPU was lately; None: not known
    imported_at: Time = 0.0  # when its script last began to import a module at its top level; 0: not known


class NodeProgress(GenerationMessage, frozen=True):
    """Progress of the node's workers in this generation."""

    sent_at: Time
    workers: Annotated[tuple[WorkerProgress, ...], msgspec.Meta(max_length=MAX_SLOTS)]


class FailureSeen(GenerationMessage, frozen=True):
    """A worker failed. Sent at once; the evidence follows in ``NodeStopped``."""

    failure: Failure
    sent_at: Time


class NodeStopped(GenerationMessage, frozen=True):
    """All workers of this generation have exited, not all of them successfully, or are held; the node is clear."""

    sent_at: Time
    failures: Failures = ()
    stopped: StoppedWorkers = ()
    was_cut_off: bool = False  # the lease expired: failures on other nodes may be a consequence
    held: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=MAX_SLOTS)] = ()  # global ranks of the held workers


class NodeSucceeded(GenerationMessage, frozen=True):
    """All workers of this generation succeeded on the node, and the node is clear."""


class StackLocation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Workers at the same location in their program, or workers without known stacks for the same reason."""

    ranks: tuple[Rank, ...]  # global, ascending
    frames: Frames = ()  # of the main thread, innermost first: "train.py:12 in load"
    beside: Frames = ()  # the innermost frames of the other threads, without duplicates
    stacks: LongText = ""  # of the first of these workers, as it wrote them
    why: Text = ""  # why there are no frames
    # Of the first of these workers.
    local_rank: LocalRank = -1
    pid: Pid = 0
    host: Label = ""


class NodeQuiet(GenerationMessage, frozen=True):
    """No worker of the node has shown activity since ``since``."""

    sent_at: Time
    since: Time
    why: Text  # which activity is missing, for display


class NodeBusy(GenerationMessage, frozen=True):
    """Workers of the node show activity again."""

    why: Text = ""  # the activity


class StacksTaken(GenerationMessage, frozen=True):
    """Where the node's workers are, in reply to ``events.StacksRequested``."""

    number: Number  # of the coordinator's suspicion
    locations: tuple[StackLocation, ...] = ()


class HangReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the workers of a generation without activity are. Composed by the coordinator."""

    generation: Generation
    nodes: NodeCount  # nodes that run workers; all of them are quiet
    workers: WorldSize
    quiet_s: SumSeconds
    why: LongText  # which activity is missing
    locations: tuple[StackLocation, ...] = ()  # locations, the one with the fewest workers first
    is_odd: bool = False  # the first location stands out
    what_follows: LongText = ""  # for display


class NodeDraining(GenerationMessage, frozen=True):
    """The node is leaving: its workers are being stopped within the grace period."""

    grace_s: Seconds
    why: Text


class NodeWillLeave(GenerationMessage, frozen=True):
    """The node will be drained soon. Its workers keep running for now."""

    why: Text
    in_s: Seconds | None = None


class NodeLeft(Message, frozen=True):
    """The node leaves the run."""

    why: Text
    is_clear: bool = True  # False: a process may be alive, and this host needs attention
    was_refused: bool = False  # it was refused, or could not join: it counts as lost


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
