"""The marker: what a coordinator leaves at the endpoint for its successor.

It is written before the decisions in it are sent. It survives the process that wrote it but not a power loss; an engine
that keeps it on a disk does better than this model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tenax._core.model import Verdict


class Marker(msgspec.Struct):
    generation: int = 0
    restarts_used: int = 0
    store: str = ""
    verdict: Verdict | None = None  # the run is over
