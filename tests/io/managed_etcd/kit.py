"""Helpers for the tests of managed etcd: members of one cluster in one loop, at loopback addresses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import trustme

from kit.addresses import own_address
from kit.processes import TIMEOUT_S
from tenax._core.etcd.errors import EtcdError
from tenax._core.etcd.operations import Member, Members, Operation
from tenax._engines.etcd.managed import ManagedMember, ManagedSettings
from tenax._io.etcd.client import EtcdClient
from tenax._io.etcd.settings import EtcdSettings
from tenax._io.loop import Loop
from tenax._io.tls import TlsFiles

A = TypeVar("A")


def control_hosts(count: int) -> tuple[str, ...]:
    return tuple(own_address() for _ in range(count))


class ManagedCluster:
    """The members of one run in this process, one per control host, and their messages."""

    def __init__(self, folder: Path, count: int = 3, **options: Any) -> None:
        self.loop = Loop()
        self.names = control_hosts(count)
        self.options = {"run_id": "a run/1", "data_root": str(folder), **options}
        self.members: list[ManagedMember] = []
        self.messages: list[str] = []
        self.failures: list[str] = []
        self._clients: list[EtcdClient] = []

    def settings(self, name: str, **options: Any) -> ManagedSettings:
        return ManagedSettings(**{"names": self.names, "only": name, **self.options, **options})

    def add(self, name: str, limits: dict[str, Any] | None = None, **options: Any) -> ManagedMember:
        """Start the member of this name."""
        settings = self.settings(name, **options)
        member = ManagedMember(self.loop, settings, self.messages.append, self.failures.append, **limits or {})
        self.members.append(member)
        member.start()
        return member

    def add_all(self) -> list[ManagedMember]:
        members = [self.add(name) for name in self.names]
        self.until(lambda: all(member.is_serving for member in members), "all members to serve")
        return members

    def until(self, condition: Callable[[], object], what: str, *, may_fail: bool = False) -> None:
        """Run the loop until the condition is true."""
        end = self.loop.now() + TIMEOUT_S
        self.loop.next_event(lambda: self.loop.now() if condition() or (self.failures and not may_fail) else end)
        assert may_fail or not self.failures, self.failures
        assert condition(), (
            f"timed out waiting for {what}; messages: {self.messages}; {[c.trouble for c in self._clients]}"
        )

    def call(self, operation: Operation[A], *names: str, tls: TlsFiles | None = None, **login: str) -> A:
        """Return the answer of the cluster, or of the named members. ``login``: instead of the run's."""
        settings = self.settings(self.names[0])
        endpoints = tuple(f"{name}:2379" for name in names or self.names)
        login = login or ({"user": "root", "password": settings.password} if settings.secret else {})
        client = EtcdClient(self.loop, EtcdSettings(endpoints, tls=tls, **login))
        self._clients.append(client)
        answers: list[A] = []
        errors: list[EtcdError] = []
        client.call(operation, answers.append, errors.append, patience_s=TIMEOUT_S)
        self.until(lambda: answers or errors, f"an answer to {operation}")
        client.close()
        assert not errors, errors[0].message
        return answers[0]

    def members_by_url(self, *names: str, tls: TlsFiles | None = None) -> dict[str, Member]:
        """Return the members by peer URL."""
        return {member.peer_urls[0]: member for member in self.call(Members(), *names, tls=tls).members}

    def leave(self, *members: ManagedMember) -> None:
        left: list[int] = []
        for member in members:
            member.leave(lambda: left.append(1))
        self.until(lambda: len(left) == len(members), "members to leave", may_fail=True)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for member in self.members:
            member.close()
        self.loop.close()


def tls_files(folder: Path, *names: str) -> TlsFiles:
    """Issue a certificate for these names, with its CA."""
    authority = trustme.CA()
    issued = authority.issue_cert(*names)
    cert, key, ca = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    authority.cert_pem.write_to_path(str(ca))
    return TlsFiles(str(cert), str(key), str(ca))
