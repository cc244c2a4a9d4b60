"""Restart policies: what to do after a failure, given its history.

from tenax.policy import GiveUp, History, Restart, RestartPolicy

class GiveUpOnBadData(RestartPolicy):
    def decide(self, failure, history):
        ...
"""

from tenax._core.model import Failure
from tenax._core.policy import BudgetPolicy, GiveUp, History, Restart, RestartPolicy, Wait

__all__ = ["BudgetPolicy", "Failure", "GiveUp", "History", "Restart", "RestartPolicy", "Wait"]
