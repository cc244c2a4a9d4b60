"""Every view of a failure shows the same first cause, rank, host, next step and counts."""

from __future__ import annotations

import re
from html import unescape

import pytest

from tenax._core.model import Verdict
from tenax._failures.report import Report, render, to_dict
from tenax._observe import metrics_page
from tenax._observe.tracing.run_trace import generation_parts
from tenax._view.cause import next_step_of
from tenax._view.chrome_trace import trace_of
from tenax._view.coordinator_history import history_of_run
from tenax._view.html.timeline_page import timeline_page
from tenax._view.status import FailureStatus, RunStatus, status_of
from tenax._view.summary import format_summary, summary_of
from tenax.cli import status_screen

from .corpus import CORPUS
from .frameworks import PRELOAD
from .played import SLOTS, WALL, Case, cases, play

CASES = cases()


class Seen:
    """What one view shows. None: the view does not show it."""

    def __init__(self, rank: int | None, cause: str | None, failed: int | None, consequences: int | None) -> None:
        self.rank, self.cause, self.failed, self.consequences = rank, cause, failed, consequences


def squeezed(text: str) -> str:
    return " ".join(text.split())


def first_of(failures: tuple[FailureStatus, ...]) -> FailureStatus | None:
    return next((each for each in failures if each.role == "first"), None)


def seen_in_status(failures: tuple[FailureStatus, ...]) -> Seen:
    first = first_of(failures)
    followed = sum(each.role == "consequence" for each in failures)
    rank, cause = (first.rank, first.cause) if first is not None else (None, None)
    return Seen(rank, cause, len(failures) - followed, followed)


def seen_in_json(data: dict) -> Seen:
    first = data["first_cause"]
    followed = len(data["victims"])
    total = len(data["other_failures"]) + (first is not None)
    return Seen(first and first["rank"], data["cause"], total - followed, followed)


def seen_in_metrics(text: str) -> Seen:
    failed = sum(map(int, re.findall(r"^tenax_run_failed_workers\{.*\} (\d+)", text, re.MULTILINE)))
    consequences = int(re.search(r"^tenax_run_consequences\{?.*\}? (\d+)", text, re.MULTILINE)[1])
    return Seen(None, None, failed, consequences)


def seen_in_trace(status: RunStatus) -> Seen:
    parts = generation_parts(status.generations[0], list(status.failures))
    moments = [dict(each.attributes) for each in parts[0].moments]
    first = next((each for each in moments if each["tenax.role"] == "first"), None)
    followed = sum(each["tenax.role"] == "consequence" for each in moments)
    return Seen(first and first["tenax.rank"], None, len(moments) - followed, followed)


def seen_in_chrome(trace: dict) -> Seen:
    found = [each["args"] | {"name": each["name"]} for each in trace["traceEvents"] if each.get("cat") == "failure"]
    first = next((each for each in found if each["role"] == "first"), None)
    followed = sum(each["role"] == "consequence" for each in found)
    rank = int(first["name"].split()[1]) if first is not None else None
    return Seen(rank, None, len(found) - followed, followed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_view_shows_the_expected_cause(case: Case) -> None:
    played = play(case)
    status = status_of(played.state, [], "", played.at, WALL)
    history = history_of_run(played.header, played.steps, None).history
    summary = summary_of([history])
    views = {
        "status": seen_in_status(status.failures),
        "history": seen_in_status(history.failures),
        "metrics": seen_in_metrics(metrics_page.render(status)),
        "trace": seen_in_trace(status),
        "chrome trace": seen_in_chrome(trace_of(history)),
    }
    texts = {
        "status screen": status_screen.render(status, 100),
        "timeline": unescape(re.sub(r"<[^>]*>", " ", timeline_page(history))),
        "report of runs": format_summary(summary),
    }
    verdict = played.state.verdict
    if verdict is not None:
        report = Report(verdict=verdict, entrypoint="train.py", host="host0")
        views["json"] = seen_in_json(to_dict(report))
        texts["report"] = render(report)
    assert (verdict is None) == bool(case.change)
    failed, consequences = case.counts
    for name, seen in views.items():
        assert (seen.failed, seen.consequences) == case.counts, name
        if name != "metrics" and case.is_known:
            assert seen.rank == case.rank, name
        if seen.cause is not None:
            assert seen.cause == case.kind, name
    first = first_of(status.failures)
    for name, text in texts.items():
        if first is not None:
            host = f"host{first.rank // SLOTS}"
            assert f"rank {first.rank} on {host} {squeezed(first.what)[:40]}" in squeezed(text), name
            assert squeezed(next_step_of(first.cause, first.proof)) in squeezed(text), name
        if consequences and name == "report of runs":
            assert f"{consequences} failed as a consequence" in text
    if case.change:
        how, number = case.change.split()
        for name in ("status screen", "timeline", "report of runs"):
            assert f"host{number}" in texts[name]
            assert how in texts[name], name
        assert [(each.name, each.state) for each in status.left] == [(f"host{number}", how)]
        assert first is None
    assert len(status.stopped) + failed + consequences + _done(case) == _reported(case)


def _done(case: Case) -> int:
    """Workers that exited with code 0 and are not the first cause."""
    done = sum(len(each.ranks) for each in case.left if each.how == "done")
    return 0 if case.kind == "exited_early" else done


def _reported(case: Case) -> int:
    return SLOTS if case.change.startswith("lost") else 2 * SLOTS - (SLOTS if case.change else 0)


def test_the_verdict_survives_json() -> None:
    import msgspec

    verdict = play(CASES[0]).state.verdict
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict


def test_the_played_corpus_is_large_and_its_names_are_unique() -> None:
    captured = [case for case in CASES if case.name.partition(":")[0] in PRELOAD]
    assert len({case.name for case in CASES}) == len(CASES)
    assert len(captured) >= 40
    assert len(CASES) + len(CORPUS) >= 150
