"""The parts of the dynamic rendezvous. Its public names are in ``tenax.rendezvous.dynamic_rendezvous``.

Pure: ``state`` is the document that nodes share, ``decisions`` what a node concludes from it and does next. ``holder``
reads and writes the document, and sends heartbeats.
"""
