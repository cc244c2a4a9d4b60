"""An explicit request that cannot be met is rejected before any worker starts, with the reason and the remedy."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from kit.jobs import TENAX, Runner

TRAINS = "from worker_kit import note; note('started')"
NOWHERE = "/proc/nowhere"  # no file or folder can be created there, not even by root


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    """A port at which another process listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


# Flags or variables, what the message says about them, and what to do.
REQUESTS = [
    ("--log-dir {nowhere}", "--log-dir {nowhere}: ", "folder"),
    ("--log-dir {home}/file", "--log-dir {home}/file: {home}/file is a file", "not a folder"),
    ("--report {nowhere}", "--report {nowhere}: could not write the file: ", "use another file"),
    ("--report {home}", "--report {home} is a folder", "not a file"),
    ("--dashboard 127.0.0.1:{port}", "port {port} of 127.0.0.1 is already in use", "choose another"),
    ("--dashboard 192.0.2.1:0", "192.0.2.1 is not an address of this host", "choose one that is"),
    ("--dashboard 127.0.0.1:0 TENAX_DASHBOARD_KEY=short", "TENAX_DASHBOARD_KEY must have", "at least 16 letters"),
    ("--trace otel:nonsense", "invalid endpoint 'nonsense'", "expected a URL such as"),
    ("--trace otel", "no address to send to", "use --trace otel:"),
    ("--trace other", "--trace takes ", "'otel' or 'otel:URL', not 'other'"),
    ("--metrics jsonl:{nowhere}", "could not create the metric handler 'jsonl:{nowhere}'", "tenax run --help"),
    (
        "--metrics prometheus:{port}",
        "could not create the metric handler 'prometheus:{port}': Address already in use",
        "tenax run --help",
    ),
    ("--metrics other", "unknown metric handler 'other'", "known: "),
    ("--event-log-handler jsonl:{nowhere}", "could not open the event file '{nowhere}'", "tenax run --help"),
    ("--logs-specs other", "--logs-specs other", "known in the entry-point group torchrun.logs_specs: default"),
    ("--rdzv-backend other", "unknown --rdzv-backend 'other'", "installed backends: "),
    ("TORCHELASTIC_HEALTH_CHECK_PORT={port}", "could not serve health checks on port {port}", "or to 0 for any"),
    ("TORCH_WORKER_SERVER_SOCKET={nowhere}", "TORCH_WORKER_SERVER_SOCKET is '{nowhere}'", "or unset it"),
    ("TORCHELASTIC_ENABLE_FILE_TIMER=1 TORCHELASTIC_TIMER_FILE={nowhere}", "'{nowhere}'", "path"),
    ("TENAX_PRIVATE_DIR={nowhere}/sockets", "TENAX_PRIVATE_DIR: could not create '{nowhere}/sockets'", "or unset it"),
]


@pytest.mark.parametrize(("request_", "what", "remedy"), REQUESTS, ids=[row[0] for row in REQUESTS])
def test_a_request_that_cannot_be_met_is_rejected(
    runner: Runner, taken_port: int, request_: str, what: str, remedy: str
) -> None:
    """One message with the problem and the remedy, exit code 2, and no worker is started."""
    (runner.home / "file").touch()
    values = {"nowhere": NOWHERE, "home": str(runner.home), "port": str(taken_port)}
    words = [word.format(**values) for word in request_.split()]
    variables = dict(word.split("=") for word in words if "=" in word)
    flags = [word for word in words if "=" not in word]
    done = runner.run(*flags, runner.script(TRAINS), env=variables)
    assert done.code == 2, done
    assert what.format(**values) in done.err, done
    assert remedy in done.err, done
    assert "Traceback" not in done.err, done
    assert not runner.noted("started")


@pytest.mark.parametrize(
    ("flags", "variable"), [(["--dashboard", "127.0.0.1:{}"], ""), ([], "TORCHELASTIC_HEALTH_CHECK_PORT")]
)
def test_a_rejected_run_is_not_listed(runner: Runner, taken_port: int, flags: list[str], variable: str) -> None:
    """It leaves no note and no journal, so no command takes it for a run that was killed."""
    env = {"TENAX_PRIVATE_DIR": str(runner.home / "private"), **({variable: str(taken_port)} if variable else {})}
    with_port = [flag.format(taken_port) for flag in flags]
    done = runner.run("--log-dir", "logs", *with_port, runner.script(TRAINS), env=env)
    assert done.code == 2, done
    listed = runner.run("ps", "--all", "--json", program=TENAX, env=env)
    assert (listed.code, json.loads(listed.out)) == (0, []), listed
    assert not list(runner.run_dir().iterdir())


def test_an_existing_report_is_unchanged_until_the_run_ends(runner: Runner) -> None:
    """The check for writability creates no empty report."""
    script = runner.script("import os; from worker_kit import note; note('seen', os.listdir())")
    earlier = runner.home / "earlier.json"
    earlier.write_text("of yesterday")
    job = runner.run("--report", "new.json", script)
    assert job.code == 0, job
    assert "new.json" not in runner.note("seen")
    assert (runner.home / "new.json").stat().st_size > 0
    done = runner.run("--report", "earlier.json", "--metrics", "other", script)
    assert done.code == 2, done
    assert earlier.read_text() == "of yesterday"
