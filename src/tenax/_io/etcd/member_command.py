"""The command line of a member's server. Pure: what is known goes in, words come out."""

from __future__ import annotations

import hashlib

from tenax._io.etcd.control_host import ControlHost

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Literal

    from tenax._io.etcd.operations import Member
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
    """``initial_cluster`` is name to peer URL. A server that finds its data ignores it, and the state."""
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
        # Few writes, and readers that can begin anew: an hour of history is plenty, and memory is the workers'.
        *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),
        *("--snapshot-count", "10000"),
        *("--bcrypt-cost", "4"),  # the password is a digest, not words: a slow check would only delay logins
        *("--logger", "zap", "--log-level", "warn"),
        *(_tls_words(tls) if tls is not None else ()),
    ]


def cluster_token(run_id: str) -> str:
    """Two runs that meet at the same hosts never take each other's members for their own."""
    return f"tenax-{hashlib.sha256(run_id.encode()).hexdigest()[:16]}"


def first_cluster(hosts: Iterable[ControlHost]) -> dict[str, str]:
    """All control hosts: every member begins with the same."""
    return {host.name: host.peer_url for host in hosts}


def present_cluster(members: Iterable[Member], hosts: Iterable[ControlHost]) -> dict[str, str]:
    """The members as the cluster told them. One that has not come up yet has no name there; we know it by its URL."""
    names = {host.peer_url: host.name for host in hosts}
    cluster = {}
    for member in members:
        for url in member.peer_urls:
            cluster[names.get(url) or member.name or f"{member.id:x}"] = url
    return cluster


def _tls_words(tls: TlsFiles) -> list[str]:
    words = []
    for prefix in ("", "peer-"):
        words += [f"--{prefix}cert-file", tls.cert, f"--{prefix}key-file", tls.key or tls.cert]
        if tls.ca:
            words += [f"--{prefix}trusted-ca-file", tls.ca, f"--{prefix}client-cert-auth"]
    return words
