"""Processes: start, watch and end workers."""
