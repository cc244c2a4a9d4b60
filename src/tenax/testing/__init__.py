"""The public test kit: what tenax tests itself with, for those who build on it.

``rendezvous_contract`` and ``store_contract`` are tests that run against anybody's rendezvous handler or store.
``scenario`` and ``run_scenario`` play conversations with the agent machine and with the coordinator that are written as
text; ``processes`` has workers that exist only in a test, ``clock`` time that a test holds, and ``simulator`` whole
clusters with faults. Nothing else in tenax imports this package.
"""
