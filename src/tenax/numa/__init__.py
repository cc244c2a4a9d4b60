"""NUMA: what a user may ask for (``tenax.numa.binding``) and what the kernel says the machine is (``topology``).

Which worker goes where is decided in ``tenax._processes.placement``.
"""
