"""The setup of a simulation: everything that is decided before it begins.

A setup is a value. It says who is there, how the network, the workers and the engine behave, and which faults
happen when; together with its seed it determines the whole history. ``draw.py`` makes one out of a seed,
``shrink.py`` makes smaller ones.
"""

from __future__ import annotations

import msgspec

from tenax._core.lease import LeaseTerms


class NodePlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """One node for an agent. If the agent dies, another one is started there."""

    host: int
    start_at: float = 0.0
    slots: int = 1
    name: str = ""
    rank: int = -1
    order: str = ""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something bad that happens. What ``a`` and ``b`` mean depends on the kind (``faults.py``)."""

    at: float
    kind: str
    a: int = 0
    b: int = 0
    seconds: float = 0.0


class Delays(msgspec.Struct, frozen=True):
    """How long segments are under way."""

    least_s: float = 0.0002
    jitter_s: float = 0.002
    slow_share: float = 0.02  # of the segments ...
    slow_s: float = 0.1  # ... are late by up to this: queues, retransmissions


class Habits(msgspec.Struct, frozen=True):
    """How workers behave. Shares are probabilities."""

    start_s: float = 0.05  # to start one takes up to this
    generation_s: float = 60.0  # a generation that nobody disturbs succeeds after about this
    fails: float = 0.1  # share of workers that fail by themselves
    fails_within_s: float = 20.0
    collateral: float = 0.6  # share of workers that die when a peer has died
    collateral_s: float = 0.5
    ignores_term: float = 0.1
    ends_within_s: float = 0.3  # after being asked to
    leaves_behind: float = 0.1  # processes that need clearing
    stuck: float = 0.0  # in the kernel: SIGKILL does not end it
    kill_s: float = 0.05  # until killed processes are gone; must be less than lease - fence


class Engine(msgspec.Struct, frozen=True):
    """What the tcp engine and the keeper do. Each default is a duty; a test that turns one off shows what breaks."""

    # The node's connection is held by its keeper too, and is closed when the node is clear: FIN means that the agent
    # is dead and so is every worker.
    keeper_holds_socket: bool = True
    # A connection that was reset says nothing about the node at its end: only silence does.
    reset_means_death: bool = False
    # A coordinator that was paused hears everything that has arrived before it judges anybody's silence, and takes its
    # own absence for nobody's.
    reads_before_judging: bool = True
    # An agent that was paused looks at its lease before it listens, and accepts no generation under a lease that has
    # run out.
    judges_before_reading: bool = True
    # The keeper ends the workers when the lease runs out, also while the agent stands still.
    keeper_enforces_lease: bool = True
    # Every "ready" offers a store that was never offered before ...
    offers_fresh_store: bool = True
    # ... and all offers are kept until a generation is heard of: its members may have been told of an earlier one.
    keeps_offers: bool = True
    # Before anything is sent, the marker at the endpoint holds the generation, the restarts used, and the verdict.
    marker_remembers: bool = True
    # A new agent joins, and an agent serves in the node of a dead one, only when nothing that the dead one started is
    # alive.
    waits_for_earlier_self: bool = True
    # Beats carry the sender's clock. A word is dated by the smallest difference of the two clocks that was seen lately,
    # so that it does not matter how long it was under way, or waited to be read.
    dates_messages: bool = True
    # How long an agent looks for a coordinator before it gives up.
    give_up_s: float = 120.0


class Setup(msgspec.Struct, frozen=True):
    """One simulation."""

    seed: int
    nodes: tuple[NodePlan, ...]
    seconds: float = 60.0
    min_nodes: int = 1
    max_nodes: int = 4
    max_restarts: int = 3
    pause_s: float = 0.0  # the restart policy waits so long before a restart
    join_timeout_s: float = 60.0
    last_call_s: float = 1.0
    scale_up: bool = True
    grace_s: float = 2.0
    abandon_s: float = 5.0
    terms: LeaseTerms = LeaseTerms()
    delays: Delays = Delays()
    habits: Habits = Habits()
    engine: Engine = Engine()
    faults: tuple[Fault, ...] = ()
    # 0: faults all the time. Else they stop then, and what must happen after that is checked as well ...
    calm_at: float = 0.0
    disturbance: str = ""  # ... and after this single one, once the cluster has settled (``liveness.py``)

    @property
    def hosts(self) -> int:
        return 1 + max(node.host for node in self.nodes)


ENDPOINT = 0  # the host where the coordinator is served
