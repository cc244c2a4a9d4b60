"""The addresses of this host. A node announces them: its workers connect to other hosts from one of them."""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence number, port
_ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
_GET_ADDRESSES, _NEW_ADDRESS, _DONE, _ERROR = 22, 20, 3, 2
_REQUEST_ALL = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_IFA_ADDRESS, _IFA_LOCAL = 1, 2  # on a point-to-point link IFA_ADDRESS is the peer's address
_UNUSABLE, _DEPRECATED = 0x48, 0x20  # tentative or duplicate; not for new connections
_LINK_SCOPE = 253  # from here on: not reachable from other hosts, or only from those on the same link
_TIMEOUT_S = 1.0


def host_addresses(first: str, max_count: int) -> tuple[str, ...]:
    """Return numeric addresses, without loopback and link-local ones; ``first`` comes first unless it is loopback.

    The addresses come from the kernel, never from a name server. Without rtnetlink only ``first`` is returned.
    """
    first = first.partition("%")[0]
    is_loopback = first.startswith("127.") or first == "::1"
    found = [] if not first or is_loopback else [first]
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox without rtnetlink
            found += _query_kernel()
    return tuple(dict.fromkeys(found))[:max_count]


def _query_kernel() -> list[str]:
    preferred: list[str] = []
    deprecated: list[str] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.settimeout(_TIMEOUT_S)
        body = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        netlink.send(_HEADER.pack(_HEADER.size + len(body), _GET_ADDRESSES, _REQUEST_ALL, 1, 0) + body)
        is_done = False
        while not is_done:
            data = netlink.recv(1 << 16)
            is_done = not data
            for kind, message in _parts(data, _HEADER):
                if kind in (_DONE, _ERROR):
                    is_done = True
                elif kind == _NEW_ADDRESS:
                    for address, is_deprecated in _usable_addresses(message):
                        (deprecated if is_deprecated else preferred).append(address)
    return preferred + deprecated


def _parts(data: bytes, header: struct.Struct) -> Iterator[tuple[int, bytes]]:
    """Yield the type and the content of each message, or of each attribute of a message."""
    at = 0
    while at + header.size <= len(data):
        length, kind, *_ = header.unpack_from(data, at)
        yield kind, data[at + header.size : at + length]
        at += max(header.size, (length + 3) & ~3)


def _usable_addresses(message: bytes) -> Iterator[tuple[str, bool]]:
    family, _, flags, scope, _ = _ADDRESS.unpack_from(message)
    if family not in (socket.AF_INET, socket.AF_INET6) or scope >= _LINK_SCOPE or flags & _UNUSABLE:
        return
    found = dict(_parts(message[_ADDRESS.size :], _ATTRIBUTE))
    address = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)
    if address is not None:
        yield socket.inet_ntop(family, address), bool(flags & _DEPRECATED)
