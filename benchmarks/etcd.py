"""etcd: N agents join a run at once through a real etcd of three members; until the last has its assignment.

tenax: N real agent machines with their etcd engines (`nodes.py`) in four processes, each with its own connections to
etcd: they query the leader, elect one of them, link to it, and receive the generation when it is recorded in etcd. The
time runs from the first agent that is opened until the last gets the command to start its workers. A first round is not
measured, because it imports modules.

The members have default settings, on loopback, with their data in a temporary folder, and sync every write.
TorchElastic's own etcd rendezvous is not measured.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.crew import Crew, CrewFailed, many_descriptors, shares
from benchmarks.growth import exponent
from benchmarks.harness import Settings
from benchmarks.nodes import Node
from benchmarks.pipe_commands import PipeCommands
from benchmarks.report import NOTHING, OURS, Row, compared, limited, seconds
from benchmarks.samples import Samples
from tenax._core import events
from tenax._core.authority import AuthorityTerms
from tenax._core.etcd.errors import EtcdError
from tenax._core.etcd.operations import Range
from tenax._engines.etcd.engine import EtcdEngine, EtcdEngineSettings
from tenax._io.etcd.binary import EtcdUnusable, find_etcd, server_environ
from tenax._io.etcd.blocking import BlockingEtcd
from tenax._io.etcd.settings import etcd_settings
from tenax._io.loop import Loop

SIZES = (50, 100, 200)
QUICK_SIZES = (10, 20)
MEMBERS = 3
PROCESSES = 4
BOUND_S = 60.0
MAX_S = 5.0  # for the largest size
_UP_S = 30.0
_numbers = itertools.count(1)


def measure(settings: Settings, samples: Samples) -> None:
    """Take all samples."""
    if OURS not in [launcher.name for launcher in settings.launchers]:
        return
    sizes = QUICK_SIZES if settings.quick else SIZES
    settings.settle(samples)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder,
            Members(Path(folder)) as members,
            Crew(work, [(folder,)] * PROCESSES) as crew,
        ):
            crew.receive(_UP_S)
            _join(crew, members.endpoints, sizes[0])  # unmeasured
            for _ in range(settings.repetitions(5)):
                for nodes in sizes:
                    _sample(crew, members.endpoints, nodes, samples)
    except EtcdUnusable as reason:
        samples.fail(OURS, str(reason))
    except EtcdError as error:
        samples.fail(OURS, f"the members did not come up: {error}")


def _sample(crew: Crew, endpoints: str, nodes: int, samples: Samples) -> None:
    try:
        samples.add(OURS, _joined(nodes), _join(crew, endpoints, nodes))
    except CrewFailed as failure:
        samples.miss(OURS, _joined(nodes), str(failure))
        raise


def _join(crew: Crew, endpoints: str, nodes: int) -> float:
    """Run one round with a new run id. Return how long it took."""
    run_id = f"bench-{next(_numbers)}"
    crew.send_each([("join", endpoints, run_id, nodes, own) for own in shares(nodes, PROCESSES)])
    times = crew.receive(BOUND_S)
    crew.send("leave")
    crew.receive(BOUND_S)
    return max(formed for _, formed in times) - min(began for began, _ in times)


def work(pipe: Connection, folder: str) -> None:
    """Run agents.

    On ("join", endpoints, run, all nodes, nodes here) these join; replies with when it began, and when the last had its
    assignment. On ("leave",) they are closed.
    """
    many_descriptors()
    loop = Loop()
    nodes: list[Node] = []
    began = 0.0

    def execute(what: str, *arguments: Any) -> None:
        nonlocal began
        if what == "join":
            began = time.monotonic()
            nodes.extend(_agents(loop, folder, *arguments))
            for node in nodes:
                node.open()
        else:
            while nodes:
                nodes.pop().control.close()
            pipe.send("left")

    loop.watch(PipeCommands(pipe, execute))
    pipe.send("ready")
    while True:
        posted: Any = loop.next_event(lambda: None)
        node, event = posted
        if node not in nodes:
            continue  # it has left
        node.step(event)
        if isinstance(event, events.JoinRefused):
            raise RuntimeError(event.reason)
        if isinstance(event, events.GenerationFormed) and all(each.formed_at for each in nodes):
            pipe.send((began, max(max(each.formed_at.values()) for each in nodes)))


def _agents(loop: Loop, folder: str, endpoints: str, run_id: str, nodes: int, here: int) -> list[Node]:
    settings = EtcdEngineSettings(
        endpoints, run_id, nodes, nodes, secret=b"bench", terms=AuthorityTerms().lease, etcd=etcd_settings(endpoints)
    )
    return [Node(loop, settings, folder, EtcdEngine) for _ in range(here)]


class Members:
    """An etcd of three members on free addresses, as a context manager: it serves inside, and has exited afterwards."""

    def __init__(self, folder: Path) -> None:
        pid = os.getpid()
        self._folder = folder
        self._addresses = [f"127.{64 + pid // 256 % 60}.{pid % 256}.{number}" for number in range(1, MEMBERS + 1)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.endpoints = ",".join(f"{address}:2379" for address in self._addresses)

    def __enter__(self) -> Members:
        program = find_etcd()
        cluster = ",".join(f"m{number}=http://{each}:2380" for number, each in enumerate(self._addresses))
        try:
            for number, address in enumerate(self._addresses):
                clients, peers = f"http://{address}:2379", f"http://{address}:2380"
                command = [program, f"--name=m{number}", f"--data-dir={self._folder / f'm{number}'}"]
                command += [f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}"]
                command += [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
                command += [f"--initial-cluster={cluster}", "--log-level=error"]
                with (self._folder / f"m{number}.log").open("wb") as log:
                    process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=server_environ()
                    )
                self._processes.append(process)
            for address in self._addresses:
                client = BlockingEtcd(etcd_settings(f"{address}:2379"))
                client.call(Range(b"up"), _UP_S)
                client.close()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _joined(nodes: int) -> str:
    return f"{nodes} agents join through etcd → generation formed on all"


def rows(samples: Samples) -> list[Row]:
    """Return the rows."""
    found = []
    for nodes in (*QUICK_SIZES, *SIZES):
        what = _joined(nodes)
        if samples.has(OURS, what):
            is_last = nodes == SIZES[-1]
            found.append(limited(samples, what, seconds, below=MAX_S) if is_last else compared(samples, what, seconds))
    return [*found, _growth(samples, SIZES)]


def _growth(samples: Samples, sizes: Sequence[int]) -> Row:
    medians = {nodes: samples.summary(OURS, _joined(nodes)) for nodes in sizes}
    times = {nodes: summary.median for nodes, summary in medians.items() if summary}
    power = exponent(times)
    text = NOTHING if power is None else f"N^{power:.2f} ({min(times)} to {max(times)})"
    return Row("growth of that time with the number of agents", NOTHING, text)


def notes(_: Samples) -> list[str]:
    """Return the notes on the rows."""
    return [
        f"etcd: the agents are tenax's real agent machines and etcd engines in {PROCESSES} processes without workers; "
        f"they, an etcd of {MEMBERS} members that syncs every write, and the elected coordinator share this machine's "
        "cores and its disk."
    ]
