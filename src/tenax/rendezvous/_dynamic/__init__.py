"""The parts of the dynamic rendezvous. Its public names are in ``tenax.rendezvous.dynamic_rendezvous``.

``state`` is the document that nodes share, ``watch`` what one node saw of the others, ``decisions`` what a node does
about it: these three are pure. ``holder`` reads and writes the document, ``heart`` shows that a node lives.
"""
