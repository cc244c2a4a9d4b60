"""A network namespace: the network of one machine, with everything that runs in it.

It has no name. It lives as long as this process holds its descriptor or a process runs in it, so even a test run that
is killed leaves nothing to clean up. Whoever runs in it is found by asking the kernel, never by remembering.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_PATIENCE_S = 30.0  # for what must happen on any machine, however busy
_NEWS_OF_LINKS, _NEW_LINK, _LINK_NAME, _IS_RUNNING = 1, 16, 3, 0x40  # of rtnetlink(7)
_NEWS_OF_V6_ROUTES, _NEW_ROUTE, _TO_THIS_HOST, _ROUTE_TO = 0x400, 24, 2, 1
_libc = ctypes.CDLL(None, use_errno=True)


def in_thread(act: Callable[[], T]) -> T:
    """Run it in a thread of its own, which may move to other namespaces without taking this process along."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(act())
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _links_told_of(message: bytes) -> Iterator[tuple[str, bool]]:
    """The links in a message from the kernel, and whether each is running."""
    at = 0
    while at < len(message):
        length, kind = struct.unpack_from("=IH", message, at)
        family, _, _, flags, _ = struct.unpack_from("=BxHiII", message, at + 16)
        attribute = at + 32
        while kind == _NEW_LINK and family == socket.AF_UNSPEC and attribute < at + length:
            size, what = struct.unpack_from("=HH", message, attribute)
            if what == _LINK_NAME:
                yield message[attribute + 4 : attribute + size].rstrip(b"\0").decode(), bool(flags & _IS_RUNNING)
            attribute += (size + 3) & ~3
        at += (length + 3) & ~3


def _own_addresses_told_of(message: bytes) -> Iterator[str]:
    """The IPv6 addresses in a message from the kernel that packets for this host may have from now on."""
    at = 0
    while at < len(message):
        length, kind = struct.unpack_from("=IH", message, at)
        (type_of_route,) = struct.unpack_from("=B", message, at + 23)
        attribute = at + 28
        while kind == _NEW_ROUTE and type_of_route == _TO_THIS_HOST and attribute < at + length:
            size, what = struct.unpack_from("=HH", message, attribute)
            if what == _ROUTE_TO:
                yield socket.inet_ntop(socket.AF_INET6, message[attribute + 4 : attribute + size])
            attribute += (size + 3) & ~3
        at += (length + 3) & ~3


class Namespace:
    def __init__(self) -> None:
        def make() -> int:
            _check(_libc.unshare(_CLONE_NEWNET), "unshare")
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

        self._handle = in_thread(make)
        self._identity = os.fstat(self._handle).st_ino
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"  # what nsenter and ip can open

    @property
    def enter(self) -> list[str]:
        """The words that start a program here; the program has the pid of whoever says them."""
        return ["nsenter", f"--net={self.path}", "--"]

    def inside(self, act: Callable[[], T]) -> T:
        """Do something here. A socket that it makes belongs to this network for good."""

        def entered() -> T:
            _check(_libc.setns(self._handle, _CLONE_NEWNET), "setns")
            return act()

        return in_thread(entered)

    def ip(self, *lines: str) -> None:
        """Give ``ip`` these commands, all in one process."""
        done = subprocess.run(
            [*self.enter, "ip", "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"ip did not like one of {lines}: {done.stderr.strip()}")

    @contextlib.contextmanager
    def until_running(self, link: str) -> Iterator[None]:
        """What happens inside brings a link up; returns when the kernel says that it carries packets.

        A link that has just been set up, or whose other end has, loses packets until the kernel has noticed.
        """
        with self._news(_NEWS_OF_LINKS) as news:
            yield
            while (link, True) not in _links_told_of(news.recv(1 << 16)):
                pass

    @contextlib.contextmanager
    def until_known_as(self, addresses: Iterable[str]) -> Iterator[None]:
        """What happens inside gives us these IPv6 addresses; returns when packets for them are taken.

        The kernel does that some time after it has said that the address is set.
        """
        missing = set(addresses)
        with self._news(_NEWS_OF_V6_ROUTES) as news:
            yield
            while missing:
                missing.difference_update(_own_addresses_told_of(news.recv(1 << 16)))

    def _news(self, group: int) -> socket.socket:
        news = self.inside(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
        news.bind((0, group))
        news.settimeout(_PATIENCE_S)
        return news

    # --- who runs here ------------------------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Every living process of this machine, with its command."""
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and self._runs_here(int(entry)):
                with contextlib.suppress(OSError):  # gone meanwhile
                    command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry)] = command.decode(errors="replace").strip()
        return found

    def _runs_here(self, pid: int) -> bool:
        try:
            return os.stat(f"/proc/{pid}/ns/net").st_ino == self._identity
        except OSError:  # gone, or a zombie
            return False

    def end_all(self) -> None:
        """End everything as a power cut does: nobody has time to react to the end of another."""
        stopped: set[int] = set()
        while new := self.processes().keys() - stopped:
            for pid in new:
                self._signal(pid, signal.SIGSTOP)
            stopped |= new
        deadline = time.monotonic() + _PATIENCE_S
        while left := self.processes():
            for pid in left:
                self._signal(pid, signal.SIGKILL, deadline)
            if time.monotonic() > deadline:
                raise RuntimeError(f"cannot be ended: {left}")

    def _signal(self, pid: int, number: signal.Signals, await_end: float | None = None) -> None:
        """Signal a process if it runs here, whoever may have its number meanwhile; perhaps wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                if self._runs_here(pid):
                    signal.pidfd_send_signal(handle, number)
                    if await_end is not None:
                        select.select([handle], [], [], max(0.0, await_end - time.monotonic()))
            finally:
                os.close(handle)

    def close(self) -> None:
        """The kernel takes the network down, with all its links and addresses, when the last holder is gone."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
