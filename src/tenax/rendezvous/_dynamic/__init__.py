"""The parts of the dynamic rendezvous. Its public names are in ``tenax.rendezvous.dynamic_rendezvous``.

Pure: ``state`` is the document that nodes share, ``watch`` what one node has observed of the others, ``decisions`` what
a node does next. ``holder`` reads and writes the document, and sends heartbeats.
"""
