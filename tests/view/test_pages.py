"""The pages: one file each, which loads nothing, escapes untrusted text, and contains its data as text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import tenax._observe.dashboard
from tenax._view.chrome_trace import trace_in_text
from tenax._view.history import RunHistory
from tenax._view.html import page as html
from tenax._view.html import plots
from tenax._view.html.report_page import report_page
from tenax._view.html.timeline_page import lanes_of, timeline_page
from tenax._view.summary import format_summary, summary_of
from tenax.cli.journal_commands import read_histories
from view.recorded_run import WALL, RecordedAgent, RecordedRun, replaced
from view.test_history import agent_of_two_generations, run_of_two_nodes

_EMPTY = {"meta", "br", "input", "line", "rect"}
_HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \ud800 \u202e"


class Reader(HTMLParser):
    """The elements and the text of a page. Checks that every opened element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == [], self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _EMPTY or tag == "rect":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] not in (["script"], ["style"]):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def the_run(folder: Path) -> RunHistory:
    run_of_two_nodes(folder / "c").close()
    agent_of_two_generations(folder / "a", "node0", 0).close(60.0)
    (history,) = read_histories([str(folder)]).histories
    return history


def hostile_run(folder: Path) -> RunHistory:
    run = RecordedRun(folder, run_id=_HOSTILE, max_restarts=0)
    run.all_join()
    run.all_run(1.0)
    run.fail(0, 3.0, f"RuntimeError: {_HOSTILE}")
    run.close()
    (history,) = read_histories([str(folder)]).histories
    return history


def pages_of(history: RunHistory) -> list[str]:
    return [timeline_page(history), report_page(summary_of([history]), [history], [_HOSTILE])]


@pytest.mark.parametrize("page_index", [0, 1], ids=["timeline", "report"])
def test_a_page_loads_nothing(tmp_path: Path, page_index: int) -> None:
    """No address, file or font; its content security policy forbids them."""
    page = pages_of(the_run(tmp_path))[page_index]
    read = Reader(page)
    for tag, attributes in read.elements:
        assert not {"src", "href", "srcset", "action"}.intersection(attributes), (tag, attributes)
        assert tag not in ("link", "iframe", "object", "embed", "base")
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page
    assert "url(" not in page
    policy = [each["content"] for tag, each in read.elements if tag == "meta" and each.get("http-equiv")]
    assert (policy[0] or "").startswith("default-src 'none'")


@pytest.mark.parametrize("page_index", [0, 1], ids=["timeline", "report"])
def test_untrusted_text_is_escaped(tmp_path: Path, page_index: int) -> None:
    """Names of runs and hosts and error messages open and close no element."""
    page = pages_of(hostile_run(tmp_path))[page_index]
    page.encode()
    tags = [tag for tag, _ in Reader(page).elements]
    assert "img" not in tags
    assert tags.count("script") == (2 if page_index == 0 else 0)
    assert "alert(1)</script>" not in page


@pytest.mark.parametrize("page_index", [0, 1], ids=["timeline", "report"])
def test_a_page_is_accessible(tmp_path: Path, page_index: int) -> None:
    """A language, one h1, labelled pictures, table headers with a scope, light and dark."""
    page = pages_of(the_run(tmp_path))[page_index]
    elements = Reader(page).elements
    assert ("html", {"lang": "en"}) in elements
    assert [tag for tag, _ in elements].count("h1") == 1
    for tag, attributes in elements:
        if tag == "svg":
            assert attributes.get("role") == "img"
            assert attributes.get("aria-label")
        if tag == "th":
            assert attributes.get("scope") in ("col", "row")
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page


def test_the_timeline_page_also_contains_the_data_as_text(tmp_path: Path) -> None:
    text = Reader(timeline_page(the_run(tmp_path))).text
    for expected in (
        "Run job",
        "succeeded",
        "83 % of 59 s was training; starting 12 %, stopping 5 %; failures detected in < 1 ms and recovered in 4 s",
        "rank 2 on node1 failed",
        "node1 was lost: connection closed",
        "raised RuntimeError: boom",
        "Traceback <b>",
        "lost after 29 s: connection closed",
    ):
        assert expected in text, expected


