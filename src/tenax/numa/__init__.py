"""NUMA: the options of a binding (``tenax.numa.binding``) and the topology of the host (``_topology``).

``tenax._processes.placement`` assigns CPUs to workers.
"""
