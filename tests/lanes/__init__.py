"""Lanes: long runs with random faults or input. A short part of each is in the test run."""
