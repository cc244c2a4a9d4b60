"""What somebody may have meant who wrote a name that there is not."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_LEAST_LETTERS = 3  # of what is taken for the beginning of a longer name
_LIKENESS = 0.75


def near_flag(flag: str, known: Iterable[str]) -> str:
    """The known flag that this one begins, or that is most like it; empty: there is none."""
    import difflib

    names = sorted(known)
    longer = [name for name in names if len(flag) > _LEAST_LETTERS and name.startswith(flag)]
    near = longer or difflib.get_close_matches(flag, names, n=1, cutoff=_LIKENESS)
    return near[0] if near else ""


def near_command(command: str, known: Iterable[str]) -> str:
    """The command that is most like this one; empty: there is none."""
    import difflib

    near = difflib.get_close_matches(command, list(known), n=1)
    return near[0] if near else ""
