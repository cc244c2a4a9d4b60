"""Restart policies: decide what follows a failure, given the history of the run.

from tenax.policy import BudgetPolicy, GiveUp

class GiveUpOnBadData(BudgetPolicy):
    def decide(self, failure, history):
        if failure.evidence.error_type == "BadRecord":
            return GiveUp("the data must be repaired first")
        return super().decide(failure, history)
"""

from tenax._core.model import Failure
from tenax._core.policy import BudgetPolicy, GiveUp, History, Restart, RestartPolicy, Wait

__all__ = ["BudgetPolicy", "Failure", "GiveUp", "History", "Restart", "RestartPolicy", "Wait"]
