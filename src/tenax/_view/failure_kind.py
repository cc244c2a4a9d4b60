"""The kind of a failure: few words that many failures share, to be counted by. Pure."""

from __future__ import annotations

from tenax._view.exit_summary import how_it_ended

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._view.status import FailureStatus

_LONGEST = 60
_GENERAL = frozenset({"exception", "signal", "exit_code", "unknown"})  # the class or the number says more


def kind_of(failure: FailureStatus) -> str:
    """What was found to be the cause; else the class of the exception; else how the process ended."""
    if failure.cause and failure.cause not in _GENERAL:
        return failure.cause
    how = ended_by(failure.exit_code)
    said = failure.what.removeprefix(how).removeprefix(": ")
    name = said.partition(":")[0]
    # A class, as a traceback names it: one word that begins with a capital letter behind its last dot.
    if name and len(name) <= _LONGEST and name.replace(".", "").isidentifier() and _is_class(name):
        return name
    return failure.cause or how


def ended_by(exit_code: int) -> str:
    return how_it_ended(exit_code)


def _is_class(name: str) -> bool:
    return name.rpartition(".")[2][:1].isupper()
