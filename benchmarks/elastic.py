"""Elastic: TorchElastic's dynamic rendezvous handlers over its own TCPStore, many in a few processes.

Each handler has a thread that does what its agent does: `next_rendezvous`, then, every 0.1 s (the agent's default
monitor interval), `num_nodes_waiting`; when a node waits, or when its own worker has failed, `next_rendezvous` again.
The store's server has a process of its own. torch is imported in these processes only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from benchmarks.crew import Crew, CrewFailed, many_descriptors, shares

MONITOR_S = 0.1


class Elastic:
    """A store and processes with handlers."""

    def __init__(self, processes: int) -> None:
        self._stack = contextlib.ExitStack()
        self._processes = processes

    def __enter__(self) -> Elastic:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(Crew(serve, [()]))
            members = Crew(work, [()] * self._processes)
            self._crew = stack.enter_context(members)
            (self._port,) = server.receive(60)
            self._crew.receive(60)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def join(self, run_id: str, number: int, bound_s: float) -> float:
        """Let that many new handlers join a run at once. Return how long it took until the last had joined."""
        self._crew.send_each(
            [("make", self._port, run_id, size, number, bound_s) for size in shares(number, self._processes)]
        )
        self._crew.receive(60)
        self._crew.send("join")
        began = self._crew.receive(bound_s)
        ended = self._crew.receive(bound_s)
        return float(max(at for _, at in ended) - min(at for _, at in began))

    def fail(self, bound_s: float) -> tuple[float, float, float]:
        """Fail a worker of one handler's node. Return when, when the last node knew, and when the last had rejoined."""
        last = len(self._crew) - 1
        self._crew.send("fail", only=[last])
        ((_, failed_at),) = self._crew.receive(bound_s, only=[last])
        knew, joined = self._crew.receive(bound_s), self._crew.receive(bound_s)
        if {what for what, _ in knew} != {"knew"} or {what for what, _ in joined} != {"joined"}:
            raise CrewFailed(f"an answer out of order: {knew}, {joined}")
        return failed_at, max(at for _, at in knew), max(at for _, at in joined)


def serve(pipe: Connection) -> None:
    """Run the store. Replies with its port."""
    many_descriptors()
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


class Round:
    """A state that the handlers of this process reach together, reported when the last of them has."""

    def __init__(self, pipe: Connection, what: str, number: int) -> None:
        self._pipe, self._what, self._number = pipe, what, number
        self._lock = threading.Lock()
        self._left = number

    def reached(self) -> None:
        """Count one more."""
        at = time.monotonic()
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._left = self._number
                self._pipe.send((self._what, at))


class Member:
    """One handler and the thread that acts as its agent."""

    def __init__(self, handler: Any, knew: Round, joined: Round) -> None:
        self.handler = handler
        self.has_failed = threading.Event()
        self.is_over = threading.Event()
        self._knew, self._joined = knew, joined
        self.thread = threading.Thread(target=self._live, daemon=True)

    def _live(self) -> None:
        self.handler.next_rendezvous()
        self._joined.reached()
        while not self.is_over.wait(MONITOR_S):
            if self.has_failed.is_set() or self.handler.num_nodes_waiting() > 0:
                self.has_failed.clear()
                self._knew.reached()
                self.handler.next_rendezvous()
                self._joined.reached()

    def end(self) -> None:
        """End its run: no more polling."""
        self.is_over.set()
        self.thread.join()
        self.handler.shutdown()


def work(pipe: Connection) -> None:
    """Run handlers, of one run after the other."""
    many_descriptors()
    import logging
    import os

    logging.disable(logging.CRITICAL)
    # The handlers share an existing store: creating a second one, on rank 0, is not part of joining.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

    dynamic.RendezvousStoreInfo.build = staticmethod(lambda *_, **__: None)
    pipe.send("ready")
    members: Sequence[Member] = ()
    while True:
        match pipe.recv():
            case ("make", port, run_id, number, world, limit_s):
                for member in members:
                    member.end()
                knew, joined = Round(pipe, "knew", number), Round(pipe, "joined", number)
                members = [Member(_handler(port, run_id, world, limit_s), knew, joined) for _ in range(number)]
                pipe.send("made")
            case ("join",):
                pipe.send(("began", time.monotonic()))
                for member in members:
                    member.thread.start()
            case ("fail",):
                members[0].has_failed.set()
                pipe.send(("failed", time.monotonic()))


def _handler(port: int, run_id: str, world: int, limit_s: float) -> Any:
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    backend = C10dRendezvousBackend(store, run_id)
    timeout = dynamic.RendezvousTimeout(join=timedelta(seconds=4 * limit_s))
    return dynamic.DynamicRendezvousHandler.from_backend(run_id, store, backend, world, world, "127.0.0.1", timeout)
