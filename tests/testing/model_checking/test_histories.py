"""Trace validation: simulated histories of the real leadership machine are behaviours of the TLA+ model.

``./dev model --histories 1000`` checks a thousand.
"""

from __future__ import annotations

import pytest
from model.histories import History, explain, histories, history_of, rejected
from model.tlc import what_is_missing

from tenax.testing.simulator import draw
from testing.simulator.broken_leadership import MISTAKES, PLANNED
from testing.simulator.broken_parts import parts_with

pytestmark = pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing() or "TLC is installed")

SEEDS = (1, 3, 7, 11, 20)
