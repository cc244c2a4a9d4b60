"""The core: state machines and the values they exchange.

Nothing in this package does I/O, reads a clock or the environment, starts a thread or logs. A machine takes an event
(``events``) and its time, and returns commands (``commands``), each with a reason that a person can read.
"""
