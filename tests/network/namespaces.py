"""A network namespace: the network of one host, with all processes in it.

It has no name. It exists as long as this process holds its descriptor or a process runs in it, so even a killed test
run leaves nothing to clean up. Its processes are read from the kernel, never remembered.
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
_TIMEOUT_S = 30.0  # also on a busy machine
_LINK_GROUP, _NEW_LINK, _LINK_NAME, _IS_RUNNING = 1, 16, 3, 0x40  # of rtnetlink(7)
_V6_ROUTE_GROUP, _NEW_ROUTE, _LOCAL_ROUTE, _ROUTE_TO = 0x400, 24, 2, 1
_libc = ctypes.CDLL(None, use_errno=True)


def in_new_thread(act: Callable[[], T]) -> T:
    """Run ``act`` in a new thread, which may enter other namespaces without affecting this process."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(act())
        except BaseException as error:  # raised in the caller below
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


def _links_in(message: bytes) -> Iterator[tuple[str, bool]]:
    """Yield the links in a kernel message, and whether each is running."""
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


def _own_addresses_in(message: bytes) -> Iterator[str]:
    """Yield the IPv6 addresses in a kernel message that this host accepts packets for from now on."""
    at = 0
    while at < len(message):
        length, kind = struct.unpack_from("=IH", message, at)
        (type_of_route,) = struct.unpack_from("=B", message, at + 23)
        attribute = at + 28
        while kind == _NEW_ROUTE and type_of_route == _LOCAL_ROUTE and attribute < at + length:
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

        self._handle = in_new_thread(make)
        self._identity = os.fstat(self._handle).st_ino
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"  # what nsenter and ip can open

    @property
    def enter(self) -> list[str]:
        """The command prefix that runs a program here. The pid stays the same."""
        return ["nsenter", f"--net={self.path}", "--"]

    def inside(self, act: Callable[[], T]) -> T:
        """Call ``act`` here. A socket that it creates belongs to this network."""

        def entered() -> T:
            _check(_libc.setns(self._handle, _CLONE_NEWNET), "setns")
            return act()

        return in_new_thread(entered)

    def ip(self, *lines: str) -> None:
        """Run these ``ip`` commands in one process."""
        done = subprocess.run(
            [*self.enter, "ip", "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"ip rejected one of {lines}: {done.stderr.strip()}")

    @contextlib.contextmanager
    def until_running(self, link: str) -> Iterator[None]:
        """On exit, wait until the kernel reports that the link, set up in the block, is running.

        Until then it loses packets.
        """
        with self._kernel_messages(_LINK_GROUP) as messages:
            yield
            while (link, True) not in _links_in(messages.recv(1 << 16)):
                pass

    @contextlib.contextmanager
    def until_reachable_at(self, addresses: Iterable[str]) -> Iterator[None]:
        """On exit, wait until the kernel accepts packets for these IPv6 addresses, set in the block.

        That is some time after it has reported that the address is set.
        """
        missing = set(addresses)
        with self._kernel_messages(_V6_ROUTE_GROUP) as messages:
            yield
            while missing:
                missing.difference_update(_own_addresses_in(messages.recv(1 << 16)))

    def _kernel_messages(self, group: int) -> socket.socket:
        messages = self.inside(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
        messages.bind((0, group))
        messages.settimeout(_TIMEOUT_S)
        return messages

    # --- processes ----------------------------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Return all processes in this namespace, with their commands."""
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and self._runs_here(int(entry)):
                with contextlib.suppress(OSError):  # it has exited
                    command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry)] = command.decode(errors="replace").strip()
        return found

    def _runs_here(self, pid: int) -> bool:
        try:
            return os.stat(f"/proc/{pid}/ns/net").st_ino == self._identity
        except OSError:  # gone, or a zombie
            return False

    def end_all(self) -> None:
        """Kill all processes as a power failure does: none can react to the end of another."""
        stopped: set[int] = set()
        while new := self.processes().keys() - stopped:
            for pid in new:
                self._signal(pid, signal.SIGSTOP)
            stopped |= new
        deadline = time.monotonic() + _TIMEOUT_S
        while left := self.processes():
            for pid in left:
                self._signal(pid, signal.SIGKILL, deadline)
            if time.monotonic() > deadline:
                raise RuntimeError(f"could not kill {left}")

    def _signal(self, pid: int, number: signal.Signals, await_end: float | None = None) -> None:
        """Signal a process if it still runs here, and optionally wait for its end."""
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
        """Release the namespace. The kernel removes it with its links once the last process in it is gone."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
