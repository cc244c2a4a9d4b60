"""The cluster simulator: whole runs of many nodes from one seed, in no time, with everything going wrong.

    python -m tenax.testing.simulator --seeds 1000
    python -m tenax.testing.simulator --seed 1234 --tell
    python -m tenax.testing.simulator --seed 1234 --shrink
    python -m tenax.testing.simulator --nodes 10000 --hours 24 --deaths-per-minute 1

The machines under test are the real ones (``core.agent``, ``core.coordinator``, ``core.lease``). Around them are
models: of the tcp engine's client (``agent``) and server (``server``), of the keeper and the workers
(``workers``), of hosts and the network between them (``network``). ``setup`` says what a simulation is told,
``draw`` makes that out of a seed, ``faults`` carries out what goes wrong. ``checks`` and ``liveness`` look from
the outside, with the numbers of the reliability plan. ``crowd`` is a lighter kind, for ten thousand nodes.

``Engine`` in ``setup`` lists the duties of a real engine, each of which is needed: the tests turn them off one by
one and name the property that breaks.
"""

from tenax.testing.simulator.broken import PropertyBroken
from tenax.testing.simulator.cluster import Cluster, Outcome, Parts, simulate
from tenax.testing.simulator.draw import draw
from tenax.testing.simulator.setup import Engine, Fault, NodePlan, Setup
from tenax.testing.simulator.shrink import shrink

__all__ = [
    "Cluster",
    "Engine",
    "Fault",
    "NodePlan",
    "Outcome",
    "Parts",
    "PropertyBroken",
    "Setup",
    "draw",
    "shrink",
    "simulate",
]
