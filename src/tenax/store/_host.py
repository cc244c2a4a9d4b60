"""StoreHost: the agent's hold on the workers' store: one port for each generation, served by a process of its own.

1. A job that does not use the store pays for one socket: the process is started when the first client connects, and
   takes over the listener with whoever waits there.
2. A generation's store ends with it: the port is closed when ``end`` returns, even if the process is stuck; a moment
   later its connections are reset and its keys are gone.
3. Nothing here waits, except for ``close``, and nothing but ``bind`` raises: a store that is lost is told to
   ``on_lost``, once, and the next generation gets another.

It is ``Watchable``: the descriptor is first the listener's, then that of the channel to the process. The listener is
kept after that too, as the handle by which the port can be closed.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress

from tenax._io.channel import Channel, ChannelClosed
from tenax._io.helper_process import HelperUnavailable, spawn_helper
from tenax._io.listen import listen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MODULE = "tenax.store._server_main"
_MAX_BOUND = 16


class StoreHost:
    """See the module. Its owner is one loop."""

    def __init__(
        self,
        on_lost: Callable[[str], None],
        *,
        allow: Sequence[str] = (),
        on_notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``allow``: what is served besides the run's members, as in ``peers.py``; ``on_notice``: gets rejections."""
        self._on_lost = on_lost
        self._on_notice = on_notice
        self._allow = list(allow)
        self._hosts: list[str] = []  # addresses of the current generation's members on other hosts
        self._bound: dict[int, socket.socket] = {}  # by port: what was offered for the coming generation
        self._listener: socket.socket | None = None  # of the current one
        self._is_handed_over = False  # the process has it too
        self._generation = 0
        self._channel: Channel | None = None
        self._pid = 0
        _open_hosts.add(self)

    @property
    def pid(self) -> int:
        """Of the process; 0 while there is none."""
        return self._pid

    # --- orders -------------------------------------------------------------------------------------------------------

    def bind(self, host: str, port: int = 0) -> int:
        """A port at this address (empty: at all of this host's) for the coming generation; 0: a fresh one.

        What was bound before is kept as well until one is served: the others may have been told of an earlier one.
        Raises OSError.
        """
        if port in self._bound:
            return port
        while len(self._bound) >= _MAX_BOUND:
            _close(self._bound.pop(next(iter(self._bound))))
        sock = listen(host, port)
        bound = int(sock.getsockname()[1])
        self._bound[bound] = sock
        return bound

    def serve(self, generation: int, port: int = 0, hosts: Sequence[str] = ()) -> None:
        """What was bound at this port (0: last) belongs to this generation, and the one before is over.

        ``hosts``: the addresses of its members on other hosts.
        """
        assert self._bound, "bind first"
        self.end()
        if self._channel is not None:  # it may have died since, and then nobody has lost anything yet
            self._listen_to_the_process(self._channel)
        self._generation = generation
        self._hosts = list(hosts)
        self._listener = self._bound.pop(port or next(reversed(self._bound)), None)
        self._close_bound()
        if self._listener is None:
            self._lose(f"port {port} is not bound any more")
        elif self._channel is not None:
            self._hand_over()

    def serve_nobody(self) -> None:
        """Another node hosts the store: what was bound is not wanted, and the one before is over."""
        self.end()
        self._close_bound()

    def _close_bound(self) -> None:
        for sock in self._bound.values():
            _close(sock)
        self._bound.clear()

    def end(self) -> None:
        """The generation is over. What is bound for the next one stays."""
        _close(self._listener)
        self._listener = None
        if self._is_handed_over and self._channel is not None:
            with suppress(ChannelClosed):  # then it is closed already; on_readable sees to the rest
                self._channel.send(("close", self._generation))
        self._is_handed_over = False
        self._generation = 0

    def close(self) -> None:
        """End everything; returns when the process is gone."""
        self.end()
        self._close_bound()
        self._let_go()
        _open_hosts.discard(self)

    # --- the loop's handle --------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        if self._awaits_first_client:
            assert self._listener is not None
            return self._listener.fileno()
        return self._channel.fileno() if self._channel is not None else -1

    @property
    def _awaits_first_client(self) -> bool:
        return self._listener is not None and not self._is_handed_over

    @property
    def wants_to_write(self) -> bool:
        return not self._awaits_first_client and self._channel is not None and self._channel.wants_to_write

    def on_writable(self) -> None:
        if self._channel is not None:
            with suppress(ChannelClosed):  # seen where we read
                self._channel.flush()

    def on_readable(self) -> None:
        if self._awaits_first_client:
            self._hand_over()
        elif self._channel is not None:
            self._listen_to_the_process(self._channel)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Somebody connects (or the process runs anyway): from now on it is the process's listener."""
        assert self._listener is not None
        try:
            if self._channel is None:
                self._pid, self._channel = spawn_helper(_MODULE, "tenax-store")
            self._channel.send(("serve", self._generation, self._hosts, self._allow), [self._listener.fileno()])
        except (HelperUnavailable, RuntimeError, OSError) as error:
            self._lose(str(error))
        except ChannelClosed:
            self._lose(self._how_it_ended())
        else:
            self._is_handed_over = True

    def _listen_to_the_process(self, channel: Channel) -> None:
        try:
            for message, _ in channel.receive():
                _, generation, text = message
                if generation == self._generation:
                    self._on_notice(text)
        except ChannelClosed:
            reason = self._how_it_ended()
            if self._generation:
                self._lose(reason)

    def _lose(self, reason: str) -> None:
        _close(self._listener)
        self._listener = None
        self._is_handed_over = False
        self._generation = 0
        self._on_lost(reason)

    def _how_it_ended(self) -> str:
        code = self._let_go()
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    def _let_go(self) -> int:
        """Close the channel, and collect the process, which has nothing to finish."""
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
        except ChildProcessError:  # somebody else in this process collects all children
            return 0
        return os.waitstatus_to_exitcode(status)

    def _forget(self) -> None:
        """In a forked process: the sockets are the parent's, and a copy would keep the port open."""
        for sock in (*self._bound.values(), self._listener):
            if sock is not None:
                sock.close()  # without shutting it down for the parent
        self._bound = {}
        self._listener = self._channel = None  # channels see to themselves
        self._pid = self._generation = 0
        _open_hosts.discard(self)


def _close(listener: socket.socket | None) -> None:
    """Nobody can connect any more from now on, whoever else holds this listener."""
    if listener is not None:
        with suppress(OSError):  # not every system knows this for a listener; closing does it there, a moment later
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


_open_hosts: set[StoreHost] = set()


def _forget_copies() -> None:
    for host in list(_open_hosts):
        host._forget()


os.register_at_fork(after_in_child=_forget_copies)
