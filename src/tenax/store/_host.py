"""StoreHost: the agent's handle of the workers' store: one port for each generation, served by a separate process.

1. A job that does not use the store costs one socket: the process starts when the first client connects, and takes over
   the listener with its pending connections.
2. A generation's store ends with the generation: the port is closed when ``end`` returns, even if the process is stuck;
   a moment later its connections are reset and its keys are gone.
3. Nothing blocks except ``close``, and nothing raises except ``bind``: a lost store is reported to ``on_lost`` once,
   and the next generation gets a new one.

It is ``Watchable``: its descriptor is first the listener, then the channel to the process. The listener stays open
after that, so that the port can be closed from here.
"""

from __future__ import annotations

import _socket as socket
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tenax._io.helper_channel import ChannelClosed
from tenax._io.helper_process import HelperHandle, HelperUnavailable, spawn_helper
from tenax._io.listen import bind_listener

_MODULE = "tenax.store._server_main"
_MAX_BOUND = 16


class StoreHost(HelperHandle):
    """See the module. Belongs to one loop."""

    def __init__(
        self,
        on_lost: Callable[[str], None],
        *,
        allow: Sequence[str] = (),
        on_notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``allow``: peers to serve besides the run's members, see ``_peers.py``. ``on_notice`` gets rejections."""
        self._on_lost = on_lost
        self._on_notice = on_notice
        self._allow = list(allow)
        self._hosts: list[str] = []  # addresses of the current generation's members on other hosts
        self._bound: dict[int, socket.socket] = {}  # by port: offered for the next generation
        self._listener: socket.socket | None = None  # of the current generation
        self._is_handed_over = False  # the process has a copy of the listener
        self._generation = 0
        self._pid = 0
        _open_hosts.add(self)

    @property
    def pid(self) -> int:
        """The pid of the process, or 0."""
        return self._pid

    # --- commands -----------------------------------------------------------------------------------------------------

    def bind(self, host: str, port: int = 0) -> int:
        """Bind a port for the next generation and return it. An empty host: all interfaces; port 0: a free port.

        Ports bound earlier stay open until ``serve``, because other nodes may have received an earlier one. Raises
        OSError.
        """
        if port in self._bound:
            return port
        while len(self._bound) >= _MAX_BOUND:
            _close(self._bound.pop(next(iter(self._bound))))
        sock = bind_listener(host, port)
        bound = int(sock.getsockname()[1])
        self._bound[bound] = sock
        return bound

    def serve(self, generation: int, port: int = 0, hosts: Sequence[str] = ()) -> None:
        """Serve this generation at this bound port (0: the last one bound), and end the previous generation.

        ``hosts``: the addresses of its members on other hosts.
        """
        assert self._bound, "bind first"
        self.end()
        super().on_readable()  # notice a dead process before the generation uses it
        self._generation = generation
        self._hosts = list(hosts)
        self._listener = self._bound.pop(port or next(reversed(self._bound)), None)
        self._close_bound()
        if self._listener is None:
            self._lose(f"port {port} is no longer bound")
        elif self._channel is not None:
            self._hand_over(self._listener)

    def stop_serving(self) -> None:
        """End the current generation and close bound ports: another node hosts the store."""
        self.end()
        self._close_bound()

    def _close_bound(self) -> None:
        for sock in self._bound.values():
            _close(sock)
        self._bound.clear()

    def end(self) -> None:
        """End the generation. Ports bound for the next one stay open."""
        _close(self._listener)
        self._listener = None
        if self._is_handed_over and self._channel is not None:
            with suppress(ChannelClosed):  # on_readable handles it
                self._channel.send(("close", self._generation))
        self._is_handed_over = False
        self._generation = 0

    def close(self) -> None:
        """Close all ports and wait for the process to exit."""
        self.stop_serving()
        self._stop_process()
        _open_hosts.discard(self)

    # --- the loop's handle --------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return super().fileno() if self._awaited is None else self._awaited.fileno()

    @property
    def _awaited(self) -> socket.socket | None:
        """The listener while it awaits its first client."""
        return None if self._is_handed_over else self._listener

    @property
    def wants_to_write(self) -> bool:
        return self._awaited is None and super().wants_to_write

    def on_readable(self) -> None:
        if self._awaited is None:
            super().on_readable()
        else:
            self._hand_over(self._awaited)

    # --- the process --------------------------------------------------------------------------------------------------

    def _hand_over(self, listener: socket.socket) -> None:
        """Send the listener to the process, and start the process if necessary."""
        try:
            if self._channel is None:
                self._pid, self._channel = spawn_helper(_MODULE, "tenax-store")
            self._channel.send(("serve", self._generation, self._hosts, self._allow), [listener.fileno()])
        except (HelperUnavailable, RuntimeError, OSError) as error:
            self._lose(str(error))
        except ChannelClosed:
            self._on_closed()
        else:
            self._is_handed_over = True

    def _on_message(self, message: tuple[Any, ...]) -> None:
        _, generation, text = message
        if generation == self._generation:
            self._on_notice(text)

    def _on_closed(self) -> None:
        code = self._stop_process()
        if self._generation:
            from tenax._view.exit_text import signal_name

            how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
            self._lose(f"its process {how}")

    def _lose(self, reason: str) -> None:
        self.end()
        self._on_lost(reason)

    def _stop_process(self) -> int:
        """Close the channel, kill the process and reap it. Return its exit code."""
        if self._channel is None:
            return 0
        self._channel.close()
        self._channel = None
        pid, self._pid = self._pid, 0
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
        except ChildProcessError:  # other code in this process has reaped it
            return 0
        return os.waitstatus_to_exitcode(status)

    def _close_copies(self) -> None:
        """Close the sockets in a forked process: a copy would keep the port open."""
        for sock in (*self._bound.values(), self._listener):
            if sock is not None:
                sock.close()  # no shutdown: the parent uses it
        self._bound = {}
        self._listener = self._channel = None  # channels close themselves
        self._pid = self._generation = 0
        _open_hosts.discard(self)


def _close(listener: socket.socket | None) -> None:
    """Stop accepting connections at once, even if another process holds a copy of the listener."""
    if listener is not None:
        with suppress(OSError):  # not supported on all systems; there it takes effect when the process closes its copy
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


_open_hosts: set[StoreHost] = set()


def _close_all_copies() -> None:
    for host in list(_open_hosts):
        host._close_copies()


os.register_at_fork(after_in_child=_close_all_copies)
