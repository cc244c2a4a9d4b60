"""The metrics page of the whole run, parsed by Prometheus' own parser; and the Grafana dashboard for it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tenax._core.coordinator import Received
from tenax._core.ledger import Goodput, Mean, Spent
from tenax._core.messages import FailureSeen, NodeProgress, WorkerProgress
from tenax._core.model import Evidence, Failure
from tenax._observe.metrics_page import render
from tenax._view.status import FailureStatus, NodeStatus, RunStatus, status_of
from tenax.metrics._prometheus import CONTENT_TYPE
from view.recorded_run import RecordedRun

parser = pytest.importorskip("prometheus_client.parser")
ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "examples" / "grafana" / "tenax.json"


def status(**fields: object) -> RunStatus:
    plain: dict[str, object] = {
        "run_id": "job",
        "now": 100.0,
        "phase": "running",
        "doing": "generation 1 is running",
        "generation": 1,
        "world_size": 16,
        "min_nodes": 1,
        "max_nodes": 2,
        "restarts_used": 1,
        "max_restarts": 3,
        "membership_changes": 2,
        "drains": 0,
        "requests": 0,
        "nodes": (),
        "generations": (),
        "generations_forgotten": 0,
        "failures": (),
        "earlier": (),
        "events": (),
        "goodput": Goodput(Spent(1.0, 2.0, 6.0, 0.5, 0.5), Mean(2, 0.5), Mean(1, 3.0), 40),
    }
    return RunStatus(**{**plain, **fields})  # type: ignore[arg-type]


def samples(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return by name and labels, without the run id, which every line has."""
    found = {}
    for family in parser.text_string_to_metric_families(page):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run_id") == "job"
            key = (sample.name, tuple(sorted(labels.items())))
            assert key not in found, key
            found[key] = sample.value
    return found


def test_the_page_has_these_samples() -> None:
    """Names, labels and values, as Prometheus reads them."""
    found = samples(render(status()))

    def value(name: str, **labels: str) -> float:
        return found[name, tuple(sorted(labels.items()))]

    assert value("tenax_run_info", min_nodes="1", max_nodes="2", max_restarts="3") == 1
    assert value("tenax_run_phase", phase="running") == 1
    assert sum(each for (name, _), each in found.items() if name == "tenax_run_phase") == 1
    assert sum(each for (name, _), each in found.items() if name == "tenax_run_outcome") == 0
    assert (value("tenax_run_generation"), value("tenax_run_workers")) == (1, 16)
    assert (value("tenax_run_restarts_used"), value("tenax_run_restarts_left")) == (1, 2)
    assert value("tenax_run_membership_changes_total") == 2
    assert value("tenax_run_spent_seconds", on="training") == 6
    assert value("tenax_run_spent_seconds", on="lost") == 0.5
    assert value("tenax_run_training_ratio") == 0.6
    assert (value("tenax_run_detect_seconds_sum"), value("tenax_run_detect_seconds_count")) == (0.5, 2)
    assert (value("tenax_run_recover_seconds_sum"), value("tenax_run_recover_seconds_count")) == (3.0, 1)
    assert value("tenax_run_lost_steps_total") == 40
    assert value("tenax_run_hang_suspected") == 0
    assert ("tenax_run_last_step", ()) not in found  # none was reported


def test_a_run_that_has_just_begun_has_a_page() -> None:
    """Nothing is divided by zero."""
    found = samples(render(status(goodput=Goodput(), generation=0, world_size=0)))
    assert ("tenax_run_training_ratio", ()) not in found
    assert found["tenax_run_spent_seconds", (("on", "waiting"),)] == 0


