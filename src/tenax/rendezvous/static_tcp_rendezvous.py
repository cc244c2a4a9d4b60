"""The static rendezvous: nodes know their ranks and the address of rank 0 beforehand, and meet in a store there.

    open attempt k -> every rank has claimed its place in attempt k -> its keys are fresh -> the group runs

What always holds: a group consists of every rank, all in the same attempt; no key of an earlier attempt can be read in
a later one; and if one node begins a new attempt, the others learn it from ``num_nodes_waiting()`` and come along.
TorchElastic's keeps one set of keys, and leaves a node that restarts alone.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from tenax._engines.secret import TLS_OPTIONS, check_nothing_is_ignored
from tenax.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from tenax.rendezvous.utils import parse_rendezvous_endpoint

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]

_TIMEOUT_S = 600
_SHORTEST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.5
_ASK_EVERY_S = 1.0
_ASK_LATER_S = 10.0  # after the store did not answer
_ASK_TIMEOUT_S = 5.0
_STORE_ERRORS = (RuntimeError, ValueError, OSError)


class StaticTCPRendezvous(RendezvousHandler):
    """One node of a fixed group. Rank 0 serves the store, for the agents and for their workers."""

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
        self._asking: Any = None  # another handle, which never waits long
        self._asks_again_at = 0.0
        self._latest_heard = 0
        self._id = os.urandom(16).hex()
        self._attempt = 0

    def get_backend(self) -> str:
        return "static"

    def get_run_id(self) -> str:
        return self.run_id

    @property
    def use_agent_store(self) -> bool:
        """Always: the port that workers know is the one that rank 0's agent listens at."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until every rank is in the same new attempt."""
        give_up_at = time.monotonic() + self.timeout.total_seconds()
        try:
            self._connect()
            self._attempt = self._gather(give_up_at)
            store = self._keys_of(self._attempt)
        except _STORE_ERRORS as error:
            raise RendezvousConnectionError(
                f"the store of rank 0 at {self.master_addr}:{self.master_port} cannot be used: {error}"
            ) from error
        where = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(store, self.rank, self.world_size, where)

    def _connect(self) -> None:
        if self._store is None:
            from tenax.store import TCPStore

            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                self.rank == 0,
                self.timeout,
                wait_for_workers=False,
            )
            self._asking = self._store.clone()
            self._asking.set_timeout(timedelta(seconds=_ASK_TIMEOUT_S))

    def _gather(self, give_up_at: float) -> int:
        """The attempt in which everybody is."""
        attempt = self._claim(max(self._attempt + 1, self._latest()))
        pause_s = _SHORTEST_PAUSE_S
        while True:
            latest = self._latest()
            if latest > attempt:  # somebody began a later one: this one would never be complete
                attempt = self._follow(latest)
            keys = self._keys_of(attempt)
            if self.rank == 0 and keys.check(self._places()):
                self._forget_what_is_not_of(attempt)
                keys.set("ready", b"1")
            if keys.check(["ready"]):
                return attempt
            if time.monotonic() >= give_up_at:
                raise RendezvousTimeoutError(self._who_is_missing(attempt))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _claim(self, attempt: int) -> int:
        """Take our place, in this attempt or in the first later one in which it is free, and tell the others."""
        while not self._is_ours(attempt):
            attempt += 1  # there is an earlier start of this node in it, which is dead
        while (latest := self._latest()) < attempt:
            self._store.compare_set(self._latest_key(), str(latest), str(attempt))
        return attempt

    def _follow(self, attempt: int) -> int:
        """Go on to the attempt that somebody else began. Who has our place there came after us, and lives."""
        if not self._is_ours(attempt):
            raise RendezvousStateError(
                f"another node came to the run {self.run_id!r} with the rank {self.rank} of this one; give every node "
                "a rank of its own"
            )
        return attempt

    def _is_ours(self, attempt: int) -> bool:
        """Whether our place is free, and then taken, or was taken by us."""
        holder = self._keys_of(attempt).compare_set(f"rank/{self.rank}", "", self._id)
        return bool(holder == self._id.encode())

    def _places(self) -> list[str]:
        return [f"rank/{rank}" for rank in range(self.world_size)]

    def _latest_key(self) -> str:
        return f"{self.run_id}/attempt"

    def _latest(self) -> int:
        return int(self._store.add(self._latest_key(), 0))

    def _keys_of(self, attempt: int) -> Any:
        from tenax.store import PrefixStore

        return PrefixStore(f"{self.run_id}/{attempt}", self._store)

    def _forget_what_is_not_of(self, attempt: int) -> None:
        """What earlier attempts left in the store, their workers too: all of those have ended, every agent is here."""
        prefix = f"{self.run_id}/"
        for key in self._store.list_keys():
            number = key[len(prefix) :].partition("/")[0] if key.startswith(prefix) else "0"
            if number.isdigit() and int(number) < attempt:
                self._store.delete_key(key)

    def _who_is_missing(self, attempt: int) -> str:
        keys = self._keys_of(attempt)
        missing = [str(rank) for rank in range(self.world_size) if not keys.check([f"rank/{rank}"])]
        who = ", ".join(missing) or "0 (which came, but died)"
        return (
            f"the nodes with the ranks {who} did not come to attempt {attempt} "
            f"of the run {self.run_id!r} within {self.timeout.total_seconds():g} s; start them with this endpoint"
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """A fixed group has no door."""

    def num_nodes_waiting(self) -> int:
        """1 if other nodes are in a later attempt than ours. Without a connection nobody can be: 0."""
        if self._asking is None or self._attempt == 0:
            return 0
        now = time.monotonic()
        if now >= self._asks_again_at:
            self._asks_again_at = now + _ASK_EVERY_S
            try:
                self._latest_heard = int(self._asking.add(self._latest_key(), 0))
            except _STORE_ERRORS:  # healthy workers need not end because the store of the agents is gone
                self._asks_again_at = time.monotonic() + _ASK_LATER_S
        return int(self._latest_heard > self._attempt)

    def shutdown(self) -> bool:
        for store in (self._asking, self._store):
            if store is not None:
                store.close()
        self._asking = self._store = None
        return True


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """From parameters: the endpoint is rank 0's host:port, ``rank`` is this node's, ``timeout`` is in seconds (600)."""
    check_nothing_is_ignored(
        params, TLS_OPTIONS, "the nodes of StaticTCPRendezvous meet in a store, which has neither a secret nor TLS"
    )
    rank = params.get_as_int("rank")
    if rank is None:
        raise ValueError("the static rendezvous does not know the rank of this node; give it with --node-rank")
    endpoint = params.endpoint.strip()
    if not endpoint:
        raise ValueError("the static rendezvous has no endpoint; give it with --master-addr and --master-port")
    host, port = parse_rendezvous_endpoint(endpoint, -1)
    if port == -1:
        raise ValueError(f"the endpoint {endpoint!r} of the static rendezvous has no port; give it with --master-port")
    timeout_s = params.get_as_int("timeout", _TIMEOUT_S)
    if timeout_s is None or timeout_s <= 0:
        raise ValueError(f"the timeout of the static rendezvous is {timeout_s}; expected a positive number of seconds")
    return StaticTCPRendezvous(host, port, rank, params.max_nodes, params.run_id, timeout_s)
