"""Views of a run: pure functions from the coordinator's state or journal to values and text for people.

The terminal, the dashboard, the metrics and the reports all show these views, so they cannot disagree.
"""
