"""The static rendezvous: ranks and the address of rank 0 are known beforehand, and nodes meet in a store there.

    open attempt k -> every rank has claimed its slot in attempt k -> its keys are fresh -> the group runs

Invariants: a group consists of every rank, all in the same attempt; no key of an earlier attempt can be read in a later
one; and if one node begins a new attempt, the others see it in ``num_nodes_waiting()`` and follow. TorchElastic's
keeps one set of keys, and leaves a node that restarts alone.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from tenax._core.text import format_seconds
from tenax._engines.secret import TLS_OPTIONS, refuse_unused_options
from tenax.rendezvous._options import whole_seconds
from tenax.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from tenax.rendezvous.utils import STORE_ERRORS, parse_rendezvous_endpoint
from tenax.store import PrefixStore, TCPStore

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]

_TIMEOUT_S = 600
_MIN_PAUSE_S = 0.005
_MAX_PAUSE_S = 0.5
_POLL_EVERY_S = 1.0
_POLL_LATER_S = 10.0  # after the store has failed to answer
_POLL_TIMEOUT_S = 5.0


class StaticTCPRendezvous(RendezvousHandler):
    """One node of a fixed group. Rank 0 serves the store for the agents and their workers."""

    def __init__(
        self, master_addr: str, master_port: int, rank: int, world_size: int, run_id: str, timeout: int
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"the rank of this node is {rank}; expected one from 0 to {world_size - 1}")
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout = timedelta(seconds=timeout)
        self._store: Any = None
        self._polling_store: Any = None  # a second connection, with a short timeout
        self._polls_at = 0.0
        self._latest_polled = 0
        self._id = os.urandom(16).hex()
        self._latest_key = f"{run_id}/attempt"
        self._attempt = 0

    def get_backend(self) -> str:
        return "static"

    def get_run_id(self) -> str:
        return self.run_id

    @property
    def use_agent_store(self) -> bool:
        """Always True: the port given to the workers is the one on which rank 0's agent listens."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until every rank is in the same new attempt."""
        give_up_at = time.monotonic() + self.timeout.total_seconds()
        try:
            self._connect()
            self._attempt = self._gather(give_up_at)
            store = self._keys_of(self._attempt)
        except STORE_ERRORS as error:
            raise RendezvousConnectionError(
                f"cannot use the store of rank 0 at {self.master_addr}:{self.master_port}: {error}"
            ) from error
        where = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(store, self.rank, self.world_size, where)

    def _connect(self) -> None:
        if self._store is None:
            address = (self.master_addr, self.master_port)
            self._store = TCPStore(*address, self.world_size, self.rank == 0, self.timeout, wait_for_workers=False)
            self._polling_store = self._store.clone()
            self._polling_store.set_timeout(timedelta(seconds=_POLL_TIMEOUT_S))

    def _gather(self, give_up_at: float) -> int:
        """Return the attempt that all ranks have joined."""
        attempt = self._claim(max(self._attempt + 1, self._latest()))
        pause_s = _MIN_PAUSE_S
        while True:
            latest = self._latest()
            if latest > attempt:  # another node began a later one, so this one would never be complete
                attempt = latest
                if not self._claim_slot(attempt):  # the node with this rank in it started later, and is alive
                    raise RendezvousStateError(
                        f"another node joined the run {self.run_id!r} with rank {self.rank}, which is the rank of this "
                        "node; give every node its own rank"
                    )
            keys = self._keys_of(attempt)
            if self.rank == 0 and keys.check([f"rank/{rank}" for rank in range(self.world_size)]):
                self._delete_earlier_keys(attempt)
                keys.set("ready", b"1")
            if keys.check(["ready"]):
                return attempt
            if time.monotonic() >= give_up_at:
                raise RendezvousTimeoutError(self._missing_message(attempt))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _claim(self, attempt: int) -> int:
        """Claim this rank's slot in the first attempt, from this one on, in which it is free, and publish it."""
        while not self._claim_slot(attempt):
            attempt += 1  # taken by an earlier start of this node, which is dead
        while (latest := self._latest()) < attempt:
            self._store.compare_set(self._latest_key, str(latest), str(attempt))
        return attempt

    def _claim_slot(self, attempt: int) -> bool:
        """Claim this rank's slot. Return whether this node holds it."""
        return self._keys_of(attempt).compare_set(f"rank/{self.rank}", "", self._id) == self._id.encode()

    def _latest(self) -> int:
        return int(self._store.add(self._latest_key, 0))

    def _keys_of(self, attempt: int) -> PrefixStore:
        return PrefixStore(f"{self.run_id}/{attempt}", self._store)

    def _delete_earlier_keys(self, attempt: int) -> None:
        """Delete the keys of earlier attempts. Every agent has joined, so their workers have ended."""
        prefix = f"{self.run_id}/"
        for key in self._store.list_keys():
            number = key[len(prefix) :].partition("/")[0] if key.startswith(prefix) else "0"
            if number.isdigit() and int(number) < attempt:
                self._store.delete_key(key)

    def _missing_message(self, attempt: int) -> str:
        keys = self._keys_of(attempt)
        missing = [str(rank) for rank in range(self.world_size) if not keys.check([f"rank/{rank}"])]
        who = ", ".join(missing) or "0 (it joined, then died)"
        return (
            f"nodes with these ranks did not join attempt {attempt} of the run {self.run_id!r} within "
            f"{format_seconds(self.timeout.total_seconds())}: {who}; start them with this endpoint"
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: a fixed group cannot be closed."""

    def num_nodes_waiting(self) -> int:
        """Return 1 if other nodes are in a later attempt, else 0; 0 without a connection."""
        if self._polling_store is None or self._attempt == 0:
            return 0
        now = time.monotonic()
        if now >= self._polls_at:
            self._polls_at = now + _POLL_EVERY_S
            try:
                self._latest_polled = int(self._polling_store.add(self._latest_key, 0))
            except STORE_ERRORS:  # losing the agents' store must not stop healthy workers
                self._polls_at = time.monotonic() + _POLL_LATER_S
        return int(self._latest_polled > self._attempt)

    def shutdown(self) -> bool:
        for store in (self._polling_store, self._store):
            if store is not None:
                store.close()
        self._polling_store = self._store = None
        return True


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create a handler. The endpoint is rank 0's ``host:port``; ``timeout`` is in seconds (600)."""
    refuse_unused_options(params, TLS_OPTIONS, "StaticTCPRendezvous uses a store without a secret and without TLS")
    rank = params.get_as_int("rank")
    if rank is None:
        raise ValueError("the static rendezvous needs the rank of this node; set --node-rank")
    endpoint = params.endpoint.strip()
    if not endpoint:
        raise ValueError("the static rendezvous needs an endpoint; set --master-addr and --master-port")
    host, port = parse_rendezvous_endpoint(endpoint, -1)
    if port == -1:
        raise ValueError(f"the endpoint {endpoint!r} of the static rendezvous has no port; set --master-port")
    timeout_s = whole_seconds(params, "timeout", _TIMEOUT_S)
    return StaticTCPRendezvous(host, port, rank, params.max_nodes, params.run_id, timeout_s)
