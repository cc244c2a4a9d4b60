"""tenax: an elastic, fault-tolerant launcher and agent for distributed training.

This package imports nothing, to keep the start of a job fast. Import its modules by name: ``tenax.agent.server``,
``tenax.launcher``, ``tenax.multiprocessing``, ``tenax.rendezvous``, ``tenax.run``, ...
"""

__version__ = "0.1.0"
