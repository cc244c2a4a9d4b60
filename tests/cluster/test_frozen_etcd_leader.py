"""An elected leader is frozen (SIGSTOP) until it is deposed, then continues: never two generations at once.

The pauses follow from the lease, so that they are short here. ``TENAX_FREEZE_S=30`` adds one of 30 s, with the default
lease, ``TENAX_FREEZES`` times:

    TENAX_FREEZE_S=30 TENAX_FREEZES=5 pytest tests/cluster/test_frozen_etcd_leader.py
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from kit.etcd import needs_etcd
from lanes.plan import Fault, Plan
from lanes.play import TIMEOUT_S, Play
from tenax._core.authority import AuthorityTerms
from tenax._core.lease import LeaseTerms

pytestmark = needs_etcd

BEAT_S, BEATS = 0.5, 4
TERMS = AuthorityTerms(LeaseTerms(BEAT_S, BEAT_S * BEATS))
SHORT = {"keep_alive_interval": BEAT_S, "keep_alive_max_attempt": BEATS}
# Until the successor waits for the frozen member, or until it has formed the next generation without it.
WHILE_AWAITED_S = TERMS.ttl_s + TERMS.return_s / 2
AFTERWARDS_S = TERMS.ttl_s + TERMS.return_s + TERMS.lease.lease_s
LONG_S = float(os.environ.get("TENAX_FREEZE_S", "0"))
LONG: list[tuple[float, dict[str, Any]]] = [(LONG_S, {})] * int(os.environ.get("TENAX_FREEZES", "1"))


class FrozenLeader(Play):
    """All members are at work when the plan begins."""

    def _execute_plan(self) -> None:
        assert self._hub.wait_for(lambda: self._is_complete(self.plan.agents), TIMEOUT_S), self.history_text
        self._since = time.monotonic()
        super()._execute_plan()


@pytest.mark.parametrize(
    ("pause_s", "conf"),
    [
        pytest.param(WHILE_AWAITED_S, SHORT, id="while-awaited"),
        pytest.param(AFTERWARDS_S, SHORT, id="afterwards"),
        *(LONG if LONG_S else []),
    ],
)
def test_a_frozen_leader_never_leads_to_two_generations_at_once(
    tmp_path: Path, pause_s: float, conf: dict[str, Any]
) -> None:
    """Another node leads; the frozen node's workers are dead before the next generation starts; it rejoins, and the run
    succeeds with all nodes. Workers report every 25 ms, so two generations at once would be detected."""
    plan = Plan(0, agents=3, faults=(Fault(0.0, "stop", "leader", pause_s),), max_restarts=0, ignores_sigterm=False)
    played = FrozenLeader(plan, tmp_path, conf=conf)
    assert not played.run(), f"{played.broken}\n{played.history_text}"
    assert played.counts["stop leader"] == 1, played.history_text
    assert played.counts["leaders"] >= 2, f"it was not deposed\n{played.history_text}"
    assert played.counts["generations"] >= 2, played.history_text
