"""The texts of a kind of cause, as every view gets them."""

from __future__ import annotations

from tenax._core.model import Evidence, Failure
from tenax._view.cause import Cause, cause_of


def known_cause(kind: str, proof: str = "") -> Cause:
    """Return the cause of a failure that was classified on its own host."""
    return cause_of(Failure(1, 0, 0, 5, 1, 1.0, evidence=Evidence(cause=kind, proof=proof)))
