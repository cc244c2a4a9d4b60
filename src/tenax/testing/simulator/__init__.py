"""The cluster simulator: runs of many nodes with faults, in simulated time, from one seed.

    python -m tenax.testing.simulator --seeds 1000
    python -m tenax.testing.simulator --seed 1234 --history
    python -m tenax.testing.simulator --seed 1234 --shrink
    python -m tenax.testing.simulator --nodes 10000 --hours 24 --deaths-per-minute 1

The machines under test are the real ones (``_core/agent``, ``_core/coordinator``, ``_core/link``). Around them are
shells like the tcp engine's (``agent``, ``server``), and models of the keeper and the workers (``workers``) and of the
network (``network``). ``setup`` defines a simulation, ``draw`` derives it from a seed, ``faults``
injects its faults. ``checks`` and ``liveness`` check the properties of the reliability plan. ``crowd`` is a simpler
simulation with ten thousand nodes.

``Engine`` in ``setup`` lists what a real engine must do; the tests turn each item off and name the property that
breaks.
"""

from tenax.testing.simulator.checks import PropertyBroken
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