def test_the_lanes_are_the_run_then_each_node_with_its_workers(tmp_path: Path) -> None:
    """Times are seconds since the start of the run."""
    history = the_run(tmp_path)
    lanes, is_cut = lanes_of(history)
    assert not is_cut
    assert [lane["n"] for lane in lanes] == ["run", "node0", "worker 0", "worker 1", "node1"]
    assert lanes[0]["f"] == [[9.0, "rank 2 on node1 raised RuntimeError: boom"]]
    assert lanes[-1]["f"] == [[29.0, "lost: connection closed"]]
    match = re.search(r'id="lanes-data">(.*?)</script>', timeline_page(history))
    assert match is not None
    assert json.loads(match.group(1)) == {"span": 59.0, "lanes": json.loads(json.dumps(lanes))}


def test_the_page_of_a_thousand_nodes_stays_small(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, count=1000, slots=8)
    run.all_join()
    run.all_run(1.0)
    run.succeed(2.0)
    run.close()
    (history,) = read_histories([str(tmp_path)]).histories
    page = timeline_page(history)
    print(f"a page of 1,000 nodes has {len(page):,} characters")
    assert len(page) < 2_000_000
    assert "and 500 more" in page


def test_a_report_counts_outcomes_causes_hosts_and_recoveries_of_all_runs(tmp_path: Path) -> None:
    """Files that could not be read are named on the page."""
    run_of_two_nodes(tmp_path / "1").close()
    run = RecordedRun(tmp_path / "2", "other", max_restarts=1, wall=WALL + 500)
    run.all_join()
    for number in range(2):
        run.all_run(100.0 * number + 2)
        run.fail(0, 100.0 * number + 90, "ValueError: nan")
    run.close()
    histories = read_histories([str(tmp_path)]).histories
    summary = summary_of(histories)
    assert [(each.run_id, each.outcome) for each in summary.runs] == [("job", "succeeded"), ("other", "failed")]
    assert {each.name: each.count for each in summary.ends} == {
        "ValueError": 2,
        "RuntimeError": 1,
        "a node was lost": 1,
    }
    assert {each.name: each.count for each in summary.hosts} == {"node0": 2, "node1": 2}
    assert summary.recoveries_s == (3.0, 5.0, 12.0)
    printed = format_summary(summary)
    assert "other: failed (the only restart is used)" in printed
    assert "  first cause: rank 0 on node0 raised ValueError: nan" in printed
    assert "2 runs: 1 failed, 1 succeeded; " in printed
    text = Reader(report_page(summary, histories, ["'x' is left out"])).text
    for expected in (
        "2 runs",
        "'x' is left out",
        "first cause: rank 0 on node0",
        "Hosts that fail often",
        "a node was lost",
    ):
        assert expected in text, expected


def test_a_victim_is_not_shown_as_the_cause(tmp_path: Path) -> None:
    """If every failed worker lost a peer, the cause is unknown."""
    run = RecordedRun(tmp_path, max_restarts=0)
    run.all_join()
    run.all_run(1.0)
    run.fail(0, 50.0, "ConnectionResetError: [Errno 104] Connection reset by peer", is_consequence=True)
    run.close()
    (history,) = read_histories([str(tmp_path)]).histories
    summary = summary_of([history])
    expected = "cause not known; first victim: rank 0 on node0 raised ConnectionResetError: [Errno 104]"
    for text in (format_summary(summary), Reader(report_page(summary, [history])).text):
        assert expected in text
        assert "first cause" not in text
    assert not summary.runs[0].is_cause_known


