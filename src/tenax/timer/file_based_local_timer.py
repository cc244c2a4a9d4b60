"""Timers through a named pipe, for any process of the host that may write to it.

One JSON line per request, in TorchElastic's format: its clients work with tenax, and tenax's client with its server. A
line is written atomically (``PIPE_BUF``), so requests of several processes never mix.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal as signals
import time
from collections.abc import Callable
from contextlib import suppress

from tenax._core.watchdog import RequestLines
from tenax.timer.api import TimerClient, TimerRequest, TimerTable, WatchdogThread, signal_worker
from tenax.timer.debug_info_logging import log_debug_info_for_expired_timers

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

logger = logging.getLogger(__name__)

# Opening the other end of a pipe causes no event, so a client that is too early retries.
_TRIES, _PAUSE_S = 10, 0.1
_READ_BYTES = 1 << 16  # a pipe holds no more


class FileTimerRequest(TimerRequest):
    """A request with the signal that ends the process; 0 or less: only log that the timer expired."""

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        super().__init__(worker_pid, scope_id, expiration_time)
        self.version = 1
        self.signal = signal

    @property
    def worker_pid(self) -> int:
        return int(self.worker_id)

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": self.version,
                "pid": self.worker_pid,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": self.signal,
            }
        )


class FileTimerClient(TimerClient):
    """Sends requests of this process into the pipe at ``file_path``.

    ``signal``: ends this process when a timer expires.
    """

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        self._file_path = file_path
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._send_request(FileTimerRequest(os.getpid(), scope_id, expiration_time, int(self.signal)))

    def release(self, scope_id: str) -> None:
        self._send_request(FileTimerRequest(os.getpid(), scope_id, -1, 0))

    def _send_request(self, request: FileTimerRequest) -> None:
        line = request.to_json().encode() + b"\n"
        if len(line) > select.PIPE_BUF:
            raise RuntimeError(
                f"the timer request has {len(line)} bytes, and only {select.PIPE_BUF} can be written atomically; "
                f"shorten the name of the scope {request.scope_id[:50]!r}..."
            )
        descriptor = self._open()
        try:
            _write_blocking(descriptor, line)
        except BrokenPipeError as error:
            raise BrokenPipeError(
                f"could not send the timer request: no process reads from {self._file_path!r}"
            ) from error
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        """Open the pipe without blocking; retry for a second, for a server that is just starting.

        An agent's pipe has its reader before the first worker runs. For other servers there is no event when a pipe
        gets a reader, except a blocking open that may never return: so this retries, like TorchElastic's client.
        """
        attempts = 0
        while True:
            attempts += 1
            try:
                return os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if attempts == _TRIES:
                    raise BrokenPipeError(
                        f"could not send the timer request: no timer server at {self._file_path!r} ({error.strerror}); "
                        "set TORCHELASTIC_ENABLE_FILE_TIMER=1 for the agent, or start a timer server"
                    ) from error
            time.sleep(_PAUSE_S)


def _write_blocking(descriptor: int, line: bytes) -> None:
    """Write the line, however long the reader takes: a lost release would end a healthy process.

    Raises BrokenPipeError when there is no reader. Loops, because other writers may fill the pipe meanwhile.
    """
    while True:
        try:
            os.write(descriptor, line)
            return
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()  # also returns when the last reader goes


class FileTimerServer(TimerTable[FileTimerRequest], WatchdogThread):
    """Watches the pipe in a thread and ends processes whose timers expire, with the signal of the request.

    The constructor creates the pipe at ``file_path``, and ``stop`` removes it. ``run_id``: for the log.
    ``max_interval``: the maximum time between updates of the last progress time. ``daemon``: whether the program may
    exit while the thread runs. ``log_event``: called with the name of each event and its request, or None. It never
    signals its own process.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        TimerTable.__init__(self)
        WatchdogThread.__init__(self, max_interval, daemon)
        self._file_path = file_path
        self._run_id = run_id
        self._log_event = log_event if log_event is not None else lambda *_: None
        self._lines = RequestLines()
        self._request_count = 0
        self._last_progress_time = int(time.time())
        self._is_client_started = False
        self._pipe = self._writer = -1
        with suppress(FileNotFoundError):
            os.remove(file_path)
        os.mkfifo(file_path, 0o600)

    def start(self) -> None:
        if self._watchdog_thread is None:
            self._pipe = os.open(self._file_path, os.O_RDONLY | os.O_NONBLOCK)
            # So that the pipe does not end with a client.
            self._writer = os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK)
        super().start()
        self._report("watchdog started", None)

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self.run_once()
        self._report("watchdog stopped", None)

    def run_once(self) -> None:
        """Handle all pending requests, and stop."""
        super().stop()
        for descriptor in (self._pipe, self._writer):
            if descriptor >= 0:
                os.close(descriptor)
        self._pipe = self._writer = -1
        with suppress(FileNotFoundError):
            os.remove(self._file_path)

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Return whether the process exists and can be signalled."""
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True

    def get_last_progress_time(self) -> int:
        """Return when this server last checked its timers, in epoch seconds; now, before the first client."""
        return self._last_progress_time if self._is_client_started else int(time.time())

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        super().register_timers(timer_requests)
        self._request_count += len(timer_requests)

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Remove the timers of these processes, and of those that have exited."""
        for key in list(self._timers):
            if key[0] in worker_pids or not self.is_process_running(key[0]):
                del self._timers[key]

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _watchdog_loop(self) -> None:
        super()._watchdog_loop()
        self._run_watchdog()  # pending requests count

    def _run_watchdog(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        poll.register(self._wake_reader, select.POLLIN)
        if poll.poll(self._timeout_s() * 1000):
            self._read()
        expired = self.get_expired_timers(time.time())
        if expired:
            as_json = {pid: [request.to_json() for request in requests] for pid, requests in expired.items()}
            log_debug_info_for_expired_timers(self._run_id, as_json)
            self._reap_expired(expired)
        self._last_progress_time = int(time.time())

    def _read(self) -> None:
        try:
            data = os.read(self._pipe, _READ_BYTES)
        except BlockingIOError:
            return
        self._is_client_started = True
        malformed = self._lines.malformed
        requests = [
            FileTimerRequest(each.pid, each.scope_id, each.expiration_time, each.signal)
            for each in self._lines.feed(data)
        ]
        if self._lines.malformed > malformed:
            logger.warning("ignored %d lines that are not timer requests", self._lines.malformed - malformed)
        self.register_timers(requests)

    def _reap_expired(self, expired: dict[int, list[FileTimerRequest]]) -> None:
        """Reap each process; retry the others in the next round."""
        done = set()
        for pid, requests in expired.items():
            reason = self._reason(requests)
            if pid == os.getpid():
                logger.error("a timer of the timer server's own process expired; it is not killed")
            elif reason is not None:
                if not signal_worker(pid, reason.signal):
                    continue
                self._report("kill worker process", reason)
            done.add(pid)
        self._unreaped = expired.keys() - done
        self.clear_timers(done)

    def _reason(self, requests: list[FileTimerRequest]) -> FileTimerRequest | None:
        """Return the request that expired first among those with a signal."""
        for request in sorted(requests, key=lambda each: each.expiration_time):
            self._report("timer expired", request)
            if request.signal > 0:
                return request
        return None

    def _report(self, name: str, request: FileTimerRequest | None) -> None:
        try:
            self._log_event(name, request)
        except Exception:
            # The callback is user code; whatever it raises, hanging processes are ended.
            logger.exception("could not log the event %r", name)
