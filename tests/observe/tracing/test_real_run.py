"""The trace of a real run agrees with its journals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.addresses import own_endpoint
from kit.processes import TIMEOUT_S
from tenax.cli.journal_commands import read_histories

from .kit import attributes, collecting

pytestmark = pytest.mark.process

# The last generation waits until the first spans have arrived: after the run there are only two seconds for the others,
# not enough to import OpenTelemetry on a busy machine.
_SCRIPT = """
import os, sys, time
from tenax import progress

first = 5 * int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(first, first + 10):
    progress.step(step)
if first == 0 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_MAX_RESTARTS"] == "1":
    raise ValueError("not this time")
while first and not os.path.exists(sys.argv[1]):
    time.sleep(0.002)
"""


def test_trace_report_and_verdict_agree(tmp_path: Path) -> None:
    """The same outcome, cause and sums, for a run with a restart."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    arrived = tmp_path / "arrived"
    with collecting(mark=arrived) as collector:
        arguments = ["run", "--trace", f"otel:{collector.endpoint}", "--nproc-per-node", "2", "--max-restarts", "1"]
        arguments += ["--rdzv-id", "traced", "--log-dir", str(tmp_path / "logs"), str(script), str(arrived)]
        done = subprocess.run(
            [sys.executable, "-m", "tenax", *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**os.environ, "TENAX_PRIVATE_DIR": str(tmp_path / "doors")},
        )
    assert done.returncode == 0, done.stderr
    assert "--trace" not in done.stderr
    run = attributes(collector.span("run traced"))
    assert (run["tenax.outcome"], run["tenax.restarts_used"], run["tenax.generations"]) == ("succeeded", 1, 2)
    first = collector.span("generation 1")
    assert attributes(first)["tenax.ended_by"] == "failure"
    assert {attributes(event)["tenax.rank"] for event in first.events} == {1}

    found = read_histories([str(tmp_path / "logs")])
    assert found.troubles == []
    (history,) = found.histories
    assert (history.run_id, history.outcome, history.missing) == ("traced", "succeeded", ())
    assert history.goodput is not None
    assert run["tenax.training_s"] == round(history.goodput.spent.training_s, 3)
    assert run["tenax.lost_steps"] == history.goodput.lost_steps
    ended = sorted((each.generation, each.rank, each.ended) for node in history.nodes for each in node.workers)
    assert [each for each in ended if each[1] == 1] == [(1, 1, "failed"), (2, 1, "succeeded")]

    report = subprocess.run(
        [sys.executable, "-m", "tenax", "report", "--json", str(tmp_path / "logs")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert report.returncode == 0, report.stderr
    (line,) = json.loads(report.stdout)["runs"]
    assert line["first_cause"].endswith("raised ValueError: not this time")


def test_only_the_coordinator_sends_spans(tmp_path: Path) -> None:
    """Two nodes have the flag: every span is sent once."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.replace("while first and", "while"))
    with collecting(mark=tmp_path / "arrived") as collector:
        arguments = [sys.executable, "-m", "tenax", "run", "--trace", f"otel:{collector.endpoint}", "--nnodes", "2"]
        arguments += ["--rdzv-id", "pair", "--rdzv-endpoint", own_endpoint(), str(script), str(tmp_path / "arrived")]
        agents = [
            subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)
        ]
        try:
            outputs = [agent.communicate(timeout=TIMEOUT_S)[0] for agent in agents]
        finally:
            for agent in agents:
                if agent.poll() is None:
                    agent.kill()
                    agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert "--trace" not in "".join(outputs)
    spans = [span.span_id for span in collector.spans]
    assert len(spans) == len(set(spans))
    assert attributes(collector.span("generation 1"))["tenax.nodes"] == 2
