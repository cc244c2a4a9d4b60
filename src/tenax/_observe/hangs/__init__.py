"""Hang detection: samples running workers and reports missing progress. ``_core`` decides what is a hang."""
