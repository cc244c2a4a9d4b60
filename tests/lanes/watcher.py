"""The watcher: a thread that follows the keys of a run in etcd and keeps every state of the record.

It receives each change once and in order, however often etcd is down (``tenax._io.etcd.subscription``).
"""

from __future__ import annotations

import threading
import time

import msgspec

from tenax._core.etcd.errors import EtcdError
from tenax._core.etcd.operations import Change, KeyValue, RangeAnswer, prefix_end
from tenax._core.leadership.keys import Keys, Written, read_leader
from tenax._io.etcd.client import EtcdClient
from tenax._io.etcd.settings import EtcdSettings
from tenax._io.etcd.subscription import Subscription
from tenax._io.loop import Loop

from .history import Recorded


class Watcher:
    """``records`` grows while it runs. ``leader``: the address of the current or last leader."""

    def __init__(self, settings: EtcdSettings, run_id: str) -> None:
        self.records: list[Recorded] = []
        self.leaders: list[tuple[float, str]] = []  # when a leader was seen; "": none
        self.leader = ""
        self.changed = threading.Condition()
        self.begun = 0  # number of full reads: one, unless etcd loses data
        self._settings = settings
        self._keys = Keys(run_id)
        self._loop = Loop()
        self._is_over = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="watcher")
        self._thread.start()

    def verdict(self) -> str:
        """Return the recorded outcome; empty before."""
        for each in self.records:
            if each.record is not None and each.record.verdict is not None:
                return str(each.record.verdict.outcome.value)
        return ""

    def wait_for_verdict(self, timeout_s: float) -> str:
        with self.changed:
            self.changed.wait_for(self.verdict, timeout_s)
        return self.verdict()

    def close(self) -> None:
        self._is_over = True
        self._loop.wake()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        client = EtcdClient(self._loop, self._settings)
        root = self._keys.leader.rpartition(b"/")[0] + b"/"
        following = Subscription(client, root, prefix_end(root), self._on_begun, self._on_changed, self._on_trouble)
        try:
            following.start()
            self._loop.next_event(lambda: 0.0 if self._is_over else None)
        except BaseException as error:  # raised by ``close``
            self._failure = error
        finally:
            following.close()
            client.close()
            self._loop.close()

    def _on_begun(self, answer: RangeAnswer) -> None:
        with self.changed:
            self.begun += 1
            for kv in answer.kvs:
                self._take(kv, exists=True)
            self.changed.notify_all()

    def _on_changed(self, changes: list[Change]) -> None:
        with self.changed:
            for change in changes:
                self._take(change.kv, exists=change.kind == "put")
            self.changed.notify_all()

    def _take(self, kv: KeyValue, *, exists: bool) -> None:
        now = time.monotonic()
        if kv.key == self._keys.record:
            written = msgspec.json.decode(kv.value, type=Written) if exists else None
            record, by = (written.record, written.by.addr) if written is not None else (None, "")
            self.records.append(Recorded(now, kv.mod_revision, record, by))
        elif kv.key == self._keys.leader:
            self.leader = read_leader(kv).address.addr if exists else self.leader
            self.leaders.append((now, self.leader if exists else ""))

    def _on_trouble(self, error: EtcdError) -> None:
        """etcd is down, as planned."""
