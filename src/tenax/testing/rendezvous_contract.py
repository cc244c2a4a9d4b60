"""The contract of a rendezvous handler: what agents rely on, as tests for any handler.

Subclass it in a test module, and pytest runs it::

    from tenax.testing.rendezvous_contract import RendezvousHandlerContract

    class TestMine(RendezvousHandlerContract):
        def make_handler(self, run_id, min_nodes, max_nodes, join_timeout_s=60, last_call_s=0.1):
            return MyHandler(...)

Every call of ``make_handler`` is another node. Nodes with the same run id form a group; each runs in its own thread. A
handler is shut down at the end of its test.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from tenax._core.text import format_seconds
from tenax.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax.rendezvous.api import RendezvousHandler

__all__ = ["BlockingCall", "RendezvousHandlerContract", "wait_until"]

_LIMIT_S = 60.0  # for operations that take milliseconds on an idle machine
_POLL_EVERY_S = 0.02


class BlockingCall:
    """A blocking call in its own thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        """Return the call's result, or raise its exception."""
        assert self.has_ended_within(_LIMIT_S), f"the call did not return within {format_seconds(_LIMIT_S)}"
        if self._error is not None:
            raise self._error
        return self._value

    def error(self) -> BaseException | None:
        assert self.has_ended_within(_LIMIT_S), f"the call did not return within {format_seconds(_LIMIT_S)}"
        return self._error

    def has_ended_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