def test_a_run_shows_its_script_start_time_and_log_folder(tmp_path: Path) -> None:
    history = the_run(tmp_path)
    summary = summary_of([history])
    expected = f"train.py, began 2023-11-14 22:13:21 UTC, in {tmp_path / 'c'}"
    for text in (format_summary(summary), Reader(report_page(summary, [history])).text):
        assert expected in text
    assert f"train.py, in {tmp_path / 'c'}" in Reader(timeline_page(history)).text


def test_a_reported_hang_is_in_the_report_and_the_timeline(tmp_path: Path) -> None:
    """Although it counts as training, and nothing failed."""
    run = RecordedRun(tmp_path, count=2, on_hang="report")
    run.all_join(1.0)
    run.all_run(3.0)
    run.hang(10.0, 20.0)
    run.resume(1, 57.0)
    run.succeed(60.0)
    run.close()
    (history,) = read_histories([str(tmp_path)]).histories
    expected = "no activity for 47 s in generation 1 (no rank stands out; ranks 0, 1 on node0: at train.py:40 in step)"
    for page in pages_of(history):
        assert expected in Reader(page).text
    lanes, _ = lanes_of(history)
    assert lanes[1] == {"n": "no activity", "s": [["hung", 9.0, 56.0, expected]]}


def test_a_worker_without_a_recorded_end_is_marked(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.all_join(1.0)
    run.all_run(3.0)
    run.succeed(60.0)
    run.close()
    agent = RecordedAgent(tmp_path)
    agent.start(1, 1.0)
    (history,) = read_histories([str(tmp_path)]).histories
    lanes, _ = lanes_of(history)
    assert lanes[2]["s"] == [["idle", 0.1, 59.0, "rank 0, end not known, generation 1, pid 100"]]
    agent.close(60.0)


@pytest.mark.parametrize(("wall", "at"), [(1e18, 0.0), (-1e18, 0.0), (1e308, -1e308), (0.0, 1e300)])
def test_times_out_of_range_do_not_prevent_pages_and_traces(tmp_path: Path, wall: float, at: float) -> None:
    """A damaged journal may contain any number."""
    run = RecordedRun(tmp_path)
    run.all_join()
    run.all_run(1.0)
    run.succeed(2.0)
    run.close()
    header, *lines = run.path.read_text().splitlines()
    lines[-2] = replaced(lines[-2], at=abs(at) or 2.0)
    run.path.write_text("\n".join([replaced(header, wall_time=wall, at=at), *lines]) + "\n")
    (history,) = read_histories([str(tmp_path)]).histories
    summary = summary_of([history])
    for page in pages_of(history):
        assert "job" in Reader(page).text
    assert "began ?" in format_summary(summary) or at > 0
    trace_in_text(history)


def test_the_colours_are_those_of_the_dashboard() -> None:
    """In light and dark mode."""
    live = (Path(tenax._observe.dashboard.__file__).parent / "page.css").read_text()
    fills = re.findall(r"--fill-(\w+): (#\w+);", live)
    assert len(fills) == 2 * len(plots.KINDS)
    ours = re.findall(r"--(waiting|starting|training|stopping|lost|hung): (#\w+);", html.page("", ""))
    assert sorted(ours) == sorted(fills)


def test_a_report_without_failures_has_no_plots_of_failures(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.all_join()
    run.all_run(1.0)
    run.succeed(50.0)
    run.close()
    (history,) = read_histories([str(tmp_path)]).histories
    text = Reader(report_page(summary_of([history]), [history])).text
    assert "Hosts that fail often" not in text
    assert "98 % of 50 s was training; starting 2 %" in text


@pytest.mark.parametrize("seconds", [[0.0], [0.02, 0.02, 7], [1e9], [0.001, 1e9]])
def test_histograms_count_every_value(seconds: list[float]) -> None:
    """From 0 s to years."""
    drawn = plots.histogram(seconds, "stopping", "label")
    counted = [int(each) for each in re.findall(r'<text x="[^"]+" text-anchor="middle" y="\d+">(\d+)</text>', drawn)]
    assert sum(counted) == len(seconds)
