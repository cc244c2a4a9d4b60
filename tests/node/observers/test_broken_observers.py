"""A failing observer (dashboard, trace, journal, status) does not affect the job and is reported once."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tenax
from e2e.conftest import runner  # noqa: F401 - a fixture
from kit.addresses import own_address
from kit.jobs import TENAX, Done, Runner, needs_root, until

# One restart, so that observers have something to show.
RESTARTS_ONCE = """
    import sys, worker_kit as kit
    from tenax import progress
    kit.ready()
    progress.step(kit.ATTEMPT)
    sys.exit(3 if kit.ATTEMPT == 0 and kit.RANK == 1 else 0)
"""
FLAGS = ("--nproc-per-node", "2", "--max-restarts", "1")


@pytest.fixture
def address() -> str:
    return own_address()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder where directories can be created but no data can be written."""
    folder = tmp_path / "full"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], check=True)
    try:
        with pytest.raises(OSError, match="No space left"):
            (folder / "ballast").write_bytes(b"x" * (1 << 20))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def assert_succeeded(done: Done) -> None:
    assert done.code == 0, done
    assert "generation 2 (restart 1 of 1)" in done.err
    assert "the run succeeded: all 2 workers succeeded" in done.err


def count_lines(done: Done, pattern: str) -> int:
    return len(re.findall(pattern, done.err))


def test_a_taken_dashboard_port_is_reported_once_with_many_nodes(runner: Runner, address: str) -> None:  # noqa: F811
    """The node that serves the dashboard may change during a run, so a taken port does not reject the run."""
    nodes = ("--nnodes", "1:2", "--rdzv-endpoint", f"{address}:29400", "--rdzv-conf", "last_call_timeout=0")
    with socket.create_server((address, 0)) as taken:
        page = f"{address}:{taken.getsockname()[1]}"
        done = runner.run(*nodes, *FLAGS, "--dashboard", page, runner.script(RESTARTS_ONCE))
    assert_succeeded(done)
    assert count_lines(done, rf"--dashboard {page}: .* is already in use; .*; the job continues without it") == 1


def test_a_missing_trace_collector_is_reported_once(runner: Runner, address: str) -> None:  # noqa: F811
    done = runner.run(*FLAGS, "--trace", f"otel:http://{address}:4318/v1/traces", runner.script(RESTARTS_ONCE))
    assert_succeeded(done)
    assert count_lines(done, r"tenax: the trace \(--trace\) ") == 1, done.err


def test_a_trace_collector_that_never_answers_is_reported_once(runner: Runner, address: str) -> None:  # noqa: F811
    with socket.create_server((address, 4318)):  # accepts connections and reads nothing
        done = runner.run(*FLAGS, "--trace", f"otel:http://{address}:4318/v1/traces", runner.script(RESTARTS_ONCE))
    assert_succeeded(done)
    assert count_lines(done, r"tenax: the trace \(--trace\) ") == 1, done.err


@needs_root
def test_a_full_disk_is_reported_once_for_each_journal(runner: Runner, full_disk: Path) -> None:  # noqa: F811
    """Neither the journals nor the workers' progress files can be written."""
    done = runner.run(*FLAGS, "--log-dir", str(full_disk), runner.script(RESTARTS_ONCE))
    assert_succeeded(done)
    assert count_lines(done, r"the journal .*/journal.jsonl ends here: .*; the job is not affected") == 1
    assert count_lines(done, r"the journal .*/coordinator.jsonl ends here: .*; the job is not affected") == 1


def test_a_browser_that_disconnects_or_never_reads_does_not_delay_a_restart(runner: Runner) -> None:  # noqa: F811
    """Both request the event stream; one disconnects, the other reads nothing."""
    script = runner.script("""
        import sys, worker_kit as kit
        kit.ready()
        kit.wait_for('go')
        sys.exit(3 if kit.ATTEMPT == 0 and kit.RANK == 1 else 0)
    """)
    job = runner.start(*FLAGS, "--dashboard", "0", script)
    link = until(lambda: re.search(r"http://127\.0\.0\.1:(\d+)/\?key=(\w+)", job.err), "no link was printed")
    port, key = int(link[1]), link[2]
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    try:
        for client in clients:
            client.sendall(f"GET /events?key={key} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert clients[0].recv(15) == b"HTTP/1.1 200 OK"
        clients[0].close()
        for rank, attempt in ((0, 0), (1, 0), (0, 1), (1, 1)):
            runner.leave_note("go", rank, attempt)
        done = job.wait()
    finally:
        for client in clients:
            client.close()
    assert_succeeded(done)


# Modules that are imported for the first operator request.
_IMPORTED_ON_REQUEST = ("_engines/operator_api.py", "_core/link/wire.py", "_view/status.py", "_node/log_queries.py")


@pytest.mark.parametrize("replaced", [_IMPORTED_ON_REQUEST, _IMPORTED_ON_REQUEST[2:], ("_logs/queries.py",)])
def test_a_run_survives_the_upgrade_of_tenax_on_disk(
    runner: Runner,  # noqa: F811
    tmp_path: Path,
    replaced: tuple[str, ...],
) -> None:
    """A status request then imports modules of another version, which may fail."""
    copy = tmp_path / "installed" / "tenax"
    shutil.copytree(Path(tenax.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    sockets = tempfile.mkdtemp(prefix="sockets-", dir="/tmp")
    environ = {"TENAX_PRIVATE_DIR": sockets, "PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    script = runner.script("""
        import worker_kit as kit
        kit.ready()
        kit.wait_for('go')
    """)
    try:
        job = runner.start(script, env=environ)
        until(lambda: any(name.endswith(".sock") for name in os.listdir(sockets)), "no control socket")
        for name in replaced:
            (copy / name).write_text("from tenax.of_another_version import nothing\n")
        asked = [
            runner.start(command, program=TENAX, env={"TENAX_PRIVATE_DIR": sockets}).wait()
            for command in ("status", "logs")
        ]
        runner.leave_note("go", 0, 0)
        done = job.wait()
    finally:
        shutil.rmtree(sockets)
    assert done.code == 0, done
    assert any(each.code == 1 for each in asked), asked  # otherwise nothing was tested
    assert all("Traceback" not in each.err for each in asked)
    assert "log writer died" not in done.err
