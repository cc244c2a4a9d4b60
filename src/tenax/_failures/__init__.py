"""Failures: what a worker leaves behind when it ends badly, and the one report that is made of it.

This package reads and explains; it decides nothing. Importing it costs nothing: every noun is a module of its own, and
most of them are imported only after something failed.
"""
