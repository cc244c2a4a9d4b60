"""Views of a run: pure functions from the coordinator's state and its journal to what people look at.

Whatever shows a run (the terminal, the page, the metrics, a report) shows one of these, so no two can disagree.
"""
