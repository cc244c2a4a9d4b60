"""Control hosts: their names and addresses, and which one is this host."""

from __future__ import annotations

import socket

import pytest

from kit.processes import TIMEOUT_S
from tenax._core.etcd.operations import Member
from tenax._engines.etcd.managed import ManagedSettings, managed_settings
from tenax._io.etcd.control_host import (
    ControlHost,
    MemberAddress,
    addresses_here,
    cluster_token,
    control_hosts,
    first_cluster,
    member_command,
    present_cluster,
    split_names,
)
from tenax._io.etcd.data_directory import last_messages
from tenax._io.loop import Loop
from tenax._io.tls import TlsFiles

from .kit import control_hosts as loopback_hosts

pytestmark = pytest.mark.unit

OTHER_HOSTS = ("203.0.113.7", "198.51.100.7")  # reserved for documentation: no host has them
HOSTS = control_hosts(("n0", "n1:2500", "n2"), 2379, is_tls=False)


def _own_host(*names: str) -> str:
    loop = Loop()
    answers: list[str] = []
    search = MemberAddress(
        loop,
        control_hosts(names, 2379, is_tls=False),
        lambda host, addresses: answers.append(f"{host.name} at {' '.join(addresses)}"),
        lambda: answers.append("nowhere"),
    )
    search.start()
    end = loop.now() + TIMEOUT_S
    loop.next_event(lambda: loop.now() if answers else end)
    search.close()
    loop.close()
    return answers[0]


def test_a_host_that_is_not_a_control_host_runs_no_member() -> None:
    assert _own_host(*OTHER_HOSTS) == "nowhere"


def test_the_first_name_of_this_host_is_used() -> None:
    """If several can be bound here."""
    first, second = loopback_hosts(2)
    assert _own_host(OTHER_HOSTS[0], second, first) == f"{second} at {second}"


def test_a_host_name_is_looked_up() -> None:
    assert _own_host(OTHER_HOSTS[0], "localhost").startswith("localhost at ")


def test_a_name_that_resolves_to_loopback_means_all_interfaces() -> None:
    """Debian maps the host's own name to 127.0.1.1 in /etc/hosts, which other hosts cannot reach."""
    found = addresses_here(ControlHost("n0", "n0", 2379), [(socket.AF_INET, ("127.0.1.1", 2379))])
    assert found in (["::"], ["0.0.0.0"])


def test_names_are_split_and_turned_into_urls() -> None:
    assert split_names("http://n0:2379/, n1 ,n1,https://n2") == ("n0:2379", "n1", "n2")
    assert [(host.client_url, host.peer_url) for host in control_hosts(("n0", "[::1]:2500"), 2379, is_tls=True)] == [
        ("https://n0:2379", "https://n0:2380"),
        ("https://[::1]:2500", "https://[::1]:2501"),
    ]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "has 0 control hosts; managed etcd needs 1 to 7"),
        ("n0:0", {}, "expected HOST or HOST:PORT with a port from 1 to 65535"),
        ("n0:65535", {}, "the port must be at most 65534"),
        ("n0,n1", {"only": "n2"}, "managed_only is 'n2'; expected one of n0, n1"),
        ("https://n0", {}, "needs a certificate on every control host; set ssl_cert"),
        ("n0", {"tls": TlsFiles(ca="ca.pem")}, "needs a certificate, its key and the CA"),
    ],
)
def test_invalid_settings_are_rejected(text: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        managed_settings(text, "run", **options)  # type: ignore[arg-type]


def test_settings_without_tls_files_use_no_tls() -> None:
    settings = managed_settings("n0,n1:2500", "run", tls=TlsFiles())
    assert settings == ManagedSettings(("n0", "n1:2500"), "run")
    assert settings.endpoint_text == "n0:2379,n1:2500"


def test_members_listen_at_addresses_and_advertise_names() -> None:
    """The token is unique to the run."""
    command = member_command(
        "/bin/etcd", HOSTS[1], ["10.0.0.1", "fd00::1"], "/data", "a run", first_cluster(HOSTS), "new", None
    )
    flags = dict(zip(command[1::2], command[2::2], strict=True))
    assert flags["--listen-client-urls"] == "http://10.0.0.1:2500,http://[fd00::1]:2500"
    assert flags["--initial-advertise-peer-urls"] == "http://n1:2501"
    assert flags["--initial-cluster"] == "n0=http://n0:2380,n1:2500=http://n1:2501,n2=http://n2:2380"
    assert flags["--initial-cluster-token"] == cluster_token("a run") != cluster_token("another run")


def test_an_added_member_is_identified_by_its_url() -> None:
    """It has no name in the cluster before it has started."""
    members = (Member(1, "n0", ("http://n0:2380",)), Member(2, "", ("http://n2:2380",)))
    assert present_cluster(members, HOSTS) == {"n0": "http://n0:2380", "n2": "http://n2:2380"}


def test_last_messages_of_a_log() -> None:
    """The messages of JSON lines; without JSON, the last lines."""
    log = '{"msg":"a"}\n{"msg":"b","error":"no disk"}\npanic: x\ngoroutine 1 [running]:\n'
    assert last_messages(log) == "a; b: no disk"
    assert last_messages("one\n\ntwo\none\n") == "two; one"
    assert last_messages("") == ""
