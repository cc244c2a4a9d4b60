"""Peers: which clients a store serves, by address, and by user for clients on the store's own host.

torch's clients cannot authenticate, so the server decides when it accepts a connection:

1. A peer whose other end is a socket of this host must belong to the user of this process, or to root.
2. A peer on another host must have one of the given addresses.
3. Addresses and networks that an operator allowed (``allow``) are served regardless of the user.

The kernel reports, for the exact pair of addresses, whether a connection ends on this host, and its user
(``SocketOwners``). A socket without an owner is rejected: the kernel reports root for a socket that its process closed.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from contextlib import suppress

from tenax._core.admission import peer_group
from tenax._io.endpoint import is_loopback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from ipaddress import IPv4Network, IPv6Network
    from typing import Any

    Network = IPv4Network | IPv6Network

ANY = "any"
THIS_HOST = "this host"  # the group of all peers on this host, which may use any of its addresses
ELSEWHERE, GONE, UNKNOWN = -1, -2, -3  # instead of a uid: on another host; already closed; cannot be determined
CLOSED = "it closed its socket before its user could be determined"
_ROOT = 0
_MAPPED = "::ffff:"  # how an IPv6 socket prints an IPv4 peer

_LOOPBACK_INTERFACE = 1  # in every network namespace
_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence number, port
_REQUEST = struct.Struct("=BBBxI")  # inet_diag_req_v2, before its sockid: family, protocol, extensions, states
_PORTS = struct.Struct("!HH")
_SOCKID_END = struct.Struct("=III")  # interface and cookie
_OWNER = struct.Struct("=12xII")  # inet_diag_msg, after its sockid: uid and inode
_SOCKID_BYTES = 48
_BY_FAMILY, _IS_REQUEST, _ERROR = 20, 1, 2
_ANY_STATE = _NO_COOKIE = 0xFFFFFFFF
_PROC_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


class PeerRules:
    """Accepts or rejects each new connection. ``hosts``: addresses of other hosts; None: all other hosts are served."""

    def __init__(
        self, hosts: Iterable[str] | None = None, allow: Sequence[str] = (), owners: SocketOwners | None = None
    ) -> None:
        self._hosts = None if hosts is None else {plain_address(host) for host in hosts}
        self._serves_all = ANY in allow
        self._networks = [] if self._serves_all else networks(allow)
        self._owners = SocketOwners() if owners is None else owners
        self._user = os.geteuid()

    def judge(self, sock: socket.socket, address: tuple[Any, ...]) -> tuple[str, str]:
        """Return the group in which the peer's connections are counted, and why it is rejected; "" if it is served."""
        peer = plain_address(address[0])
        group = THIS_HOST if is_loopback(peer) else peer_group(peer)
        if self._serves_all or (self._networks and _is_in(peer, self._networks)):
            return group, ""
        ours = sock.getsockname()
        is_own = is_loopback(peer) or peer == plain_address(ours[0])
        owner = self._owners.find(ours, address)
        if owner == ELSEWHERE and is_own:
            owner = GONE  # or hidden: this address cannot come from another host
        if owner == UNKNOWN:
            owner = self._user if is_own else ELSEWHERE
        if owner == ELSEWHERE:
            if self._hosts is None or peer in self._hosts:
                return group, ""
            return group, f"{peer} is not an address of a node of this generation{_remedy(peer)}"
        if owner == GONE:
            return THIS_HOST, CLOSED
        if owner in (self._user, _ROOT):
            return THIS_HOST, ""
        return THIS_HOST, f"{peer} is a process of uid {owner}, but the run belongs to uid {self._user}{_remedy(peer)}"

    def close(self) -> None:
        self._owners.close()