def test_the_page_of_a_coordinator_machine(tmp_path: Path) -> None:
    """After it received nodes, steps and a failure."""
    run = RecordedRun(tmp_path, count=2)
    run.all_join()
    run.all_run(2.0)
    for node, step in ((0, 12), (1, 10)):
        workers = (WorkerProgress(0, 0, step, 3.0, 9.0), WorkerProgress(1, 0, step - 1, 3.0, 9.0))
        run.step(Received(f"n{node}", NodeProgress(1, 9.0, workers)), 9.0)
    failure = Failure(1, 1, 3, 9, 1, 10.0, evidence=Evidence("ValueError", "ValueError: nan"))
    run.step(Received("n1", FailureSeen(1, failure, 10.0)), 10.0)
    found = samples(render(status_of(run.machine.state, (), "", 10.0, 1000.0)))
    assert found["tenax_run_last_step", ()] == 12
    assert found["tenax_run_slowest_step", ()] == 9
    assert found["tenax_node_step", (("host", "node1"), ("node", "node1"))] == 10
    assert found["tenax_node_state", (("host", "node0"), ("node", "node0"), ("state", "stopping"))] == 1
    assert found["tenax_run_nodes", (("state", "stopping"),)] == 2
    assert found["tenax_run_failed_workers", (("cause", "ValueError"),)] == 1
    assert found["tenax_node_failed_workers", (("host", "node1"), ("node", "node1"))] == 1


def test_untrusted_text_stays_in_its_label() -> None:
    """Host names and errors may contain anything."""
    hostile = 'a"b\\c\nd} 1'
    nodes = (NodeStatus("n0", hostile, hostile, "working", 0.0),)
    failures = (FailureStatus(0, 0, hostile, 1, 1, 0.0, "exit code 1", kind=hostile),)
    found = samples(render(status(nodes=nodes, failures=failures)))
    assert found["tenax_node_state", (("host", hostile), ("node", hostile), ("state", "working"))] == 1
    assert found["tenax_run_failed_workers", (("cause", hostile),)] == 1


def test_the_page_of_a_thousand_nodes_is_small() -> None:
    """Small enough to be scraped every few seconds."""
    nodes = tuple(
        NodeStatus(
            f"{n:032x}", f"node{n:04}.cluster", f"node{n:04}.cluster", "working", 0.0, 8, n, 8 * n, steps=(1000,) * 8
        )
        for n in range(1000)
    )
    page = render(status(nodes=nodes))
    print(f"a page of 1,000 nodes has {len(page):,} bytes")
    assert len(page) < 300_000
    assert samples(page)["tenax_run_nodes", (("state", "working"),)] == 1000


def test_the_number_of_lines_is_bounded() -> None:
    """Nodes and causes have a maximum of lines."""
    nodes = tuple(NodeStatus(str(n), f"node{n}", f"node{n}", "working", 0.0) for n in range(5000))
    failures = tuple(FailureStatus(n, 0, "h", 1, 1, 0.0, "x", kind=f"cause {n}") for n in range(200))
    found = samples(render(status(nodes=nodes, failures=failures)))
    assert sum(name == "tenax_node_state" for name, _ in found) == 2000
    assert sum(name == "tenax_run_failed_workers" for name, _ in found) == 51
    assert found["tenax_run_failed_workers", (("cause", "other"),)] == 150
    assert found["tenax_run_nodes", (("state", "working"),)] == 5000


def test_the_content_type_is_that_of_prometheus() -> None:
    assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"


def everything() -> set[str]:
    """Return the names of all samples that a page can have."""
    node = NodeStatus("n", "n", "n", "working", 0.0, steps=(3,), failed=(0,))
    failure = FailureStatus(0, 0, "h", 1, 1, 0.0, "exit code 1")
    page = render(status(nodes=(node,), failures=(failure,), earlier=(failure,)))
    return {name for name, _ in samples(page)}


def test_every_metric_of_the_dashboard_exists() -> None:
    """The Grafana dashboard shows only metrics of the page."""
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries += [each["query"]["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    used = {name for query in queries for name in re.findall(r"\btenax_\w+", query)}
    assert used <= everything(), used - everything()
    assert len(used) > 15


def test_the_dashboard_is_consistent() -> None:
    """Panels have unique ids, do not overlap, and query the selected data source for the selected run."""
    board = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
        cells = {(position["x"] + x, position["y"] + y) for x in range(position["w"]) for y in range(position["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${source}"
            assert 'run_id=~"$run"' in target["expr"], panel["title"]


def test_the_guide_lists_every_metric() -> None:
    """And no other."""
    guide = (ROOT / "docs" / "guides" / "metrics.md").read_text()
    section = guide.partition("## The whole run")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `(tenax_(?:run|node)_\w+)", section, re.MULTILINE))
    families = {family.name for family in parser.text_string_to_metric_families(render(status(nodes=())))}
    samples_of = {re.sub(r"_(sum|count)$", "", name) for name in everything()}
    assert named == samples_of, (named ^ samples_of, families)
