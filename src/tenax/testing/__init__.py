"""The public test kit: what tenax tests itself with, for those who build on it.

``tenax.testing.scenario`` plays conversations with the agent machine that are written as text;
``tenax.testing.processes`` has workers that exist only in a test, and ``tenax.testing.clock`` time that a test holds.
Nothing else in tenax imports this package.
"""
