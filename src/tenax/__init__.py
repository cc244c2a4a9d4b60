"""tenax: an elastic, fault-tolerant launcher and agent for distributed training.

Importing this package costs almost nothing on purpose: the public modules are topics
(``tenax.agent.server``, ``tenax.launcher``, ``tenax.multiprocessing``, ``tenax.rendezvous``, ``tenax.run``),
imported when they are used.
"""

__version__ = "0.1.0"
