"""A folder that workers written in Python get in front of their PYTHONPATH, for the ``sitecustomize`` in it."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = os.path.dirname(os.path.abspath(__file__))
MARK = "TENAX_RECORD_UNCAUGHT"


def hooked(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a Python worker whose uncaught exception is to be recorded without its author's help."""
    before = env.get("PYTHONPATH")
    # The mark remembers what PYTHONPATH was: the hook puts it back before the user's first line runs.
    mark = "unset" if before is None else f"={before}"
    return {**env, "PYTHONPATH": FOLDER + (os.pathsep + before if before else ""), MARK: mark}
