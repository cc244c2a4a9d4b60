"""The setup of a simulation: a value that, with its seed, determines the whole history.

It defines the nodes, the behaviour of the network, the workers and the engine, and which faults happen when.
``draw.py`` derives one from a seed, ``shrink.py`` makes smaller ones.
"""

from __future__ import annotations

import msgspec

from tenax._core.authority import AuthorityTerms
from tenax._core.lease import LeaseTerms


class NodePlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """The plan of one node. If its agent dies, another one is started."""

    host: int
    start_at: float = 0.0
    slots: int = 1
    name: str = ""
    rank: int = -1
    order: str = ""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fault. The meaning of ``a`` and ``b`` depends on the kind (``faults.py``)."""

    at: float
    kind: str
    a: int = 0
    b: int = 0
    seconds: float = 0.0


class Delays(msgspec.Struct, frozen=True):
    """How long segments take to arrive."""

    min_s: float = 0.0002
    jitter_s: float = 0.002
    slow_share: float = 0.02  # of the segments ...
    slow_s: float = 0.1  # ... are late by up to this: queues, retransmissions


class WorkerBehaviour(msgspec.Struct, frozen=True):
    """How workers behave. Shares are probabilities."""

    start_s: float = 0.05  # maximum time to start one
    generation_s: float = 60.0  # approximate duration of a generation without faults
    fails: float = 0.1  # share of workers that fail by themselves
    fails_within_s: float = 20.0
    collateral: float = 0.6  # share of workers that fail after a peer has failed
    collateral_s: float = 0.5
    ignores_term: float = 0.1
    ends_within_s: float = 0.3  # after a stop signal
    leaves_behind: float = 0.1  # share of workers that leave processes behind
    stuck: float = 0.0  # in the kernel: SIGKILL has no effect
    kill_s: float = 0.05  # until killed processes have exited; must be less than lease - fence
    # Survivors. Drawn apart from all others, so that runs without them repeat their histories.
    opts_in: float = 0.0  # share of processes that can be held
    opts_in_within_s: float = 0.1
    acknowledges_within_s: float = 0.05
    hold_timeout_s: float = 1.0
    deaf: float = 0.0  # share of ends that are never acknowledged
    dies_held: float = 0.0  # share of held workers that exit before the next generation
    closes_channel: float = 0.0  # share of processes that close their channel at some time
    clears_within_s: float = 0.002  # until leftovers have ended while workers are held


class Engine(msgspec.Struct, frozen=True):
    """The behaviour of the engine and the keeper. Each default is required: tests show what breaks without it."""

    # The keeper holds the node's connection too, and it is closed when the node is clear: FIN means that the agent and
    # all its workers are dead.
    keeper_holds_socket: bool = True
    # The keeper ends the workers when the lease expires, also while the agent is suspended.
    keeper_enforces_lease: bool = True
    # Every "ready" message offers a store that was never offered before ...
    offers_fresh_store: bool = True
    # ... and all offers are kept until a generation is received, because it may use an earlier one.
    keeps_offers: bool = True
    # The marker at the endpoint contains the generation, the restarts used and the verdict before they are sent.
    marker_remembers: bool = True
    # A new agent joins, or replaces a dead coordinator, only when no process of the dead agent is alive.
    waits_until_predecessor_cleared: bool = True
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
    pause_s: float = 0.0  # pause of the restart policy before a restart
    join_timeout_s: float = 60.0
    last_call_s: float = 1.0
    scale_up: bool = True
    grace_s: float = 2.0
    abandon_s: float = 5.0
    terms: LeaseTerms = LeaseTerms()
    delays: Delays = Delays()
    behaviour: WorkerBehaviour = WorkerBehaviour()
    engine: Engine = Engine()
    has_etcd: bool = False  # etcd elects the coordinator; else it is at the endpoint
    outage_s: float = 20.0  # with etcd: how long a generation of one node continues without it
    record_s: int = 86_400  # with etcd: how long the record stays without a leader
    faults: tuple[Fault, ...] = ()
    # When faults stop, after which liveness is checked; 0: never.
    calm_at: float = 0.0
    disturbance: str = ""  # a single fault once the cluster has settled, with its own time limit (``liveness.py``)

    @property
    def authority(self) -> AuthorityTerms:
        return AuthorityTerms(self.terms, self.outage_s, self.record_s)

    @property
    def hosts(self) -> int:
        return 1 + max(node.host for node in self.nodes)


ENDPOINT = 0  # the host of the coordinator
