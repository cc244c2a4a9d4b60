"""The command line of a member's server. Pure."""

from __future__ import annotations

import hashlib

from tenax._io.etcd.control_host import ControlHost

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Literal

    from tenax._core.etcd.operations import Member
    from tenax._io.tls import TlsFiles


def member_command(
    program: str,
    host: ControlHost,
    addresses: list[str],
    data: str,
    run_id: str,
    initial_cluster: dict[str, str],
    state: Literal["new", "existing"],
    tls: TlsFiles | None,
) -> list[str]:
    """Return the command. ``initial_cluster`` maps names to peer URLs. A server with data ignores it and ``state``."""
    return [
        program,
        *("--name", host.name),
        *("--data-dir", data),
        *("--listen-client-urls", host.listen_urls(addresses, host.client_port)),
        *("--advertise-client-urls", host.client_url),
        *("--listen-peer-urls", host.listen_urls(addresses, host.peer_port)),
        *("--initial-advertise-peer-urls", host.peer_url),
        *("--initial-cluster", ",".join(f"{name}={url}" for name, url in initial_cluster.items())),
        *("--initial-cluster-state", state),
        *("--initial-cluster-token", cluster_token(run_id)),
        # An hour of history is plenty: writes are few, and readers can start over. Leave the memory to the workers.
        *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),
        *("--snapshot-count", "10000"),
        *("--bcrypt-cost", "4"),  # the password is a digest: a slow hash only delays logins
        *("--logger", "zap", "--log-level", "warn"),
        *(_tls_flags(tls) if tls is not None else ()),
    ]


def cluster_token(run_id: str) -> str:
    """Return a token that is unique to the run, so that two runs on the same hosts never mix their members."""
    return f"tenax-{hashlib.sha256(run_id.encode()).hexdigest()[:16]}"


def first_cluster(hosts: Iterable[ControlHost]) -> dict[str, str]:
    """Return the initial cluster: all control hosts, the same for every member."""
    return {host.name: host.peer_url for host in hosts}


def present_cluster(members: Iterable[Member], hosts: Iterable[ControlHost]) -> dict[str, str]:
    """Return the current members. A member that has not started yet has no name; its URL identifies it."""
    names = {host.peer_url: host.name for host in hosts}
    cluster = {}
    for member in members:
        for url in member.peer_urls:
            cluster[names.get(url) or member.name or f"{member.id:x}"] = url
    return cluster


def _tls_flags(tls: TlsFiles) -> list[str]:
    flags = []
    for prefix in ("", "peer-"):
        flags += [f"--{prefix}cert-file", tls.cert, f"--{prefix}key-file", tls.key or tls.cert]
        if tls.ca:
            flags += [f"--{prefix}trusted-ca-file", tls.ca, f"--{prefix}client-cert-auth"]
    return flags
