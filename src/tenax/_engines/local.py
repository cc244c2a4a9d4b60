"""The local engine: a run of one node, with the coordinator in the agent's own process.

Each generation has its own store on its own port, so keys of an older generation cannot be read.
"""

from __future__ import annotations

import os

from tenax._core.coordinator import CancelRequested, Opened, Received, RunSettings
from tenax._core.events import GenerationFormed, JoinRefused
from tenax._core.messages import NodeInfo, NodeJoined, NodeReady
from tenax._engines.coordinator_host import CoordinatorHost
from tenax._engines.store_address import StoreAddress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.coordinator import Send
    from tenax._core.messages import FromNode
    from tenax._core.requests import AnyRequest, OfNode
    from tenax._engines.operator_api import OperatorApi
    from tenax._io.interfaces import ControlledNode, Emit, EventLoop, Reply

_NODE_ID = "local"
LOOPBACK = "127.0.0.1"


class LocalEngine:
    """Implements ``interfaces.Control``. Without a ``store_address`` the workers get no store."""

    def __init__(self, run_id: str, store_address: StoreAddress | None = None) -> None:
        self.run_id = run_id
        self._store_address = store_address
        self._emit: Emit = lambda _: None
        self._loop: EventLoop | None = None  # None: not open
        self._coordinator: CoordinatorHost
        self._operator_api: OperatorApi | None = None
        self._answer: Callable[[OfNode, Reply], None]

    def open(self, loop: EventLoop, emit: Emit, node: ControlledNode) -> None:
        settings = node.settings
        self._emit, self._loop = emit, loop
        if self._store_address is not None:
            self._store_address.open(loop, node.print_line)
        run = RunSettings(
            self.run_id,
            max_restarts=settings.max_restarts,
            serving_node=_NODE_ID,
            on_hang=settings.on_hang,
            hang_after_s=settings.hang_after_s,
        )
        self._coordinator = CoordinatorHost(run, node.policy, loop, self._deliver, node.record_run(run))
        self._answer = node.answer
        node.set_operator_api(self.operator_api)
        info = NodeInfo(_NODE_ID, os.uname().nodename, settings.local_world_size, settings.role)
        self._coordinator.step(Opened())
        self._coordinator.step(Received(info.node_id, NodeJoined(info)))

    def send(self, message: FromNode) -> None:
        if isinstance(message, NodeReady) and self._store_address is not None:
            try:
                message = self._store_address.offer(message)
            except OSError as error:
                self._emit(JoinRefused(self._store_address.why_not(error)))
                return
        self._coordinator.step(Received(_NODE_ID, message))

    def _deliver(self, send: Send) -> None:
        if isinstance(send.event, GenerationFormed) and self._store_address is not None:
            self._store_address.serve(send.event.assignment)
        self._emit(send.event)

    def cancel(self, why: str) -> None:
        if self._loop is not None:
            self._loop.soon(lambda: self._coordinator.step(CancelRequested(why)))

    def operator_api(self) -> OperatorApi:
        if self._operator_api is None:
            from tenax._engines.operator_api import OperatorApi

            assert self._loop is not None, "opened before"
            self._operator_api = OperatorApi(
                self._coordinator, self._loop, lambda _, request, reply: self._answer(request, reply)
            )
        return self._operator_api

    def submit(self, request: AnyRequest, reply: Reply) -> None:
        self.operator_api().submit(request, reply)

    @property
    def where(self) -> str:
        return ""

    def stays_for_others(self) -> bool:
        return False

    def close(self) -> None:
        if self._operator_api is not None:
            self._operator_api.close()
        if self._loop is not None:
            self._coordinator.close()
        self._loop = None
        if self._store_address is not None:
            self._store_address.close()
