"""The desk: where the lane's workers report, read by a thread of its own.

When a worker of a new generation reports, every older one is looked at in that very moment: whose connection is open
was alive after the new one had begun.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from .history import WorkerLife

_numbers = itertools.count(1)


class Line:
    """One worker's connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.rest = b""
        self.life: WorkerLife | None = None
        self.is_told = False

    def is_open(self) -> bool:
        """Whether the worker's end is, whatever of its words was not read yet."""
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        return not poll.poll(0)


class WorkerHub:
    """``changed`` is notified whenever a worker comes or goes."""

    def __init__(self) -> None:
        self.name = f"tenax-lane-{os.getpid()}-{next(_numbers)}"
        self.changed = threading.Condition(threading.RLock())
        self.lives: list[WorkerLife] = []
        self._lines: dict[int, Line] = {}  # by descriptor
        self._is_finishing = False
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind("\0" + self.name)
        self._door.listen(128)
        self._stop_reader, self._stop_writer = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._selector.register(self._stop_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="desk")
        self._thread.start()

    # --- for the one who plays ----------------------------------------------------------------------------------------

    def alive(self) -> list[WorkerLife]:
        """Workers whose connection is open, as far as we know."""
        with self.changed:
            return [line.life for line in self._lines.values() if line.life is not None and not line.is_told]

    def tell_exit(self, life: WorkerLife, code: int) -> None:
        with self.changed:
            for line in self._lines.values():
                if line.life is life:
                    self._tell(line, code)

    def finish(self) -> None:
        """All workers succeed: those that are here, and those that will come."""
        with self.changed:
            self._is_finishing = True
            for line in self._lines.values():
                self._tell(line, 0)

    def wait_for(self, fact: Callable[[], bool], timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(fact, timeout_s)

    def close(self) -> None:
        os.write(self._stop_writer, b".")
        self._thread.join()
        for line in self._lines.values():
            line.sock.close()
        self._door.close()
        self._selector.close()
        os.close(self._stop_reader)
        os.close(self._stop_writer)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._stop_reader:
                    return
                with self.changed:
                    if key.fd == self._door.fileno():
                        self._accept()
                    else:
                        self._read(self._lines[key.fd])

    def _accept(self) -> None:
        sock, _ = self._door.accept()
        self._lines[sock.fileno()] = Line(sock)
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, line: Line) -> None:
        try:
            data = line.sock.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._forget(line)
            return
        *whole, line.rest = (line.rest + data).split(b"\n")
        if whole and line.life is None:
            self._greet(line, json.loads(whole.pop(0)))
        if whole and line.life is not None:
            line.life.alive_at = max(line.life.alive_at, float(whole[-1]))

    def _greet(self, line: Line, said: dict[str, Any]) -> None:
        line.life = life = WorkerLife(
            agent=said["agent"],
            pid=said["pid"],
            generation=int(said["TENAX_GENERATION"]),
            rank=int(said["RANK"]),
            world_size=int(said["WORLD_SIZE"]),
            store=f"{said['MASTER_ADDR']}:{said['MASTER_PORT']}",
            restarts=int(said["TORCHELASTIC_RESTART_COUNT"]),
            began_at=said["began"],
            alive_at=said["began"],
        )
        self.lives.append(life)
        now = time.monotonic()
        for other in self._lines.values():
            if other.life is not None and other.life.generation < life.generation and other.is_open():
                other.life.alive_at = max(other.life.alive_at, now)
        if self._is_finishing:
            self._tell(line, 0)
        self.changed.notify_all()

    def _tell(self, line: Line, code: int) -> None:
        if line.life is not None and not line.is_told:
            line.is_told = True
            with contextlib.suppress(OSError):
                line.sock.sendall(b"%d\n" % code)

    def _forget(self, line: Line) -> None:
        self._selector.unregister(line.sock)
        del self._lines[line.sock.fileno()]
        line.sock.close()
        if line.life is not None:
            line.life.gone_at = time.monotonic()
        self.changed.notify_all()
