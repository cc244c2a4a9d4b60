"""A fake cluster: the real coordinator, operator API and dashboard in one loop, with simulated nodes.

The loop runs in a thread of its own, like an agent's main thread; the test calls functions in it with ``do``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from kit.addresses import own_address
from kit.processes import TIMEOUT_S
from tenax._core import events, messages
from tenax._core.coordinator import NodeLost, Opened, Received, RunSettings, Send
from tenax._core.model import Evidence, Failure
from tenax._core.requests import LogsRequest
from tenax._engines.coordinator_host import CoordinatorHost
from tenax._engines.operator_api import OperatorApi
from tenax._io.http.server import ClientLimits
from tenax._io.loop import Loop
from tenax._observe.dashboard.live import Dashboard
from tenax._view.log_lines import LogAnswer, LogLine
from tenax._view.status import RunStatus

T = TypeVar("T")
Reply = Callable[[Any, str], None]
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\nRuntimeError: <b>boom</b>'


class FakeCluster:
    """``nodes`` nodes with ``slots`` workers each, which join at once if ``starts``."""

    def __init__(
        self,
        nodes: int = 2,
        slots: int = 2,
        *,
        max_restarts: int = 3,
        min_nodes: int | None = None,
        starts: bool = True,
        client_limits: ClientLimits | None = None,
        hosts: Callable[[int], str] = "gpu-{:03d}".format,
    ) -> None:
        self.loop = Loop()
        self.nodes, self.slots = nodes, slots
        self._is_closed = False
        self._min_nodes = nodes if min_nodes is None else min_nodes
        settings = RunSettings(
            "train-large", self._min_nodes, nodes, max_restarts, last_call_s=60.0, serving_node="id-0", scale_up=False
        )
        self.coordinator = CoordinatorHost(settings, None, self.loop, self._deliver)
        self.operators = CountingOperatorApi(OperatorApi(self.coordinator, self.loop, self._answer_logs))
        self.parts: dict[str, Any] = {}  # by node, in the current generation
        self.hosts = {f"id-{number}": hosts(number) for number in range(nodes)}
        self.errors: list[str] = []
        self.held: list[tuple[LogsRequest, Reply]] = []  # long polls
        self.printed: list[str] = ["epoch 1", "<script>alert(1)</script>", "\x1b[31mred\x1b[0m"]
        self._thread = threading.Thread(target=self._serve, name="fake cluster")
        self._thread.start()
        more = {} if client_limits is None else {"client_limits": client_limits}
        self.dashboard: Dashboard = self.do(
            lambda: Dashboard(f"{own_address()}:0", self.operators, self.loop, self.errors.append, **more)
        )
        self.link = self.dashboard.link
        self.origin, _, self.key = self.link.partition("/?key=")
        host, _, port = self.origin.removeprefix("http://").rpartition(":")
        self.host, self.port = host, int(port)
        self.step(Opened())
        if starts:
            self.join()

    def _serve(self) -> None:
        while not self._is_closed:
            self.loop.next_event(lambda: self.loop.now() if self._is_closed else None)

    def do(self, call: Callable[[], T]) -> T:
        """Call it in the loop's thread and return its result."""
        done: Future[T] = Future()

        def act() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        self.loop.soon(act)
        return done.result(TIMEOUT_S)

    def step(self, *inputs: Any) -> None:
        self.do(lambda: [self.coordinator.step(each) for each in inputs])

    def join(self, *numbers: int) -> None:
        for number in numbers or range(self.nodes):
            node_id = f"id-{number}"
            info = messages.NodeInfo(
                node_id, self.hosts[node_id], self.slots, min_nodes=self._min_nodes, max_nodes=self.nodes, rank=-1
            )
            joined = Received(node_id, messages.NodeJoined(info))
            self.step(joined, Received(node_id, messages.NodeReady(0, "127.0.0.1", 29500)))

    def _deliver(self, message: Send) -> None:
        for node_id in message.to:
            if node_id in self.hosts:
                self.loop.soon(lambda node_id=node_id: self._react(node_id, message.event))  # type: ignore[misc]

    def _react(self, node_id: str, event: Any) -> None:
        if node_id not in self.coordinator.state.nodes:
            return
        match event:
            case events.GenerationFormed(part):
                self.parts[node_id] = part
                number = int(node_id[3:])
                pids = tuple(10_000 + number * 100 + local for local in range(self.slots))
                survivors = min(1, part.generation - 1)  # one on each node
                self.coordinator.step(Received(node_id, messages.WorkersRunning(part.generation, pids, survivors)))
            case events.GenerationEnded(generation):
                self.coordinator.step(Received(node_id, messages.NodeStopped(generation, self.loop.now())))
                self.coordinator.step(Received(node_id, messages.NodeReady(generation, "127.0.0.1", 29500)))
            case events.LeaveRequested(why):
                self.coordinator.step(
                    Received(node_id, messages.NodeDraining(self.coordinator.state.generation, 30.0, why))
                )
                self.coordinator.step(Received(node_id, messages.NodeLeft(why)))

    # --- events -------------------------------------------------------------------------------------------------------

    def fail(self, rank: int, *consequences: int) -> None:
        """Let this worker fail, and then the others as consequences."""
        self.do(lambda: self._fail(rank, *consequences))

    def _fail(self, rank: int, *consequences: int) -> None:
        for each in (rank, *consequences):
            node_id, part = next(
                (node_id, part)
                for node_id, part in self.parts.items()
                if part.first_global_rank <= each < part.first_global_rank + self.slots
            )
            is_first = each == rank
            evidence = Evidence(
                "RuntimeError",
                "RuntimeError: <b>boom</b>" if is_first else "the connection was closed by a peer",
                TRACEBACK if is_first else "",
                cause="exception" if is_first else "peer_lost",
                is_consequence=not is_first,
                log_file=f"/var/log/train/{each}/stderr.log",
            )
            now, local = self.loop.now(), each - part.first_global_rank
            failure = Failure(
                part.generation, local, each, 10_000 + each, 1, now, evidence=evidence, host=self.hosts[node_id]
            )
            self.coordinator.step(Received(node_id, messages.FailureSeen(part.generation, failure, now)))

    def progress(self, step: int, *numbers: int, phase: str = "") -> None:
        self.do(lambda: self._progress(step, numbers or range(self.nodes), phase))

    def _progress(self, step: int, numbers: Iterable[int], phase: str) -> None:
        now = self.loop.now()
        for number in numbers:
            workers = tuple(
                messages.WorkerProgress(local, 0, step - local % 2, now - 0.1, now, phase)
                for local in range(self.slots)
            )
            progress = messages.NodeProgress(self.coordinator.state.generation, now, workers)
            self.coordinator.step(Received(f"id-{number}", progress))

    def fail_repeatedly(self, rounds: int, every_s: float) -> Future[float]:
        """Let workers on changing nodes fail at this interval, with progress in between.

        The result is the maximum delay of the loop, in seconds.
        """
        done: Future[float] = Future()
        late_s = 0.0

        def happen(number: int, due: float) -> None:
            nonlocal late_s
            now = self.loop.now()
            late_s = max(late_s, now - due)
            if number == rounds:
                done.set_result(late_s)
                return
            world_size = self.nodes * self.slots
            self._fail(number * 7 % world_size, *((number * 7 + each) % world_size for each in (1, 9, 17)))
            self.loop.at(now + every_s / 2, lambda: self._progress(number + 1, range(self.nodes), ""))
            self.loop.at(now + every_s, lambda: happen(number + 1, now + every_s))

        self.loop.soon(lambda: happen(0, self.loop.now()))
        return done

    def lose(self, number: int, why: str = "connection closed") -> None:
        self.step(NodeLost(f"id-{number}", why))

    @property
    def status(self) -> RunStatus:
        return self.do(self.operators.wrapped.status)

    def _answer_logs(self, node_id: str, request: LogsRequest, reply: Reply) -> None:
        seen = int(request.cursor or 0)
        if request.wait_s and seen >= len(self.printed):
            self.held.append((request, reply))
            return
        self._reply_with_lines(seen, request, reply)

    def _reply_with_lines(self, seen: int, request: LogsRequest, reply: Reply) -> None:
        generation = self.coordinator.state.generation
        lines = tuple(
            LogLine(1_700_000_000.0, request.local_rank, request.local_rank, "stdout", generation, text)
            for text in self.printed[seen:]
        )
        reply(LogAnswer(lines, str(len(self.printed)), generation), "")

    def print(self, text: str) -> None:
        """Let workers print a line, and answer the requests that wait for it."""

        def happen() -> None:
            self.printed.append(text)
            held, self.held = self.held, []
            for request, reply in held:
                self._reply_with_lines(int(request.cursor), request, reply)

        self.do(happen)

    def close(self) -> None:
        self.do(self.dashboard.close)
        self.do(self.coordinator.close)
        self._is_closed = True
        self.loop.wake()
        self._thread.join(TIMEOUT_S)
        self.loop.close()


class CountingOperatorApi:
    """An operator API that counts watchers and statuses, and measures the CPU time of a status."""

    def __init__(self, wrapped: OperatorApi) -> None:
        self.wrapped = wrapped
        self.watchers = 0
        self.statuses = 0
        self.cpu_s = 0.0
        self.submit = wrapped.submit

    def watch(self, on_step: Callable[[], None]) -> None:
        self.watchers += 1
        self.wrapped.watch(on_step)

    def unwatch(self, on_step: Callable[[], None]) -> None:
        self.watchers -= 1
        self.wrapped.unwatch(on_step)

    def status(self) -> RunStatus:
        import time

        before = time.thread_time()
        status = self.wrapped.status()
        self.cpu_s += time.thread_time() - before
        self.statuses += 1
        return status
