"""Whatever shows a run may break, in every way: the job does not notice, and the person is told once."""

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
from e2e.conftest import bench  # noqa: F401 - a fixture
from kit.addresses import own_address
from kit.jobs import TENAX, Bench, Done, needs_root, until

# One restart, so that there is something to show; the sum of all that the job must do in spite of everything.
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
    """A folder in which directories can be made, and nothing be written."""
    folder = tmp_path / "full"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], check=True)
    try:
        with pytest.raises(OSError, match="No space left"):
            (folder / "ballast").write_bytes(b"x" * (1 << 20))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def unharmed(done: Done) -> None:
    assert done.code == 0, done
    assert "generation 2 (restart 1 of 1)" in done.err
    assert "the run succeeded: all 2 workers succeeded" in done.err


def told(done: Done, pattern: str) -> int:
    return len(re.findall(pattern, done.err))


def test_the_port_of_the_page_is_taken_on_one_of_many_nodes(bench: Bench, address: str) -> None:  # noqa: F811
    """Which node serves the page may change while the run lasts: there a taken port is reported once, and no more."""
    nodes = ("--nnodes", "1:2", "--rdzv-endpoint", f"{address}:29400", "--rdzv-conf", "last_call_timeout=0")
    with socket.create_server((address, 0)) as taken:
        page = f"{address}:{taken.getsockname()[1]}"
        done = bench.run(*nodes, *FLAGS, "--dashboard", page, bench.script(RESTARTS_ONCE))
    unharmed(done)
    assert told(done, rf"--dashboard {page}: .* is taken .*; the job continues without it") == 1


def test_a_collector_of_traces_that_is_not_there(bench: Bench, address: str) -> None:  # noqa: F811
    done = bench.run(*FLAGS, "--trace", f"otel:http://{address}:4318/v1/traces", bench.script(RESTARTS_ONCE))
    unharmed(done)
    assert told(done, r"tenax: the trace \(--trace\) ") == 1, done.err


def test_a_collector_of_traces_that_never_answers(bench: Bench, address: str) -> None:  # noqa: F811
    with socket.create_server((address, 4318)):  # connections are taken, and nothing is read
        done = bench.run(*FLAGS, "--trace", f"otel:http://{address}:4318/v1/traces", bench.script(RESTARTS_ONCE))
    unharmed(done)
    assert told(done, r"tenax: the trace \(--trace\) ") == 1, done.err


@needs_root
def test_a_disk_that_is_full(bench: Bench, full_disk: Path) -> None:  # noqa: F811
    """Neither journal can be written, nor can a worker tell its progress. Each says so once, and no more."""
    done = bench.run(*FLAGS, "--log-dir", str(full_disk), bench.script(RESTARTS_ONCE))
    unharmed(done)
    assert told(done, r"the journal .*/journal.jsonl ends here: .*; the job is not affected") == 1
    assert told(done, r"the journal .*/coordinator.jsonl ends here: .*; the job is not affected") == 1


def test_a_browser_that_goes_away_and_one_that_never_reads(bench: Bench) -> None:  # noqa: F811
    """One has asked for the stream and is gone; another has asked and takes nothing of it. The restart goes on."""
    script = bench.script("""
        import sys, worker_kit as kit
        kit.ready()
        kit.wait_for('go')
        sys.exit(3 if kit.ATTEMPT == 0 and kit.RANK == 1 else 0)
    """)
    job = bench.start(*FLAGS, "--dashboard", "0", script)
    link = until(lambda: re.search(r"http://127\.0\.0\.1:(\d+)/\?key=(\w+)", job.err), "no link was said")
    port, key = int(link[1]), link[2]
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    try:
        for client in clients:
            client.sendall(f"GET /events?key={key} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert clients[0].recv(15) == b"HTTP/1.1 200 OK"
        clients[0].close()
        for rank, attempt in ((0, 0), (1, 0), (0, 1), (1, 1)):
            bench.tell("go", rank, attempt)
        done = job.wait()
    finally:
        for client in clients:
            client.close()
    unharmed(done)


# What is imported when somebody asks.
_ASKED_FOR = ("_engines/operator_api.py", "_engines/tcp/wire.py", "_view/status.py", "_node/log_queries.py")


@pytest.mark.parametrize("replaced", [_ASKED_FOR, _ASKED_FOR[2:], ("_logs/queries.py",)])
def test_tenax_is_replaced_while_the_run_goes_on(
    bench: Bench,  # noqa: F811
    tmp_path: Path,
    replaced: tuple[str, ...],
) -> None:
    """Somebody installs another version, and then asks how the run is. What does not fit is no reason to end it."""
    copy = tmp_path / "installed" / "tenax"
    shutil.copytree(Path(tenax.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    doors = tempfile.mkdtemp(prefix="doors-", dir="/tmp")
    environ = {"TENAX_PRIVATE_DIR": doors, "PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    script = bench.script("""
        import worker_kit as kit
        kit.ready()
        kit.wait_for('go')
    """)
    try:
        job = bench.start(script, env=environ)
        until(lambda: any(name.endswith(".sock") for name in os.listdir(doors)), "no door")
        for name in replaced:
            (copy / name).write_text("from tenax.of_another_version import nothing\n")
        asked = [
            bench.start(command, program=TENAX, env={"TENAX_PRIVATE_DIR": doors}).wait()
            for command in ("status", "logs")
        ]
        bench.tell("go", 0, 0)
        done = job.wait()
    finally:
        shutil.rmtree(doors)
    assert done.code == 0, done
    assert any(each.code == 1 for each in asked), asked  # else this is no test
    assert all("Traceback" not in each.err for each in asked)
    assert "was started again" not in done.err
