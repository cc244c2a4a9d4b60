"""Restart policies: decide what follows a failure, a loss, a drain or a join, given the history of the run.

from tenax.policy import BudgetPolicy, GiveUp

class GiveUpOnBadData(BudgetPolicy):
    def decide(self, failure, history):
        if failure.evidence.error_type == "BadRecord":
            return GiveUp("the data must be repaired first")
        return super().decide(failure, history)
"""

from tenax._core.model import Failure
from tenax._core.policy import BudgetPolicy, Change, Continue, GiveUp, History, Keep, Restart, RestartPolicy, Wait

__all__ = [
    "BudgetPolicy",
    "Change",
    "Continue",
    "Failure",
    "GiveUp",
    "History",
    "Keep",
    "Restart",
    "RestartPolicy",
    "Wait",
    "load_policy",
]


def load_policy(name: str) -> RestartPolicy:
    """Create the restart policy of this name, as ``--restart-policy`` does: ``NAME[:ARGUMENT]`` or ``MODULE:CLASS``.

    ``budget`` is the default policy; packages offer others in the entry point group ``tenax.restart_policies``. A class
    or function is called with the argument, or with none. Raises ``ValueError`` for an unknown name.
    """
    from tenax._io.handler_names import make_one

    own = {"budget": BudgetPolicy()}
    policy: RestartPolicy = make_one(name, "restart policy", own, "tenax.restart_policies", "decide")
    return policy
