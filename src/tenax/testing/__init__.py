"""The public test kit: what tenax tests itself with, for those who build on it.

``tenax.testing.scenario`` plays conversations with the agent machine that are written as text.
Nothing else in tenax imports this package.
"""
