"""TorchElastic's EtcdServer, under its public name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.etcd import needs_etcd
from kit.processes import Program, gone, leaving_nothing, on_linux
from tenax._core.etcd.operations import Put, Range
from tenax._io.etcd.binary import EtcdUnusable
from tenax.rendezvous.etcd_server import EtcdServer, find_free_port, stop_etcd

_HOLDS_A_SERVER = """
    import sys
    from tenax.rendezvous.etcd_server import EtcdServer

    server = EtcdServer(sys.argv[1])
    server.start()
    print(server.get_endpoint(), flush=True)
    if sys.argv[2] == "exits":
        sys.exit()
    sys.stdin = open(sys.argv[2])
    sys.stdin.read()
"""


@needs_etcd
@on_linux
def test_it_starts_serves_and_stops(tmp_path: Path) -> None:
    """Nothing is left behind, and stopping again is no error."""
    data = tmp_path / "data"
    with leaving_nothing():
        server = EtcdServer(str(data))
        assert server.get_port() == -1
        server.start(timeout=30)
        assert server.get_endpoint() == f"{server.get_host()}:{server.get_port()}"
        client = server.get_client()
        client.call(Put(b"a", b"1"))
        assert client.call(Range(b"a")).kvs[0].value == b"1"
        client.close()
        server.stop()
        server.stop()
        assert not data.exists()


@needs_etcd
def test_it_can_be_started_again_without_the_old_data(tmp_path: Path) -> None:
    server = EtcdServer(str(tmp_path / "data"))
    for _ in range(2):
        server.start()
        client = server.get_client()
        assert not client.call(Range(b"a")).kvs
        client.call(Put(b"a", b"1"))
        client.close()
        server.stop()


@needs_etcd
def test_its_stderr_can_be_redirected(tmp_path: Path) -> None:
    server = EtcdServer(str(tmp_path / "data"))
    with (tmp_path / "errors").open("wb") as errors:
        server.start(stderr=errors)
    server.stop()
    assert (tmp_path / "errors").read_bytes().startswith(b"{")


@needs_etcd
@on_linux
@pytest.mark.parametrize("end", ["exits", "killed"])
def test_it_ends_with_its_process(program: Callable[..., Program], tmp_path: Path, end: str) -> None:
    """Without a call of ``stop``."""
    os.mkfifo(tmp_path / "waits")
    holder = program(_HOLDS_A_SERVER, tmp_path / "data", "exits" if end == "exits" else tmp_path / "waits")
    port = int(holder.pipe.line().rpartition(":")[2])
    if end == "killed":
        pids = _listening(tmp_path / "data")
        holder.send(signal.SIGKILL)
        holder.wait()
        assert pids
        assert gone(pids)
    else:
        assert holder.wait() == 0
        assert not _listening(tmp_path / "data"), port
        assert not (tmp_path / "data").exists()


def test_a_missing_program_raises(program: Callable[..., Program], tmp_path: Path) -> None:
    holder = program(
        _HOLDS_A_SERVER, tmp_path / "data", "exits", env={"TORCHELASTIC_ETCD_BINARY_PATH": str(tmp_path / "none")}
    )
    assert holder.wait() == 1
    assert f"{EtcdUnusable.__name__}: TORCHELASTIC_ETCD_BINARY_PATH is " in holder.errors
    assert not (tmp_path / "data").exists()


def test_a_server_that_exits_is_reported_with_its_log(program: Callable[..., Program], tmp_path: Path) -> None:
    script = tmp_path / "etcd"
    script.write_text(
        '#!/bin/sh\ncase "$1" in --version) echo "etcd Version: 3.5.16"; exit;; esac\necho no >&2\nexit 3\n'
    )
    script.chmod(0o700)
    holder = program(_HOLDS_A_SERVER, tmp_path / "data", "exits", env={"TENAX_ETCD": str(script)})
    assert holder.wait() == 1
    assert "RuntimeError: etcd exited with code 3; last log messages: no" in holder.errors


def test_stop_etcd_ends_a_process_and_removes_its_data(tmp_path: Path) -> None:
    """A process that has exited already, or none, is no error."""
    data = tmp_path / "data"
    data.mkdir()
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    stop_etcd(process, str(data))
    assert process.poll() == -signal.SIGTERM
    assert not data.exists()
    stop_etcd(process)
    stop_etcd(None)
    assert process.stdin is not None
    process.stdin.close()


def test_find_free_port_returns_distinct_ports() -> None:
    with find_free_port() as first, find_free_port() as second:
        assert 0 < first.getsockname()[1] != second.getsockname()[1]


def _listening(data: Path) -> list[int]:
    """Return the etcd processes with this data directory."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            arguments = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--data-dir" in arguments and any(argument.startswith(os.fsencode(data)) for argument in arguments):
            found.append(int(entry))
    return found
