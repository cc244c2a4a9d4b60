"""The views of a run that failed, and what each of them shows of the diagnosis.

They are made from the journals of the coordinator and of the agents, as ``tenax`` makes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import unescape
from typing import Any, NamedTuple

from tenax._core.agent import AgentMachine
from tenax._core.commands import StartWorkers
from tenax._core.coordinator import CoordinatorMachine
from tenax._core.policy import RecordedPolicy
from tenax._core.run_state import CoordinatorState
from tenax._failures.report import Report, render, to_dict
from tenax._node.journal import Header, RunHeader, RunStep, Step
from tenax._observe import metrics_page
from tenax._observe.tracing.run_trace import generation_parts
from tenax._view.chrome_trace import trace_of
from tenax._view.html.timeline_page import timeline_page
from tenax._view.journal_parts import history_of_run
from tenax._view.status import FailureStatus, RunStatus, status_of
from tenax._view.summary import format_summary, summary_of
from tenax.cli import status_screen
from tenax.events._view import EventView
from tenax.metrics._view import MetricView


class Seen(NamedTuple):
    """What one view shows of the diagnosis. None: the view does not show it."""

    rank: int | None = None
    host: str | None = None
    cause: str | None = None
    failed: int | None = None
    consequences: int | None = None


class Views(NamedTuple):
    status: RunStatus
    values: dict[str, Seen]
    texts: dict[str, str]


def views_of(header: RunHeader, steps: list[RunStep], state: CoordinatorState, wall_offset: float) -> Views:
    """Return every view of the whole run."""
    at = steps[-1].at
    status = status_of(state, [], "", at, wall_offset)
    history = history_of_run(header, steps, None).history
    last = tuple(each for each in history.failures if each.generation == state.generation)
    values = {
        "status": _in_failures(status.failures),
        "history": _in_failures(last),
        "metrics": _in_metrics(metrics_page.render(status)),
        "trace": _in_trace(status),
        "chrome trace": _in_chrome_trace(trace_of(history), state.generation),
    }
    texts = {
        "status screen": status_screen.render(status, 100),
        "timeline": unescape(re.sub(r"<[^>]*>", " ", timeline_page(history))),
        "report of runs": format_summary(summary_of([history])),
    }
    if state.verdict is not None:
        report = Report(verdict=state.verdict, entrypoint="train.py", host="host0")
        values["json"] = _in_json(to_dict(report))
        texts["report"] = render(report)
    return Views(status, values, texts)


def replayed(header: RunHeader, steps: list[RunStep]) -> CoordinatorState:
    machine = CoordinatorMachine(header.settings, RecordedPolicy(step.decision for step in steps))
    for step in steps:
        machine.step(step.event, step.at)
    return machine.state


def views_of_agents(journals: Iterable[tuple[Header, list[Step]]]) -> dict[str, Seen]:
    """Return what the events of each agent, and the metrics of all agents, show of the last generation."""
    values: dict[str, Seen] = {}
    failed = 0
    for number, (header, steps) in enumerate(journals):
        machine = AgentMachine(header.settings)
        events = EventView(header.settings, "train.py", header.host, "tcp", header.wall_time - header.at)
        metrics = MetricView(header.settings, header.wall_time - header.at)
        emitted, counted = [], 0
        for step in steps:
            commands = machine.step(step.event, step.at)
            emitted += events.take(step.at, step.event, commands, machine.state)
            found = metrics.take(step.at, step.event, commands, machine.state)
            if any(isinstance(command, StartWorkers) for command in commands):
                counted = 0  # of an earlier generation
            else:
                counted += sum(each.name.startswith("worker_failures.") for each in found)
        failed += counted
        values[f"events of agent {number}"] = _in_event(json.loads(emitted[-1].metadata["metadata"]))
    return values | {"metrics of agents": Seen(failed=failed)}


def first_of(failures: tuple[FailureStatus, ...]) -> FailureStatus | None:
    return next((each for each in failures if each.role == "first"), None)


def _in_failures(failures: tuple[FailureStatus, ...]) -> Seen:
    first = first_of(failures)
    followed = sum(each.role == "consequence" for each in failures)
    who = (first.rank, first.host, first.cause) if first is not None else (None, None, None)
    return Seen(*who, len(failures) - followed, followed)


def _in_json(data: dict[str, Any]) -> Seen:
    first = data["first_cause"]
    followed = len(data["victims"])
    total = len(data["other_failures"]) + (first is not None)
    who = (first["rank"], first["host"]) if first is not None else (None, None)
    return Seen(*who, data["cause"], total - followed, followed)


def _in_metrics(text: str) -> Seen:
    failed = sum(map(int, re.findall(r"^tenax_run_failed_workers\{.*\} (\d+)", text, re.MULTILINE)))
    consequences = re.search(r"^tenax_run_consequences\{?.*\}? (\d+)", text, re.MULTILINE)
    return Seen(failed=failed, consequences=int(consequences[1]) if consequences is not None else None)


def _in_trace(status: RunStatus) -> Seen:
    parts = generation_parts(status.generations[-1], list(status.failures))
    moments = [dict(each.attributes) for each in parts[0].moments]
    first = next((each for each in moments if each["tenax.role"] == "first"), {})
    followed = sum(each["tenax.role"] == "consequence" for each in moments)
    return Seen(first.get("tenax.rank"), first.get("tenax.host"), None, len(moments) - followed, followed)


def _in_chrome_trace(trace: dict[str, Any], generation: int) -> Seen:
    found = [each["args"] | {"name": each["name"]} for each in trace["traceEvents"] if each.get("cat") == "failure"]
    found = [each for each in found if each["generation"] == generation]
    first = next((each for each in found if each["role"] == "first"), None)
    followed = sum(each["role"] == "consequence" for each in found)
    rank = int(first["name"].split()[1]) if first is not None else None
    return Seen(rank, first and first["host"], None, len(found) - followed, followed)


def _in_event(details: dict[str, Any]) -> Seen:
    first = details.get("first_cause") or {}
    who = first.get("rank"), first.get("host"), first.get("cause")
    return Seen(*who, details.get("failed"), details.get("consequences"))
