"""Hangs: looks at workers while they run, and says when nothing moves. What that means is decided in ``core``."""
