"""The public test kit: tenax's own test tools, for projects that build on it.

``rendezvous_contract`` and ``store_contract`` are tests for any rendezvous handler or store. ``scenario`` and
``run_scenario`` run text scenarios against the agent and the coordinator machine. ``processes`` provides fake workers,
``clock`` a fake clock, and ``simulator`` whole clusters with faults. Nothing else in tenax imports this package.
"""
