"""The core: decisions without deeds.

Nothing in this package does I/O, reads a clock or the environment, starts a thread or logs. It takes facts
(``events``) and the time they were seen, and returns orders (``commands``), each with its reason in words.
"""
