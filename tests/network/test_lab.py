"""Tests of the lab itself, with plain sockets and programs."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit.processes import TIMEOUT_S, gone, is_alive, leaving_nothing, python

from .lab import (
    SLOW_NAME_S,
    Direction,
    Host,
    Lab,
    requires_ipv6,
    requires_netns,
    requires_slow_network,
    why_not,
)

pytestmark = requires_netns

SHORT_S = 0.2  # to check that something does not happen; never to wait for an event
MakeLab = Callable[..., Lab]
_SIOCETHTOOL, _ETHTOOL_GLINK = 0x8946, 0x0A

# A server that sends "hello" on each connection and keeps it open; its first line is its port.
SERVER = """
import socket, sys
server = socket.create_server((sys.argv[1], 0), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print(server.getsockname()[1], flush=True)
connections = []
while True:
    connections.append(server.accept()[0])
    connections[-1].sendall(b"hello")
"""
# Leaves an orphan behind, in its own session, that ignores SIGTERM and SIGHUP.
DAEMON = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        signal.pause()
    os._exit(0)
os.wait()
signal.pause()
"""
RESOLVE = """
import socket, sys, time
begun = time.monotonic()
try:
    answer = socket.getaddrinfo(sys.argv[1], None, type=socket.SOCK_STREAM)[0][4][0]
except socket.gaierror as error:
    answer = "error"
print(answer, time.monotonic() - begun)
"""


@contextlib.contextmanager
def connected(one: Host, other: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Open a TCP connection. Yield the socket of ``one`` and that of ``other``."""
    with other.listen() as server, one.connect(other.address, server.getsockname()[1]) as ours:
        theirs, _ = server.accept()
        with theirs:
            theirs.settimeout(TIMEOUT_S)
            yield ours, theirs


class DatagramSockets:
    """Sends datagrams between hosts. They keep their order: if a later one arrives first, the earlier one is lost."""

    def __init__(self, hosts: list[Host]) -> None:
        self._sockets = {host: self._make(host) for host in hosts}

    def _make(self, host: Host) -> socket.socket:
        family = socket.AF_INET6 if ":" in host.address else socket.AF_INET
        made = host.inside(lambda: socket.socket(family, socket.SOCK_DGRAM))
        made.bind((host.address, 0))
        made.settimeout(TIMEOUT_S)
        return made

    def send(self, source: Host, target: Host, text: str) -> None:
        self._sockets[source].sendto(text.encode(), self._sockets[target].getsockname())

    def receive(self, target: Host) -> str:
        return self._sockets[target].recv(100).decode()

    def close(self) -> None:
        for made in self._sockets.values():
            made.close()


@contextlib.contextmanager
def datagram_sockets(*hosts: Host) -> Iterator[DatagramSockets]:
    with contextlib.closing(DatagramSockets(list(hosts))) as made:
        yield made


def lost_routes(lab: Lab, undo: Callable[[], None]) -> set[str]:
    """Send a datagram on every route, undo the fault, and send another. Return the routes that lost the first."""
    routes = [(source, target) for source in lab for target in lab if source is not target]
    lost = set()
    with contextlib.ExitStack() as stack:
        sockets_by_route = {route: stack.enter_context(datagram_sockets(*route)) for route in routes}
        for source, target in routes:
            sockets_by_route[source, target].send(source, target, "before")
        undo()
        for source, target in routes:
            sockets_by_route[source, target].send(source, target, "after")
        for source, target in routes:
            if sockets_by_route[source, target].receive(target) == "after":
                lost.add(f"{source.number}→{target.number}")
    return lost


def silent(end: socket.socket) -> bool:
    """Return True if a connection is silent for a short time: no data, no end, no error."""
    return not select.select([end], [], [], SHORT_S)[0]


def has_carrier(host: Host) -> bool:
    """Return True if the host's network card reports a carrier."""

    def query() -> bool:
        is_linked = (ctypes.c_uint32 * 2)(_ETHTOOL_GLINK, 0)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("16sP16x", b"eth0", ctypes.addressof(is_linked)))
        return bool(is_linked[1])

    return host.inside(query)


# --- hosts ------------------------------------------------------------------------------------------------------------


def test_hosts_have_names_and_resolve_each_other(lab: Lab) -> None:
    a, b, _ = lab
    server = b.run(python(SERVER, b.address))
    port = int(server.line())
    client = a.run(
        python(
            """
            import socket, sys
            print(socket.gethostname(), socket.gethostbyname(socket.gethostname()), flush=True)
            print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 10).recv(5).decode())
            """,
            b.name,
            port,
        )
    )
    assert client.wait().code == 0, client
    assert client.out.split() == ["node0", a.address, "hello"]
    assert socket.gethostname() != "node0"


def test_two_hosts_can_have_the_same_name(lab: Lab) -> None:
    program = python("import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))")
    for host in lab[0], lab[1]:
        assert host.run(program, hostname="twin").wait().out.split() == ["twin", host.address]


def test_a_program_gets_its_folder_and_a_clean_environment(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("TENAX_SOMETHING", "x")
    program = python("import os, json; print(json.dumps([os.getcwd(), dict(os.environ)]))")
    folder, variables = json.loads(lab[0].run(program, env={"EXTRA": "1"}).wait().out)
    assert folder == variables["TMPDIR"] == str(lab[0].home)
    assert variables["EXTRA"] == "1"
    assert not {"RANK", "TENAX_SOMETHING"} & variables.keys()
    assert json.loads(lab[0].run(program, cwd=lab.shared).wait().out)[0] == str(lab.shared)


def test_the_output_and_the_exit_of_a_program_can_be_awaited(lab: Lab) -> None:
    """Its pid is known, its lines are returned when they are complete, and failures show its output."""
    code = """
        import os, signal, sys
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        print(os.getpid(), flush=True)
        print("half", end="", flush=True)
        print("ready", file=sys.stderr, flush=True)
        signal.sigwait({signal.SIGUSR1})
        print(" and half", flush=True)
        signal.pause()
    """
    running = lab[0].run(python(code))
    assert running.line() == str(running.pid)
    running.until_printed("ready")
    running.send(signal.SIGUSR1)
    assert running.line() == "half and half"
    with pytest.raises(pytest.fail.Exception, match=r"(?s)still running.*half and half"):
        running.wait(timeout_s=0.01)
    running.send(signal.SIGTERM)
    assert running.wait().code == -signal.SIGTERM
    with pytest.raises(pytest.fail.Exception, match="did not print line 3"):
        running.line()


def test_a_condition_of_the_shared_folder_can_be_awaited(lab: Lab) -> None:
    lab[1].run(["sh", "-c", 'echo x > "$1/half" && mv "$1/half" "$1/whole"', "sh", str(lab.shared)])
    lab.until((lab.shared / "whole").exists, "the file")
    with pytest.raises(pytest.fail.Exception, match=r"timed out after 0\.01 s: another file"):
        lab.until((lab.shared / "other").exists, "another file", timeout_s=0.01)


@pytest.mark.parametrize("options", [{}, {"seed": 1}, pytest.param({"family": "v6"}, marks=requires_ipv6)])
def test_no_packet_is_lost_without_a_fault(make_lab: MakeLab, options: dict[str, object]) -> None:
    lab = make_lab(3, **options)
    assert lost_routes(lab, undo=lambda: None) == set()
    lab[0].unplug()
    lab[0].plug()
    lab[1].power_off()
    lab[1].power_off()
    lab[1].power_on()
    lab[1].power_on()
    assert lost_routes(lab, undo=lambda: None) == set()


# --- cuts -------------------------------------------------------------------------------------------------------------


def test_a_cut_is_silent_and_sent_data_arrives_after_it(lab: Lab) -> None:
    a, b, c = lab
    with connected(a, b) as (ours, theirs), connected(b, c) as (other, others), b.listen() as server:
        a.cut()
        ours.sendall(b"late")
        with pytest.raises(TimeoutError):
            a.connect(b.address, server.getsockname()[1], timeout_s=SHORT_S)
        assert silent(ours)
        assert silent(theirs)
        assert has_carrier(a)
        other.sendall(b"unaffected")
        assert others.recv(100) == b"unaffected"
        a.heal()
        assert theirs.recv(100) == b"late"


@pytest.mark.parametrize(
    ("direction", "lost"),
    [("in", {"1→0", "2→0"}), ("out", {"0→1", "0→2"}), ("both", {"1→0", "2→0", "0→1", "0→2"})],
)
def test_a_cut_affects_only_its_direction(lab: Lab, direction: Direction, lost: set[str]) -> None:
    lab[0].cut(direction)
    assert lost_routes(lab, undo=lab[0].heal) == lost


def test_one_direction_can_heal_before_the_other(lab: Lab) -> None:
    lab[0].cut()
    lab[0].heal("in")
    assert lost_routes(lab, undo=lab.heal) == {"0→1", "0→2"}


def test_a_partition_separates_only_its_groups(make_lab: MakeLab) -> None:
    a, b, c, _ = lab = make_lab(4)
    lab.partition([a, b], [c])
    assert lost_routes(lab, undo=lab.heal) == {"0→2", "1→2", "2→0", "2→1"}


def test_a_host_that_boots_during_a_partition_stays_cut_off(lab: Lab) -> None:
    a, b, c = lab
    lab.partition([a], [b, c])
    a.power_off()
    a.power_on()
    assert lost_routes(lab, undo=lab.heal) == {"0→1", "0→2", "1→0", "2→0"}


# --- power ------------------------------------------------------------------------------------------------------------


def test_a_killed_process_closes_its_connections_but_a_power_failure_is_silent(lab: Lab) -> None:
    """After a boot, the host resets the old connection when it is used."""
    a, b, _ = lab
    killed = b.run(python(SERVER, b.address))
    with a.connect(b.address, int(killed.line())) as connection:
        assert connection.recv(5) == b"hello"
        killed.send(signal.SIGKILL)
        assert connection.recv(5) == b""
    running = b.run(python(SERVER, b.address))
    with a.connect(b.address, int(running.line())) as connection:
        assert connection.recv(5) == b"hello"
        b.power_off()
        assert running.wait(timeout_s=0).code == -signal.SIGKILL
        assert silent(connection)
        b.power_on()
        assert silent(connection)
        connection.sendall(b"data")
        with pytest.raises(ConnectionResetError):
            connection.recv(5)


def test_a_power_failure_ends_everything_on_the_host(lab: Lab) -> None:
    daemon = lab[0].run(python(DAEMON))
    elsewhere = lab[1].run(python(DAEMON))
    pid = int(daemon.line())
    elsewhere.line()
    assert {pid, daemon.pid} == set(lab[0].processes())
    lab[0].power_off()
    assert not is_alive(pid)
    assert not lab[0].processes()
    assert len(lab.processes()) == 2
    with pytest.raises(RuntimeError, match="node0 is off"):
        lab[0].run(["true"])
    lab[0].power_on()
    assert lab[0].run(["true"]).wait().code == 0


def test_a_power_failure_ends_programs_that_were_just_started(lab: Lab) -> None:
    runs = [lab[0].run(["sh", "-c", "while :; do :; done"]) for _ in range(5)]
    lab[0].power_off()
    assert [run.wait(timeout_s=0).code for run in runs] == [-signal.SIGKILL] * 5


def test_a_connection_survives_an_unplugged_cable(make_lab: MakeLab) -> None:
    for options in {}, {"seed": 1}:
        a, b = make_lab(2, **options)
        with connected(a, b) as (ours, theirs):
            a.unplug()
            assert not has_carrier(a)
            theirs.sendall(b"late")
            a.plug()
            assert ours.recv(10) == b"late"
            a.power_off(kill=False)
            assert not has_carrier(a)
            a.power_on()
            ours.sendall(b"back")
            assert theirs.recv(10) == b"back"


# --- addresses --------------------------------------------------------------------------------------------------------


@requires_ipv6
@pytest.mark.parametrize("options", [{}, {"seed": 3}])
def test_a_lab_with_ipv6_has_no_ipv4(make_lab: MakeLab, options: dict[str, int]) -> None:
    a, b, _ = lab = make_lab(3, family="v6", **options)
    assert a.endpoint(80) == f"[{a.address}]:80"
    with connected(a, b) as (ours, theirs):
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"
    with pytest.raises(OSError, match="unreachable"):
        a.connect("10.0.0.1", 80)
    answer, _ = a.run(python(RESOLVE, "node1")).wait().out.split()
    assert answer == b.address
    a.cut("out")
    assert lost_routes(lab, undo=a.heal) == {"0→1", "0→2"}


@requires_ipv6
def test_a_host_can_have_ipv4_and_ipv6_addresses(make_lab: MakeLab) -> None:
    a, b = make_lab(2, family="both")
    assert [":" in address for address in b.addresses] == [False, True]
    for family, address in zip((socket.AF_INET, socket.AF_INET6), b.addresses, strict=True):
        make = lambda family=family, address=address: socket.create_server((address, 0), family=family)  # noqa: E731
        with b.inside(make) as server, a.connect(address, server.getsockname()[1]):
            pass


# --- slow networks ----------------------------------------------------------------------------------------------------


@requires_slow_network
def test_a_delay_lengthens_the_round_trip(make_lab: MakeLab) -> None:
    a, b, c = lab = make_lab(3, delay_ms=20)
    with datagram_sockets(a, b, c) as datagrams:

        def round_trip_s(target: Host) -> float:
            begun = time.monotonic()
            datagrams.send(a, target, "ping")
            datagrams.send(target, a, datagrams.receive(target))
            datagrams.receive(a)
            return time.monotonic() - begun

        assert round_trip_s(b) >= 0.040
        lab.shape(delay_ms=60, sources=[a], targets=[b])
        assert round_trip_s(b) >= 0.080
        lab.shape(sources=[c], targets=[a])
        assert round_trip_s(c) >= 0.020


@requires_slow_network
def test_the_same_seed_loses_the_same_packets(make_lab: MakeLab) -> None:
    def arrived(seed: int) -> list[str]:
        a, b = lab = make_lab(2, loss=0.2, seed=seed)
        with datagram_sockets(a, b) as datagrams:
            for number in range(100):
                datagrams.send(a, b, str(number))
                datagrams.send(b, a, "meanwhile")  # does not affect the other direction
            lab.shape(loss=0.0)
            datagrams.send(a, b, "last")
            return list(iter(lambda: datagrams.receive(b), "last"))

    first = arrived(7)
    assert 50 < len(first) < 100
    assert arrived(7) == first
    assert arrived(8) != first


@requires_slow_network
def test_a_lossy_network_delivers_streams_and_supports_all_faults(make_lab: MakeLab) -> None:
    a, b = make_lab(2, delay_ms=1, jitter_ms=2, loss=0.01, seed=7)
    data = bytes(range(256)) * 1000
    with connected(a, b) as (ours, theirs):
        ours.sendall(data)
        with theirs.makefile("rb") as stream:
            assert stream.read(len(data)) == data
        a.cut()
        ours.sendall(b"late")
        assert silent(theirs)
        a.heal()
        assert theirs.recv(4) == b"late"
        a.power_off()
        assert silent(theirs)
    a.power_on()
    with connected(b, a):
        pass


def test_a_fast_network_cannot_be_made_slow(lab: Lab) -> None:
    with pytest.raises(RuntimeError, match="create the lab with a delay"):
        lab.shape(delay_ms=1)


# --- names and clocks -------------------------------------------------------------------------------------------------


def test_a_dead_name_server_resolves_no_name(lab: Lab) -> None:
    for name in "node0", "node1", "example.org":
        assert lab[0].run(python(RESOLVE, name), dns="dead").wait().out.split()[0] == "error"
    assert lab[0].run(python(RESOLVE, "localhost"), dns="dead").wait().out.split()[0] in ("127.0.0.1", "::1")


def test_a_slow_name_server_answers_late(make_lab: MakeLab) -> None:
    a, b = make_lab(2)
    for name, expected in (b.name, b.address), ("unknown", "error"):
        answer, seconds = a.run(python(RESOLVE, name), dns="slow").wait().out.split()
        assert (answer, float(seconds) >= SLOW_NAME_S) == (expected, True)
        a.power_off()
        a.power_on()


@requires_ipv6
def test_a_slow_name_server_resolves_ipv6_addresses(make_lab: MakeLab) -> None:
    a, b = make_lab(2, family="v6")
    assert a.run(python(RESOLVE, b.name), dns="slow").wait().out.split()[0] == b.address


def test_a_silent_name_server_lets_the_resolver_time_out(lab: Lab) -> None:
    options = {"RES_OPTIONS": "timeout:1 attempts:1"}  # instead of 5 s, twice
    lookup = lab[0].run(python(RESOLVE, "node0"), dns="silent", env=options)
    answer, seconds = lookup.wait().out.split()
    assert (answer, float(seconds) >= 1) == ("error", True), lookup


def test_the_wall_clock_of_a_program_can_be_shifted(lab: Lab) -> None:
    """Also that of its children, and while it runs. The monotonic clock is not affected."""
    code = """
        import signal, subprocess, sys, time
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        report = "import time; print(time.time(), time.time_ns() / 1e9, time.monotonic(), flush=True)"
        while True:
            exec(report)
            subprocess.run([sys.executable, "-I", "-S", "-c", report])
            signal.sigwait({signal.SIGUSR1})
    """
    running = lab[0].run(python(code), skew_s=3600)
    for skew_s in 3600, -3600.5, 0:
        running.set_skew(skew_s)
        if skew_s != 3600:
            running.send(signal.SIGUSR1)
        for _ in "the program", "its child":
            *walls, monotonic = map(float, running.line().split())
            for wall in walls:
                assert wall - time.time() == pytest.approx(skew_s, abs=30)
            assert monotonic <= time.monotonic()
    plain = lab[0].run(["true"])
    with pytest.raises(RuntimeError, match="start it with skew_s"):
        plain.set_skew(1)


# --- isolation --------------------------------------------------------------------------------------------------------


def visible_outside() -> set[str]:
    """Return the machine's interfaces, mounts and named namespaces. Those of other programs may go at any time."""
    links = subprocess.run(["ip", "-oneline", "link"], capture_output=True, text=True, check=True).stdout
    named = Path("/run/netns")
    mounts = Path("/proc/self/mountinfo").read_text()
    names = [path.name for path in named.iterdir()] if named.exists() else []
    return {*links.splitlines(), *mounts.splitlines(), *names}


def test_two_labs_are_isolated(make_lab: MakeLab) -> None:
    """The same port is free in both, and a fault of one does not affect the other."""
    one, other = make_lab(2), make_lab(2)
    with one[1].listen(5000), one[1].listen(5001), other[1].listen(5000):
        with pytest.raises(OSError, match=r"unreachable|refused"):
            other[0].connect(one[1].address, 5001)
        with connected(other[0], other[1]) as (ours, theirs):
            one[0].cut()
            one[1].power_off()
            ours.sendall(b"x")
            assert theirs.recv(1) == b"x"


@pytest.mark.parametrize("options", [{}, {"family": "v6"}, {"delay_ms": 1}])
def test_a_lab_leaves_nothing_behind_even_if_a_test_fails(options: dict[str, object]) -> None:
    before = visible_outside()
    pids = []

    def fail_in(lab: Lab) -> None:
        assert visible_outside() <= before
        for host in lab:
            daemon = host.run(python(DAEMON), dns="slow")
            pids.extend([daemon.pid, int(daemon.line())])
        lab[0].cut()
        lab[1].power_off()
        lab[2].power_off(kill=False)
        raise ZeroDivisionError

    with leaving_nothing(), pytest.raises(ZeroDivisionError), Lab(3, **options) as lab:  # type: ignore[arg-type]
        fail_in(lab)
    assert gone(pids, within_s=0)
    assert not lab.home.exists()
    assert visible_outside() <= before


def test_a_lab_that_cannot_be_created_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = visible_outside()
    with leaving_nothing(), monkeypatch.context() as without_programs:
        without_programs.setenv("PATH", str(tmp_path))
        with pytest.raises(FileNotFoundError), Lab(2, folder=tmp_path):
            pytest.fail("the lab was created without ip")
    assert visible_outside() <= before


def test_the_reason_why_labs_are_not_possible_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not() == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not() == "the program ip is missing (Debian: apt-get install iproute2 util-linux mount)"
