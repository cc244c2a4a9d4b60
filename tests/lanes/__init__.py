"""Lanes: long runs of drawn faults over real processes. A short stretch of each is in the test run."""
