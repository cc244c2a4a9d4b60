"""Which of the named hosts is this one, and what the names mean."""

from __future__ import annotations

import socket

import pytest

from kit.processes import PATIENCE_S
from tenax._io.etcd.control_host import ControlHost, addresses_here, control_hosts, split_names
from tenax._io.etcd.data_directory import last_messages
from tenax._io.etcd.managed import ManagedSettings, managed_settings
from tenax._io.etcd.member_address import MemberAddress
from tenax._io.etcd.member_command import cluster_token, first_cluster, member_command, present_cluster
from tenax._io.etcd.operations import Member
from tenax._io.loop import Loop
from tenax._io.tls import TlsFiles

from .kit import control_hosts as loopback_hosts

pytestmark = pytest.mark.unit

STRANGERS = ("203.0.113.7", "198.51.100.7")  # for documentation: addresses of nobody
HOSTS = control_hosts(("n0", "n1:2500", "n2"), 2379, is_tls=False)


def _place(*names: str) -> str:
    loop = Loop()
    answers: list[str] = []
    place = MemberAddress(
        loop,
        control_hosts(names, 2379, is_tls=False),
        lambda host, addresses: answers.append(f"{host.name} at {' '.join(addresses)}"),
        lambda: answers.append("nowhere"),
    )
    place.start()
    end = loop.now() + PATIENCE_S
    loop.next_event(lambda: loop.now() if answers else end)
    place.close()
    loop.close()
    return answers[0]


def test_a_host_that_is_not_named() -> None:
    assert _place(*STRANGERS) == "nowhere"


def test_the_first_name_that_is_ours() -> None:
    """Also where several can be bound here."""
    first, second = loopback_hosts(2)
    assert _place(STRANGERS[0], second, first) == f"{second} at {second}"


def test_a_name_is_looked_up() -> None:
    assert _place(STRANGERS[0], "localhost").startswith("localhost at ")


def test_a_name_that_is_loopback_here_means_this_host_as_others_know_it() -> None:
    """Debian writes a host's own name so into /etc/hosts; the others could not reach a loopback address."""
    found = addresses_here(ControlHost("myself", "myself", 2379), [(socket.AF_INET, ("127.0.1.1", 2379))])
    assert found in (["::"], ["0.0.0.0"])


def test_names() -> None:
    assert split_names("http://n0:2379/, n1 ,n1,https://n2") == ("n0:2379", "n1", "n2")
    assert [(host.client_url, host.peer_url) for host in control_hosts(("n0", "[::1]:2500"), 2379, is_tls=True)] == [
        ("https://n0:2379", "https://n0:2380"),
        ("https://[::1]:2500", "https://[::1]:2501"),
    ]


@pytest.mark.parametrize(
    ("text", "told", "sentence"),
    [
        ("", {}, "has 0 control hosts; managed etcd needs 1 to 7"),
        ("n0:0", {}, "expected HOST or HOST:PORT with a port from 1 to 65535"),
        ("n0:65535", {}, "the port must be at most 65534"),
        ("n0,n1", {"only": "n2"}, "managed_only is 'n2'; expected one of n0, n1"),
        ("https://n0", {}, "needs a certificate on every control host; set ssl_cert"),
        ("n0", {"tls": TlsFiles(ca="ca.pem")}, "needs a certificate, its key and the CA"),
    ],
)
def test_settings_that_cannot_be(text: str, told: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        managed_settings(text, "run", **told)  # type: ignore[arg-type]


def test_settings() -> None:
    """Files that are not named are no TLS; what clients need can be asked for."""
    settings = managed_settings("n0,n1:2500", "run", tls=TlsFiles())
    assert settings == ManagedSettings(("n0", "n1:2500"), "run")
    assert settings.endpoint_text == "n0:2379,n1:2500"


def test_the_command() -> None:
    """Members listen at addresses and are known by names; the token is the run's."""
    command = member_command(
        "/bin/etcd", HOSTS[1], ["10.0.0.1", "fd00::1"], "/data", "a run", first_cluster(HOSTS), "new", None
    )
    told = dict(zip(command[1::2], command[2::2], strict=True))
    assert told["--listen-client-urls"] == "http://10.0.0.1:2500,http://[fd00::1]:2500"
    assert told["--initial-advertise-peer-urls"] == "http://n1:2501"
    assert told["--initial-cluster"] == "n0=http://n0:2380,n1:2500=http://n1:2501,n2=http://n2:2380"
    assert told["--initial-cluster-token"] == cluster_token("a run") != cluster_token("another run")


def test_the_members_of_a_cluster_that_runs() -> None:
    """One that was added has no name there before it is up; we know it by its place."""
    members = (Member(1, "n0", ("http://n0:2380",)), Member(2, "", ("http://n2:2380",)))
    assert present_cluster(members, HOSTS) == {"n0": "http://n0:2380", "n2": "http://n2:2380"}


def test_last_words() -> None:
    """What etcd wrote for people; else the lines as they are."""
    log = '{"msg":"a"}\n{"msg":"b","error":"no disk"}\npanic: x\ngoroutine 1 [running]:\n'
    assert last_messages(log) == "a; b: no disk"
    assert last_messages("one\n\ntwo\none\n") == "two; one"
    assert last_messages("") == ""
