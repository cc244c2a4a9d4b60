"""docs/concepts/security.md lists everything that a run opens. The kernel is asked whether that is complete.

One run per engine has everything enabled. Every listening socket and named pipe of its processes must be a row of the
page's table, and every row must be found; every file that they write must be a row."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from kit.addresses import own_endpoint
from kit.etcd import EtcdCluster
from kit.jobs import Runner, Running, until
from tenax._engines.free_port import free_port

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "security.md"
_ROW = re.compile(r"^\| `(tcp|unix|fifo|file) ([^`]+)` \|", re.MULTILINE)
_LISTENING = "0A"
_ACCEPTS_CONNECTIONS = 1 << 16  # a flag in /proc/net/unix
_ADDRESS = r"[\d.]+|\[::\]"
_MANAGED_ETCD = {"ETCD_CLIENT", "ETCD_PEER"}  # tests/io/managed_etcd covers the ports of members

WORKER = """
    import os

    from tenax import progress
    from tenax.control_plane import worker_main
    from tenax.store import TCPStore
    from worker_kit import ready, stay


    @worker_main()
    def main():
        progress.step(1)
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store.set(f"here{os.environ['RANK']}", b"yes")
        ready()
        stay()


    main()
"""


def test_a_run_opens_what_the_security_page_lists(runner: Runner) -> None:
    """Two nodes at an endpoint, with every observer, the watchdog and worker sockets."""
    endpoint, dashboard = own_endpoint(), free_port()
    metrics = [free_port(), free_port()]
    names = {
        "ENDPOINT": re.escape(endpoint),
        "DASHBOARD": f"127.0.0.1:{dashboard}",
        "METRICS": f"127.0.0.1:(?:{metrics[0]}|{metrics[1]})",
    }
    nodes = [
        _start(
            runner, number, "--nnodes", "2", "--rdzv-endpoint", endpoint,
            "--dashboard", str(dashboard),
            "--metrics", f"prometheus:{metrics[number]},jsonl:metrics-{number}.jsonl",
        )
        for number in range(2)
    ]  # fmt: skip
    runner.pids(2)
    _compare(runner, nodes, names, without={"LINK", *_MANAGED_ETCD})


def test_a_run_through_etcd_opens_what_the_security_page_lists(runner: Runner, etcd: EtcdCluster) -> None:
    """There is no endpoint: the elected leader listens for the links of the other nodes."""
    node = _start(runner, 0, "--nnodes", "1:2", "--rdzv-backend", "etcd", "--rdzv-endpoint", etcd.endpoints)
    runner.pids(1)
    names = {"LINK": r"127\.[\d.]+:\d+"}
    _compare(runner, [node], names, without={"ENDPOINT", "DASHBOARD", "METRICS", *_MANAGED_ETCD})


def _start(runner: Runner, number: int, *words: str) -> Running:
    return runner.start(
        *words, "--rdzv-id", "exposed", "--tee", "3", "--log-dir", "logs", "--on-hang", "report",
        "--event-log-handler", f"jsonl:events-{number}.jsonl", "--report", f"report-{number}.json",
        runner.script(WORKER),
        env={
            "TORCHELASTIC_HEALTH_CHECK_PORT": "0",
            "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
            "TORCH_WORKER_SERVER_SOCKET": str(runner.home / "sockets"),
        },
    )  # fmt: skip


def _compare(runner: Runner, nodes: list[Running], names: dict[str, str], without: set[str]) -> None:
    """Compare the page with what the kernel reports now, and with the files that exist after the run."""
    home = re.escape(str(runner.home))
    names = {
        "LOGS": rf"{home}/logs/exposed_\w+",
        "CONTROL": re.escape(os.environ["TENAX_PRIVATE_DIR"]),
        "TMP": f"{home}/tmp",
        "WORKER_SOCKETS": f"{home}/sockets",
        "FILE": rf"{home}/(?:metrics|events|report)-\d\.jsonl?",
        "MASTER": r"127\.[\d.]+:\d+",
        "HEALTH_PORT": r"\d+",
        **{name: r"[^/]+" for name in ("PID", "RANK", "NUMBER", "NAME")},
        **names,
    }
    rows = [row for row in _ROW.findall(PAGE.read_text()) if not without & set(re.findall(r"\w+", row[1]))]
    assert rows
    patterns = {(kind, what): _pattern(what, names) for kind, what in rows}
    until(lambda: _control_sockets(runner) == len(nodes), "the control sockets, which agents open a moment later")
    opened = set(_opened(runner))
    for node in nodes:
        node.send(signal.SIGTERM)
    for node in nodes:
        node.wait()
    opened |= {("file", str(path)) for path in _files(runner)}
    fits = {
        one: [row for row, pattern in patterns.items() if row[0] == one[0] and pattern.fullmatch(one[1])]
        for one in opened
    }
    unlisted = sorted(one for one, rows_of_it in fits.items() if not rows_of_it)
    assert not unlisted, f"open, but not in {PAGE.name}: {unlisted}"
    unseen = {row for row in rows if row[0] != "file"} - {row for rows_of_it in fits.values() for row in rows_of_it}
    assert not unseen, f"in {PAGE.name}, but not open: {unseen}; open: {sorted(opened)}"


def _control_sockets(runner: Runner) -> int:
    folder = os.environ["TENAX_PRIVATE_DIR"]
    return sum(kind == "unix" and what.startswith(folder) for kind, what in set(_opened(runner)))


def _pattern(what: str, names: dict[str, str]) -> re.Pattern[str]:
    """Return ``tcp *:HEALTH_PORT`` as a regular expression: names in capitals match any value, a star any address."""
    parts = re.split(r"([A-Z][A-Z_]*[A-Z]|\*)", what)
    known = {**names, "*": f"(?:{_ADDRESS})"}
    return re.compile("".join(known[part] if index % 2 else re.escape(part) for index, part in enumerate(parts)))


def _opened(runner: Runner) -> Iterator[tuple[str, str]]:
    """Return the listening sockets of the processes of the run, the named pipes they hold, and the files they write."""
    own_streams = {runner.home / f"{name}.{number}" for name in ("stdout", "stderr") for number in range(2)}
    for pid in runner.alive():
        sockets = dict(_listening(pid))
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                target, mode = str(entry.readlink()), entry.stat().st_mode
                if target in sockets:
                    yield sockets[target]
                elif stat.S_ISFIFO(mode) and target.startswith("/"):
                    yield "fifo", target
                elif stat.S_ISREG(mode) and entry.lstat().st_mode & stat.S_IWUSR and Path(target) not in own_streams:
                    yield "file", target


def _listening(pid: int) -> Iterator[tuple[str, tuple[str, str]]]:
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for fields in _table(pid, table):
            if fields[3] == _LISTENING:
                digits, _, port = fields[1].partition(":")
                words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
                address = socket.inet_ntop(family, b"".join(words))
                shown = address if family == socket.AF_INET else f"[{address}]"
                yield f"socket:[{fields[9]}]", ("tcp", f"{shown}:{int(port, 16)}")
    for fields in _table(pid, "unix", most=8):  # the last one is a path, which may have spaces
        if int(fields[3], 16) & _ACCEPTS_CONNECTIONS:
            yield f"socket:[{fields[6]}]", ("unix", fields[7].removesuffix(".new"))  # it is renamed once it listens


def _table(pid: int, name: str, most: int = 0) -> list[list[str]]:
    return [line.split(maxsplit=most - 1) for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]


def _files(runner: Runner) -> Iterator[Path]:
    for folder in ("logs", "tmp", "sockets"):
        yield from (path for path in (runner.home / folder).rglob("*") if path.is_file())
    yield from runner.home.glob("*.json*")
