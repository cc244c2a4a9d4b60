"""The hub to which the workers of a lane report, read by a thread.

When a worker of a new generation reports, the connections of all older ones are checked at that moment: a worker whose
connection is open was alive after the new one had started.
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
        self.has_exit_request = False

    def is_open(self) -> bool:
        """Return whether the worker's end is open, even if some of its data was not read yet."""
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        return not poll.poll(0)


class WorkerHub:
    """``changed`` is notified whenever a worker connects or disconnects."""

    def __init__(self) -> None:
        self.name = f"tenax-lane-{os.getpid()}-{next(_numbers)}"
        self.changed = threading.Condition(threading.RLock())
        self.lives: list[WorkerLife] = []
        self._lines: dict[int, Line] = {}  # by descriptor
        self._is_finishing = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + self.name)
        self._listener.listen(128)
        self._stop_reader, self._stop_writer = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stop_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="worker hub")
        self._thread.start()

    # --- for the player -----------------------------------------------------------------------------------------------

    def alive(self) -> list[WorkerLife]:
        """Return the workers with an open connection."""
        with self.changed:
            return [line.life for line in self._lines.values() if line.life is not None and not line.has_exit_request]

    def request_exit(self, life: WorkerLife, code: int) -> None:
        with self.changed:
            for line in self._lines.values():
                if line.life is life:
                    self._request_exit(line, code)

    def finish(self) -> None:
        """Let all workers succeed, including those that connect later."""
        with self.changed:
            self._is_finishing = True
            for line in self._lines.values():
                self._request_exit(line, 0)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(condition, timeout_s)

    def close(self) -> None:
        os.write(self._stop_writer, b".")
        self._thread.join()
        for line in self._lines.values():
            line.sock.close()
        self._listener.close()
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
                    if key.fd == self._listener.fileno():
                        self._accept()
                    else:
                        self._read(self._lines[key.fd])

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        self._lines[sock.fileno()] = Line(sock)
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, line: Line) -> None:
        try:
            data = line.sock.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._remove(line)
            return
        *whole, line.rest = (line.rest + data).split(b"\n")
        if whole and line.life is None:
            self._greet(line, json.loads(whole.pop(0)))
        if whole and line.life is not None:
            line.life.alive_at = max(line.life.alive_at, float(whole[-1]))

    def _greet(self, line: Line, hello: dict[str, Any]) -> None:
        line.life = life = WorkerLife(
            agent=hello["agent"],
            pid=hello["pid"],
            generation=int(hello["TENAX_GENERATION"]),
            rank=int(hello["RANK"]),
            world_size=int(hello["WORLD_SIZE"]),
            store=f"{hello['MASTER_ADDR']}:{hello['MASTER_PORT']}",
            restarts=int(hello["TORCHELASTIC_RESTART_COUNT"]),
            began_at=hello["began"],
            alive_at=hello["began"],
        )
        self.lives.append(life)
        now = time.monotonic()
        for other in self._lines.values():
            if other.life is not None and other.life.generation < life.generation and other.is_open():
                other.life.alive_at = max(other.life.alive_at, now)
        if self._is_finishing:
            self._request_exit(line, 0)
        self.changed.notify_all()

    def _request_exit(self, line: Line, code: int) -> None:
        if line.life is not None and not line.has_exit_request:
            line.has_exit_request = True
            with contextlib.suppress(OSError):
                line.sock.sendall(b"%d\n" % code)

    def _remove(self, line: Line) -> None:
        self._selector.unregister(line.sock)
        del self._lines[line.sock.fileno()]
        line.sock.close()
        if line.life is not None:
            line.life.gone_at = time.monotonic()
        self.changed.notify_all()
