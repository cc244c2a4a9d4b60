"""The folder at the front of a Python worker's PYTHONPATH, for the ``sitecustomize`` in it."""

from __future__ import annotations

import os
from collections.abc import Mapping

FOLDER = os.path.dirname(os.path.abspath(__file__))
MARK = "TENAX_RECORD_UNCAUGHT"


def hooked(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a Python worker whose uncaught exception the hook records."""
    before = env.get("PYTHONPATH")
    # The mark holds the original PYTHONPATH: the hook restores it before the user's first line runs.
    mark = "unset" if before is None else f"={before}"
    return {**env, "PYTHONPATH": FOLDER + (os.pathsep + before if before else ""), MARK: mark}