class SocketOwners:
    """Finds the user of the socket at the other end of a connection: one kernel query of about 6 µs.

    Linux answers through netlink (sock_diag), also for unprivileged processes. Where that is missing (gVisor), the
    tables in /proc/net are searched. Other systems have neither.
    """

    def __init__(self, *, uses_netlink: bool = True, tables: Sequence[str] = _PROC_TABLES) -> None:
        self._netlink: socket.socket | None = None
        self._tables = tables
        self._is_proven = False  # netlink has found an existing socket
        self._sequence = 0
        if uses_netlink and sys.platform == "linux":
            with suppress(OSError):  # no sock_diag in this kernel
                self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)
                self._netlink.setblocking(False)

    def find(self, ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> int:
        """Return the uid of the socket at ``theirs``, or ELSEWHERE, GONE or UNKNOWN."""
        if self._netlink is not None:
            with suppress(OSError):  # fall back to the tables
                owner = self._query(self._netlink, theirs, ours)
                self._is_proven = self._is_proven or owner != ELSEWHERE
                # A kernel without TCP support in sock_diag answers as if the socket did not exist.
                if self._is_proven or self._query(self._netlink, ours, theirs) != ELSEWHERE:
                    self._is_proven = True
                    return owner
        return self._search_tables(ours, theirs)

    def _query(self, netlink: socket.socket, local: tuple[Any, ...], remote: tuple[Any, ...]) -> int:
        scope = local[3] if len(local) > 3 else 0
        # A socket bound to an interface is found only with that interface. On this host it can only be loopback.
        for interface in (scope, _LOOPBACK_INTERFACE):
            owner = self._query_interface(netlink, local, remote, interface)
            if owner != ELSEWHERE:
                break
        return owner

    def _query_interface(
        self, netlink: socket.socket, local: tuple[Any, ...], remote: tuple[Any, ...], interface: int
    ) -> int:
        family, source, destination = _packed(local[0], remote[0])
        ports = _PORTS.pack(local[1], remote[1])
        self._sequence = self._sequence % 0xFFFFFFFF + 1
        body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ANY_STATE) + ports
        body += source.ljust(16, b"\0") + destination.ljust(16, b"\0")
        body += _SOCKID_END.pack(interface, _NO_COOKIE, _NO_COOKIE)
        netlink.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _IS_REQUEST, self._sequence, 0) + body)
        while True:
            answer = netlink.recv(8192)  # the kernel answers before send returns
            _, kind, _, number, _ = _HEADER.unpack_from(answer)
            if number == self._sequence:
                break
        if kind == _ERROR:
            code = -struct.unpack_from("=i", answer, _HEADER.size)[0]
            if code == errno.ENOENT:
                return ELSEWHERE
            raise OSError(code, os.strerror(code))
        sockid = _HEADER.size + 4
        if answer[sockid : sockid + _PORTS.size] != ports:  # a listener at that port, which matches all peers
            return ELSEWHERE
        uid, inode = _OWNER.unpack_from(answer, sockid + _SOCKID_BYTES)
        return uid if inode else GONE

    def _search_tables(self, ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> int:
        _, our_address, their_address = _packed(ours[0], theirs[0])
        pairs = [(their_address, our_address)]
        if len(our_address) == 4:  # the peer's socket may be dual-stack
            prefix = socket.inet_pton(socket.AF_INET6, f"{_MAPPED}1.2.3.4")[:12]
            pairs.append((prefix + their_address, prefix + our_address))
        wanted = [f" {_table_field(local, theirs[1])} {_table_field(remote, ours[1])} " for local, remote in pairs]
        is_readable = False
        for path in self._tables:
            with suppress(OSError), open(path, encoding="ascii") as table:
                is_readable = True
                for line in table:
                    if any(pair in line for pair in wanted):
                        fields = line.split()
                        return int(fields[7]) if int(fields[9]) else GONE
        return ELSEWHERE if is_readable else UNKNOWN

    def close(self) -> None:
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None


def networks(names: Sequence[str]) -> list[Network]:
    """Parse addresses, or networks such as 10.0.0.0/8. Raises ValueError."""
    if not names:
        return []
    from ipaddress import ip_network

    return [ip_network(name, strict=False) for name in names]


def plain_address(address: str) -> str:
    """Return the address without the interface, and an IPv4-mapped address as IPv4."""
    return address[len(_MAPPED) :] if address.startswith(_MAPPED) else address.partition("%")[0]


def _is_in(address: str, wanted: list[Network]) -> bool:
    from ipaddress import ip_address

    found = ip_address(address)
    return any(found in network for network in wanted)


def _packed(local: str, remote: str) -> tuple[int, bytes, bytes]:
    """Return the family of the connection in the kernel, and both addresses as bytes."""
    local, remote = plain_address(local), plain_address(remote)
    family = socket.AF_INET6 if ":" in local else socket.AF_INET
    return family, socket.inet_pton(family, local), socket.inet_pton(family, remote)


def _table_field(address: bytes, port: int) -> str:
    """Return the address and port as /proc/net/tcp prints them: words in host byte order."""
    words = struct.unpack(f"={len(address) // 4}I", address)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def _remedy(peer: str) -> str:
    return f"; if it belongs to this run, start every node with --rdzv-conf store_allow={peer}"
