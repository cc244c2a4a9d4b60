"""Metrics and events of a real job: written to the destinations of the command line; a bad destination is rejected."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

from kit.addresses import own_endpoint
from kit.jobs import Runner, until

FAILS_ONCE = """
    import sys, worker_kit as kit
    kit.ready()
    if kit.ATTEMPT == 0 and kit.RANK == 1:
        sys.exit(3)
    if kit.ATTEMPT == 0:
        kit.stay()
"""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_restart_is_written_as_events_and_metrics(runner: Runner) -> None:
    done = runner.run(
        *("--nproc-per-node", "2", "--max-restarts", "1"),
        *("--event-log-handler", "jsonl:events.jsonl", "--metrics", "jsonl:metrics.jsonl"),
        runner.script(FAILS_ONCE),
    )
    assert done.code == 0, done
    written = [(event["name"].rpartition(".")[2], event["source"]) for event in lines(runner.home / "events.jsonl")]
    assert written[:4] == [("RENDEZVOUS", "AGENT"), ("ASSIGN_WORKER_RANKS", "AGENT"), *[("START", "WORKER")] * 2]
    assert sorted(written[4:6]) == [("FAILED", "WORKER"), ("TERMINATED", "WORKER")]
    assert written[6:10] == written[:4]
    assert written[10:] == [*[("SUCCEEDED", "WORKER")] * 2, ("SUCCEEDED", "AGENT")]
    values = {metric["name"]: metric["value"] for metric in lines(runner.home / "metrics.jsonl")}
    assert values["workers.default.run_success_with_retries"] == 1
    assert values["generation"] == 2
    assert values["recovery_ms"] > 0


def test_events_on_the_console_go_to_stderr(runner: Runner) -> None:
    done = runner.run("--event-log-handler", "console", runner.script("print('hello')"))
    assert done.code == 0, done
    assert done.out == "hello\n"
    assert '"name": "torchelastic.worker.status.START"' in done.err


def test_prometheus_reads_metrics_of_a_running_job(runner: Runner) -> None:
    endpoint = own_endpoint()
    job = runner.start(
        "--metrics",
        f"prometheus:{endpoint}",
        runner.script("import worker_kit as kit\nkit.ready()\nkit.wait_for('go')"),
    )
    runner.pids(1)

    def page() -> str:
        with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=5) as answer:
            return answer.read().decode()

    found = until(lambda: re.search(r"^tenax_generation\S* 1(\.0)?$", page(), re.MULTILINE), "tenax_generation 1")
    assert found
    runner.leave_note("go")
    assert job.wait().code == 0


def test_an_unknown_handler_is_rejected(runner: Runner) -> None:
    for flag, kind in (("--event-log-handler", "event handler"), ("--metrics", "metric handler")):
        done = runner.run(flag, "cloudwatch", runner.script("print('never')"))
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"tenax run: unknown {kind} 'cloudwatch'; known: console, ")


def test_an_unwritable_file_is_rejected(runner: Runner) -> None:
    done = runner.run("--metrics", "jsonl:no/such/folder/m.jsonl", runner.script("print('never')"))
    assert (done.code, done.out) == (2, "")
    assert "no/such/folder/m.jsonl" in done.err


def test_without_handlers_their_packages_are_not_imported(runner: Runner) -> None:
    done = runner.run(runner.script("print('hi')"), env={"PYTHONPROFILEIMPORTTIME": "1"}, timeout_s=60)
    assert done.code == 0
    assert "tenax._node.sinks" in done.err
    for module in (
        "tenax.events",
        "tenax.metrics",
        "tenax._io.background_queue",
        "tenax.timer",
        "tenax._observe.health.",
        "tenax.compat",
    ):
        assert module not in done.err, module
