"""Stores whose calls are interrupted by signal handlers that raise an exception, or close the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kit.processes import INTERRUPTS, TIMEOUT_S

pytestmark = pytest.mark.process

_INTERRUPTED = """
import threading
from tenax.store import FileStore, MemoryStore, TCPStore

server = TCPStore("127.0.0.1", 0, is_master=True)
open_store = {
    "TCPStore": lambda: TCPStore("127.0.0.1", server.port, timeout=60),
    "FileStore": lambda: FileStore("store", timeout=60),
    "MemoryStore": MemoryStore(timeout=60).clone,
}[KIND]
store = open_store()

def change():
    store.add("n", 1)
    store.queue_push("q", "v")
    store.queue_pop("q", block=False)

interrupt_often(1000, 0.0004, change)

def read(store):
    return store.get("n"), store.queue_len("q")

seen = []
thread = threading.Thread(target=lambda: seen.append(read(store)))
thread.start()
thread.join()
with open_store() as fresh:
    assert seen == [read(fresh)], (seen, read(fresh))
store.close()
print("closed")
"""

_CLOSED = """
import signal
from tenax.store import StoreConnectionError, TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, timeout=60)
signal.signal(signal.SIGALRM, lambda *_: store.close())
signal.setitimer(signal.ITIMER_REAL, 0.01)
try:
    store.wait(["never"])
except StoreConnectionError:
    print("closed")
"""


def _run(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    return done.stdout


@pytest.mark.parametrize("kind", ["TCPStore", "FileStore", "MemoryStore"])
def test_a_signal_handler_may_raise_at_any_moment_of_a_call(kind: str, tmp_path: Path) -> None:
    """No lock stays locked, and the store is as other clients see it."""
    assert _run(f"KIND = {kind!r}\n{INTERRUPTS}{_INTERRUPTED}", tmp_path) == "closed\n"


def test_a_signal_handler_may_close_the_store_during_a_call(tmp_path: Path) -> None:
    assert _run(_CLOSED, tmp_path) == "closed\n"
