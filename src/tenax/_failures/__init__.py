"""Failures: the evidence that a failed worker leaves behind, its cause, and the report.

Reads and explains; decides nothing. Importing this package is free: every module is imported only when needed, most of
them only after a failure.
"""
