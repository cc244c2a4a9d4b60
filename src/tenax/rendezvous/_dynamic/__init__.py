"""The parts of the dynamic rendezvous: the shared ``state``, pure ``decisions`` from it, the ``holder`` that reads and
writes it. The public names are in ``tenax.rendezvous.dynamic_rendezvous``.
"""