def wait_until(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Poll until the condition holds: handlers provide nothing to wait for."""
    give_up_at = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_at, f"{what} did not happen within {format_seconds(_LIMIT_S)}"
        threading.Event().wait(_POLL_EVERY_S)


def _as_info(answer: Any) -> RendezvousInfo:
    if isinstance(answer, tuple):
        store, rank, world_size = answer
        return RendezvousInfo(store, rank, world_size, None)
    assert isinstance(answer, RendezvousInfo), f"next_rendezvous() returned {answer!r}; expected a RendezvousInfo"
    return answer


def _store_addresses(infos: list[RendezvousInfo]) -> set[tuple[str, int] | None]:
    """Return the addresses of the workers' store that members got; None: the agents agree on it themselves."""
    stores = [info.bootstrap_store_info for info in infos]
    assert all(each is None or isinstance(each, RendezvousStoreInfo) for each in stores)
    return {None if each is None else (each.master_addr, each.master_port) for each in stores}


class RendezvousHandlerContract:
    """The tests. A subclass provides ``make_handler``."""

    def make_handler(
        self,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        join_timeout_s: float = _LIMIT_S,
        last_call_s: float = 0.1,
    ) -> RendezvousHandler:
        """Return the handler of one more node.

        ``join_timeout_s``: how long it waits for a group. ``last_call_s``: how long a group with the minimum number of
        nodes waits for more.
        """
        raise NotImplementedError

    # --- helpers ------------------------------------------------------------------------------------------------------

    def setup_method(self) -> None:
        self._run_id = f"run-{os.urandom(4).hex()}"
        self._handlers: list[RendezvousHandler] = []

    def teardown_method(self) -> None:
        for handler in self._handlers:
            handler.shutdown()
        self._handlers = []

    def node(self, min_nodes: int, max_nodes: int, **options: float) -> RendezvousHandler:
        """Return the handler of one more node of this test's run."""
        handler = self.make_handler(self._run_id, min_nodes, max_nodes, **options)
        self._handlers.append(handler)
        return handler

    def nodes(self, count: int, min_nodes: int, max_nodes: int) -> list[RendezvousHandler]:
        return [self.node(min_nodes, max_nodes) for _ in range(count)]

    def join(self, handler: RendezvousHandler) -> BlockingCall:
        """Join in a new thread. The older form of the result, (store, rank, world size), is accepted too."""
        return BlockingCall(lambda: _as_info(handler.next_rendezvous()))

    def meet(self, handlers: list[RendezvousHandler]) -> list[RendezvousInfo]:
        """Join with all handlers at the same time; return their results."""
        calls = [self.join(handler) for handler in handlers]
        return [call.result() for call in calls]

    # --- tests --------------------------------------------------------------------------------------------------------

    def test_it_has_the_names_of_its_backend_and_run(self) -> None:
        handler = self.node(1, 1)
        assert handler.get_run_id() == self._run_id
        assert isinstance(handler.get_backend(), str), "get_backend() must return the name it is registered under"

    def test_a_group_forms(self) -> None:
        """Ranks are 0 to n-1, each once; all members get the same world size and address of the workers' store."""
        infos = self.meet(self.nodes(3, 3, 3))
        assert sorted(info.rank for info in infos) == [0, 1, 2]
        assert {info.world_size for info in infos} == {3}
        assert len(_store_addresses(infos)) == 1

    def test_a_group_shares_a_store(self) -> None:
        """A member that waits for a key gets the value that another member sets."""
        first, second = self.meet(self.nodes(2, 2, 2))
        getting = BlockingCall(lambda: second.store.get("colour"))
        first.store.set("colour", b"blue")
        assert getting.result() == b"blue"

    def test_a_group_below_the_maximum_forms_too(self) -> None:
        infos = self.meet(self.nodes(2, 2, 4))
        assert sorted(info.rank for info in infos) == [0, 1]
        assert {info.world_size for info in infos} == {2}

    def test_a_late_node_is_counted_and_admitted(self) -> None:
        """A waiting node is counted; when the group forms again it is a member, and no node waits."""
        first = self.node(1, 2)
        assert self.join(first).result().world_size == 1
        assert first.num_nodes_waiting() == 0
        late = self.join(self.node(1, 2))
        wait_until(lambda: first.num_nodes_waiting() > 0, "num_nodes_waiting() > 0")
        infos = [self.join(first).result(), late.result()]
        assert sorted(info.rank for info in infos) == [0, 1]
        assert {info.world_size for info in infos} == {2}
        wait_until(lambda: first.num_nodes_waiting() == 0, "num_nodes_waiting() == 0")

    def test_a_group_that_forms_again_has_fresh_keys(self) -> None:
        """No key of the last round can be read in the next one, and the store's address is published again."""
        handlers = self.nodes(2, 2, 2)
        for info in self.meet(handlers):
            info.store.set(f"from-{info.rank}", b"old")
        infos = self.meet(handlers)
        assert not any(info.store.check([f"from-{rank}"]) for info in infos for rank in (0, 1))
        assert len(_store_addresses(infos)) == 1

    def test_members_keep_their_ranks(self) -> None:
        handlers = self.nodes(3, 3, 3)
        before = [info.rank for info in self.meet(handlers)]
        assert [info.rank for info in self.meet(handlers)] == before

    def test_a_member_that_joins_again_is_seen_by_the_others(self) -> None:
        """Its workers failed: num_nodes_waiting() shows this to the others, and all form a group again."""
        one, other = self.nodes(2, 2, 2)
        self.meet([one, other])
        again = self.join(one)
        wait_until(lambda: other.num_nodes_waiting() > 0, "num_nodes_waiting() > 0")
        assert {self.join(other).result().rank, again.result().rank} == {0, 1}

    def test_a_closed_run_refuses(self) -> None:
        """A closed run refuses both waiting and new nodes."""
        waiting = self.join(self.node(2, 2))
        operator = self.node(2, 2)
        assert not operator.is_closed()
        operator.set_closed()
        wait_until(operator.is_closed, "is_closed()")
        assert isinstance(waiting.error(), RendezvousClosedError)
        assert isinstance(self.join(self.node(2, 2)).error(), RendezvousClosedError)

    def test_a_node_beyond_the_maximum_waits_without_an_error(self) -> None:
        """A spare waits beyond its join timeout, until the run ends, and does not affect the group."""
        handlers = self.nodes(2, 2, 2)
        self.meet(handlers)
        spare = self.join(self.node(2, 2, join_timeout_s=0.2))
        assert not spare.has_ended_within(1.0), f"it should wait, but: {spare.error()!r}"
        assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]
        infos = self.meet(handlers)
        assert sorted(info.rank for info in infos) == [0, 1]
        assert not spare.has_ended_within(0.1), f"it should wait, but: {spare.error()!r}"
        handlers[0].set_closed()
        assert isinstance(spare.error(), (RendezvousGracefulExitError, RendezvousClosedError))

    def test_a_spare_replaces_a_member_that_left(self) -> None:
        """After a member leaves, the remaining members and the spare form the next group."""
        stays, leaves = self.nodes(2, 2, 2)
        self.meet([stays, leaves])
        spare = self.join(self.node(2, 2))
        self.leave(leaves)
        wait_until(lambda: stays.num_nodes_waiting() > 0, "num_nodes_waiting() > 0")
        infos = [self.join(stays).result(), spare.result()]
        assert sorted(info.rank for info in infos) == [0, 1]

    def leave(self, handler: RendezvousHandler) -> None:
        """End this node as a signal would: the run continues without it. Override it if your handler has a method.

        (``shutdown()`` recognizes this case by the exception being handled.)
        """
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            handler.shutdown()

    def test_a_group_that_does_not_form_in_time_is_a_timeout(self) -> None:
        alone = self.join(self.node(2, 2, join_timeout_s=0.3))
        assert isinstance(alone.error(), RendezvousTimeoutError)
