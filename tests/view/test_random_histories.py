"""Histories, traces and pages of many random runs: the invariants of ``_view/history.py`` hold."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest

from core.random_run import RandomRun, Step
from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorMachine, Opened, RunSettings
from tenax._core.policy import AnyDecision
from tenax._node.journal import Footer
from tenax._view.chrome_trace import phases_of, trace_of
from tenax._view.history import RunPart, histories_of
from tenax._view.html.report_page import report_page
from tenax._view.html.timeline_page import timeline_page
from tenax._view.journal_parts import history_of_run
from tenax._view.summary import format_summary, summary_of
from view.test_chrome_trace import check_format

WALL = 1_700_000_000.0


class Header(msgspec.Struct, frozen=True):
    settings: RunSettings
    at: float
    host: str = "node0"
    wall_time: float = 0.0


class Line(msgspec.Struct, frozen=True):
    at: float
    event: AnyCoordinatorEvent
    decision: AnyDecision | None = None


def coordinators_of(random_run: RandomRun) -> list[list[Step]]:
    """Split the steps of the run by coordinator."""
    found: list[list[Step]] = []
    for step in random_run.steps:
        if isinstance(step[0], Opened):
            found.append([])
        found[-1].append(step)
    return found


def journal_of(random_run: RandomRun, steps: list[Step]) -> tuple[Header, list[Line], CoordinatorMachine]:
    """Return what the journal of this coordinator would contain, with the decisions of the policy."""
    machine = CoordinatorMachine(random_run.settings, random_run.policy)
    lines = []
    for event, at, sent in steps:
        step = machine.step(event, at)
        sends, decision = step.sends, step.decision
        assert sends == sent
        lines.append(Line(at, event, decision))
    return Header(random_run.settings, steps[0][1], wall_time=WALL + steps[0][1]), lines, machine


def check(part: RunPart, machine: CoordinatorMachine, at: float) -> None:
    history = part.history
    assert history.goodput == machine.state.ledger.goodput(at)
    for node in history.nodes:  # H3
        assert all(span.until > span.since for span in node.spans), node
        assert all(before.until <= after.since for before, after in pairwise(node.spans)), node
    assert all(before.until <= after.since for before, after in pairwise(history.hangs))
    numbers = [each.number for each in history.generations]
    assert numbers == sorted(numbers)
    if phases := phases_of(history):
        assert all(before[1] == after[0] for before, after in pairwise(phases))
        assert phases[-1][1] <= history.ended_at


@pytest.mark.parametrize("invalid_events", [False, True], ids=["valid", "invalid"])
def test_the_invariants_hold_in_random_runs(invalid_events: bool) -> None:
    """Sums equal those of the coordinator, spans do not overlap, traces are valid, and pages can be made."""
    seen = 0
    for seed in range(75):
        random_run = RandomRun(random.Random(seed), invalid_events=invalid_events)
        random_run.run()
        parts = []
        for steps in coordinators_of(random_run):
            header, lines, machine = journal_of(random_run, steps)
            part = history_of_run(header, lines, Footer(lines[-1].at))
            assert part.history.missing == (), f"seed {seed}"
            check(part, machine, lines[-1].at)
            # Half of a journal is valid, too.
            check_format(trace_of(history_of_run(header, lines[: len(lines) // 2], None).history))
            parts.append(part)
        histories = histories_of(parts, [])
        for history in histories:
            check_format(trace_of(history))
            for node in history.nodes:
                assert all(before.until <= after.since for before, after in pairwise(node.spans)), f"seed {seed}"
        if seed % 10 == 0:
            timeline_page(histories[0])
            summary = summary_of(histories)
            assert format_summary(summary)
            report_page(summary, histories)
        seen += len(parts)
    assert seen > 75, "no coordinator was ever replaced"
