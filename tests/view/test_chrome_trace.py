"""Traces follow the Trace Event Format, so that viewers open them, and contain what happened."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from tenax._view.chrome_trace import phases_of, trace_in_text
from tenax._view.history import RunHistory
from tenax.cli.journal_commands import read_histories
from view.recorded_run import RecordedAgent, RecordedRun
from view.test_history import agent_of_two_generations, run_of_two_nodes

_PHASES = {"X", "M", "i"}
_METADATA = {"process_name", "thread_name", "process_sort_index", "thread_sort_index"}


def the_run(folder: Path) -> RunHistory:
    run_of_two_nodes(folder / "c").close()
    agent_of_two_generations(folder / "a0", "node0", 0).close(60.0)
    agent_of_two_generations(folder / "a1", "node1", 1).close(60.0)
    (history,) = read_histories([str(folder)]).histories
    return history


def check_format(trace: dict[str, Any]) -> None:
    """Check the rules of the document "Trace Event Format" that apply here."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    spans: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in _PHASES, event
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) for key in ("pid", "tid", "ts")), event
        assert event["ts"] >= 0
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        else:
            assert event["name"] in _METADATA
            assert set(event["args"]) in ({"name"}, {"sort_index"})
    for thread, found in spans.items():  # complete events of one thread must be nested, or apart
        open_until: list[int] = []
        for since, until in sorted(found, key=lambda each: (each[0], -each[1])):
            while open_until and open_until[-1] <= since:
                open_until.pop()
            assert not open_until or until <= open_until[-1], thread
            open_until.append(until)


def test_a_trace_follows_the_trace_event_format(tmp_path: Path) -> None:
    """Every event has the fields of its kind, and spans of one thread are nested."""
    check_format(json.loads(trace_in_text(the_run(tmp_path))))


def test_a_trace_contains_nodes_workers_generations_and_failures(tmp_path: Path) -> None:
    """Nodes are processes, workers are threads, failures and losses are instants."""
    trace = json.loads(trace_in_text(the_run(tmp_path)))
    events = trace["traceEvents"]
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {1: "run job", 2: "node0", 3: "node1"}
    assert {named[2, tid] for tid in range(3)} == {"node", "worker 0", "worker 1"}
    spans = [event for event in events if event["ph"] == "X"]
    generations = [event for event in spans if event["cat"] == "generation"]
    assert [(each["name"], each["ts"], each["dur"]) for each in generations] == [
        ("generation 1", 0, 10_000_000),
        ("generation 2", 10_000_000, 21_000_000),
        ("generation 3", 31_000_000, 28_000_000),
    ]
    assert generations[0]["args"]["ended_why"] == "rank 2 on node1 failed"
    instants = {event["name"]: event for event in events if event["ph"] == "i"}
    assert set(instants) == {"rank 2 failed", "node1 lost"}
    assert (instants["rank 2 failed"]["ts"], instants["rank 2 failed"]["pid"]) == (9_000_000, 3)
    workers = [event for event in spans if event["pid"] == 3 and event["tid"] == 1]
    assert [(each["name"], each["args"]["exit_code"]) for each in workers] == [("rank 2 failed", 1), ("rank 2", 0)]


def test_a_trace_marks_hangs_and_workers_without_a_recorded_end(tmp_path: Path) -> None:
    """A hang that was only reported is a span of the run."""
    run = RecordedRun(tmp_path, count=2, on_hang="report")
    run.all_join(1.0)
    run.all_run(3.0)
    run.hang(10.0, 20.0)
    run.resume(1, 57.0)
    run.succeed(60.0)
    run.close()
    agent = RecordedAgent(tmp_path)
    agent.start(1, 1.0)
    (history,) = read_histories([str(tmp_path)]).histories
    trace = json.loads(trace_in_text(history))
    check_format(trace)
    (hang,) = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == "hang"]
    assert (hang["name"], hang["ts"], hang["dur"]) == ("no activity", 9_000_000, 47_000_000)
    assert hang["args"] == {"generation": 1, "who": "no rank stands out; ranks 0, 1 on node0: at train.py:40 in step"}
    (worker,) = [event for event in trace["traceEvents"] if event["name"] == "rank 0, end not known"]
    assert (worker["ts"], worker["dur"]) == (100_000, 58_900_000)
    agent.close(60.0)


def test_the_phases_of_a_run_sum_up_to_its_goodput(tmp_path: Path) -> None:
    """They follow each other from the start to the end."""
    history = the_run(tmp_path)
    phases = phases_of(history)
    assert (phases[0][0], phases[-1][1]) == (history.began_at, history.ended_at)
    assert all(before[1] == after[0] for before, after in pairwise(phases))
    sums: dict[str, float] = defaultdict(float)
    for since, until, kind, _ in phases:
        sums[f"{kind}_s"] += until - since
    assert history.goodput is not None
    for name, seconds in sums.items():
        assert abs(seconds - getattr(history.goodput.spent, name)) < 1e-6
