"""Ends the network connections of a generation, so that a thread that is blocked in a collective returns.

gloo's process groups have no working abort, and torch's store client waits without looking at signals. But both return
with an exception as soon as their connection ends. Which connections belong to the generation:

- those to its store, by the port, and
- connected TCP sockets that a child process would inherit. gloo's are; the sockets of Python, of Go and of most
  libraries are not, so connections to other services stay.

While gloo connects the ranks, it may wait for a peer that is gone, without a connection that could be ended. Then this
process connects to its own listener in the place of each peer, and closes the connection.

Only sockets that were opened since the generation began are touched.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
from collections.abc import Iterator, Sequence

_SEQUENCE_BYTES = 8  # gloo's connections begin with the number of the pair that they are for
_CONNECT_S = 1.0
_FOLDER = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"


def open_sockets() -> set[tuple[int, int]]:
    """Return what identifies the sockets that this process has open."""
    return {(status.st_dev, status.st_ino) for _, status in _sockets()}


def end_connections(before: set[tuple[int, int]], store_port: int, peers: int = 0) -> None:
    """Shut down the connections of the generation that began when ``before`` were open.

    ``peers``: connect to listeners in the place of so many; 0: do not.
    """
    for descriptor, status in _sockets():
        if (status.st_dev, status.st_ino) not in before:
            _end(descriptor, status, store_port, peers)


def _sockets() -> Iterator[tuple[int, os.stat_result]]:
    for descriptor in _descriptors():
        try:
            status = os.stat(descriptor)
        except OSError:
            continue  # closed meanwhile
        if stat.S_ISSOCK(status.st_mode):
            yield descriptor, status


def _descriptors() -> Sequence[int]:
    try:
        return [int(name) for name in os.listdir(_FOLDER)]
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return range(os.sysconf("SC_OPEN_MAX"))  # all of them are open


def _end(descriptor: int, status: os.stat_result, store_port: int, peers: int) -> None:
    try:
        is_inheritable = os.get_inheritable(descriptor)
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return  # closed meanwhile
    with copy:
        found = os.fstat(copy.fileno())
        if (found.st_dev, found.st_ino) != (status.st_dev, status.st_ino):
            return  # the number was used again meanwhile
        if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
            return
        try:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # shut down, gloo would abort the process
                _replace_peers(copy, peers if is_inheritable else 0)
            elif copy.getpeername()[1] == store_port or is_inheritable:
                copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # not connected


def _replace_peers(listener: socket.socket, peers: int) -> None:
    for number in range(peers):
        with socket.create_connection(listener.getsockname()[:2], _CONNECT_S) as connection:
            connection.sendall(number.to_bytes(_SEQUENCE_BYTES, sys.byteorder))
