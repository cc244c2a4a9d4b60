"""Logs: where a worker's lines go, and the process that takes them there.

What a person configures is in ``std`` and ``specs``; what a line looks like on the console is in ``prefix`` and
``lines``; the process that moves the bytes is ``scribe_main`` and the agent's hold on it is ``scribe``.
Nothing is imported here: the scribe process must start in a blink.
"""
