"""``Link``: frames over one connection. It never blocks, bounds its buffers, and reports its end once."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes import leaving_nothing, on_linux, python
from kit.tcp import Certificates, RecordedLink, connected_pair, listener, needs_openssl, serve
from tenax._core.link import wire
from tenax._io.tls import TlsFiles

BEAT = wire.encode(wire.Beat(1))


@pytest.fixture
def ends() -> Iterator[tuple[RecordedLink, socket.socket]]:
    """Yield a link and the plain socket at its other end."""
    with leaving_nothing():
        one, other = connected_pair()
        recorded = RecordedLink(one)
        yield recorded, other
        recorded.link.close()
        other.close()


def reset(sock: socket.socket) -> None:
    """Close with a reset instead of an orderly close."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# --- frames -----------------------------------------------------------------------------------------------------------


def test_frames_arrive_whole_and_in_order(ends: tuple[RecordedLink, socket.socket]) -> None:
    recorded, other = ends
    frames = [wire.encode(wire.Beat(number)) for number in range(1000)]
    other.sendall(b"".join(frames))
    serve([recorded], lambda: len(recorded.bodies) == 1000)
    assert [wire.decode_from_agent(body) for body in recorded.bodies] == [wire.Beat(number) for number in range(1000)]


def test_invalid_bytes_close_the_link_with_a_reason(ends: tuple[RecordedLink, socket.socket]) -> None:
    recorded, other = ends
    other.sendall(b"GET / HTTP/1.1\r\n\r\n")
    serve([recorded], lambda: recorded.closed)
    assert recorded.closed is not None
    why, was_announced = recorded.closed
    assert why.startswith("invalid data: frame of ")
    assert not was_announced
    assert other.recv(1) == b""


def test_an_authenticated_peer_may_send_longer_frames(ends: tuple[RecordedLink, socket.socket]) -> None:
    recorded, other = ends
    long = wire.encode(wire.Cancel("x" * 10_000))
    recorded.link.trust()
    other.sendall(long)
    serve([recorded], lambda: recorded.bodies)
    assert recorded.bodies == [long[4:]]


def test_a_long_frame_of_an_unauthenticated_peer_is_rejected(ends: tuple[RecordedLink, socket.socket]) -> None:
    recorded, other = ends
    other.sendall(wire.encode(wire.Cancel("x" * 10_000)))
    serve([recorded], lambda: recorded.closed)
    assert recorded.bodies == []


def test_frames_after_an_invalid_one_are_dropped() -> None:
    one, other = connected_pair()
    recorded: list[bytes] = []

    def take(body: bytes) -> None:
        recorded.append(body)
        raise wire.WireError("something that was not wanted")

    from tenax._engines.tcp.link import Link

    closed: list[str] = []
    link = Link(one, take, lambda why, _: closed.append(why))
    other.sendall(BEAT * 3)
    other.close()
    while not link.is_closed:
        link.on_readable()
    assert len(recorded) == 1
    assert closed == ["invalid data: something that was not wanted"]


# --- the end of a link ------------------------------------------------------------------------------------------------


def test_an_orderly_close_by_the_peer_is_reported(ends: tuple[RecordedLink, socket.socket]) -> None:
    recorded, other = ends
    other.close()
    serve([recorded], lambda: recorded.closed)
    assert recorded.closed == ("connection closed", True)
    assert recorded.link.was_finished


def test_a_half_closed_connection_counts_as_closed(ends: tuple[RecordedLink, socket.socket]) -> None:
    """No tenax node half-closes, so the peer is gone."""
    recorded, other = ends
    other.sendall(BEAT)
    other.shutdown(socket.SHUT_WR)
    serve([recorded], lambda: recorded.closed)
    assert len(recorded.bodies) == 1, "frames before the close count"
    assert recorded.closed == ("connection closed", True)
    assert other.recv(1) == b""


def test_a_reset_by_the_peer_is_reported(ends: tuple[RecordedLink, socket.socket]) -> None:
    recorded, other = ends
    reset(other)
    serve([recorded], lambda: recorded.closed)
    assert recorded.closed == ("connection closed", True)
    assert not recorded.link.was_finished


def test_a_reset_after_frames_is_not_an_orderly_close(ends: tuple[RecordedLink, socket.socket]) -> None:
    """The kernel reports an error once; after that a read looks like an orderly close."""
    recorded, other = ends
    other.sendall(BEAT)
    reset(other)
    serve([recorded], lambda: recorded.closed)
    assert len(recorded.bodies) == 1
    assert not recorded.link.was_finished


def test_last_frames_and_the_close_are_read_after_sending_has_failed(
    ends: tuple[RecordedLink, socket.socket],
) -> None:
    """The peer left while this side was still sending: its frames count, and its close was orderly."""
    recorded, other = ends
    other.sendall(BEAT)
    other.close()
    recorded.link.send(BEAT)  # its kernel answers with a reset
    select.select([recorded.link], [], [])
    for _ in range(3):
        recorded.link.send(BEAT)
    assert not recorded.link.all_has_arrived()
    serve([recorded], lambda: recorded.closed)
    assert len(recorded.bodies) == 1
    assert recorded.link.was_finished


def test_an_answer_to_a_closed_peer_does_not_hide_its_orderly_close() -> None:
    """The answer is sent while the frame is processed; the peer's kernel resets, but the close came before."""
    with leaving_nothing():
        one, other = connected_pair()
        recorded: RecordedLink

        def answer(_: bytes) -> None:
            for _ in range(2):
                recorded.link.send(BEAT)

        recorded = RecordedLink(one, on_body=answer)
        other.sendall(BEAT)
        other.close()
        serve([recorded], lambda: recorded.closed)
        assert recorded.link.was_finished


def test_the_peer_can_distinguish_an_orderly_close_from_a_reset() -> None:
    for close, was_finished in (("finish", True), ("reset", False)):
        one, other = connected_pair()
        ours, theirs = RecordedLink(one), RecordedLink(other)
        ours.link.send(BEAT)
        if close == "finish":
            ours.link.finish(1.0)
        else:
            ours.link.reset()
        serve([theirs], lambda theirs=theirs: theirs.closed)  # type: ignore[misc]
        assert theirs.link.was_finished is was_finished


def test_sending_to_a_gone_peer_reports_the_close(ends: tuple[RecordedLink, socket.socket]) -> None:
    recorded, other = ends
    reset(other)
    while recorded.closed is None:
        recorded.link.send(BEAT)
    assert recorded.closed == ("connection closed", True)
    recorded.link.send(BEAT)  # has no effect


@pytest.mark.process
def test_the_death_of_the_peer_process_is_reported(tmp_path: Path) -> None:
    """Its kernel closes the connection, so a dead agent is detected in milliseconds."""
    with listener() as listening:
        code = "import socket,sys; s=socket.create_connection(('127.0.0.1',int(sys.argv[1]))); sys.stdin.read()"
        child = subprocess.Popen(python(code, listening.getsockname()[1]), stdin=subprocess.PIPE)
        sock, _ = listening.accept()
    recorded = RecordedLink(sock)
    child.kill()
    serve([recorded], lambda: recorded.closed)
    assert recorded.closed == ("connection closed", True)
    child.communicate()


@on_linux
def test_a_timed_out_connection_was_not_closed_by_the_peer(ends: tuple[RecordedLink, socket.socket]) -> None:
    """The other host acknowledges nothing: it may be cut off."""
    recorded, _ = ends
    recorded.link._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 50)
    while not recorded.link.wants_to_write:
        recorded.link.send(BEAT * 1000)
    serve([recorded], lambda: recorded.closed)
    assert recorded.closed == ("connection failed: Connection timed out", False)


def test_closing_without_a_reason_is_not_reported(ends: tuple[RecordedLink, socket.socket]) -> None:
    recorded, other = ends
    recorded.link.close()
    recorded.link.close("again")
    assert recorded.closed is None
    assert recorded.link.is_closed
    assert other.recv(1) == b""


def test_closing_with_a_reason_is_reported_once(ends: tuple[RecordedLink, socket.socket]) -> None:
    recorded, _ = ends
    recorded.link.close("no heartbeat")
    recorded.link.close("again")
    assert recorded.closed == ("no heartbeat", False)


# --- what is unsent ---------------------------------------------------------------------------------------------------


def test_the_buffer_for_a_peer_that_never_reads_is_bounded(ends: tuple[RecordedLink, socket.socket]) -> None:
    recorded, _ = ends
    frame = wire.encode(wire.Cancel("x" * 100_000))
    sent = 0
    while recorded.closed is None:
        recorded.link.send(frame)
        sent += len(frame)
        assert sent < 64 << 20, "the buffer is not bounded"
    assert recorded.closed == ("the peer does not read what it is sent", False)


def test_buffered_frames_are_sent_in_order(ends: tuple[RecordedLink, socket.socket]) -> None:
    recorded, other = ends
    frames = [wire.encode(wire.Cancel(f"{number} " + "x" * 1000)) for number in range(5000)]
    for frame in frames:
        recorded.link.send(frame)
    assert recorded.link.wants_to_write
    reader = RecordedLink(other)
    reader.link.trust()
    serve([recorded, reader], lambda: len(reader.bodies) == 5000)
    assert reader.bodies == [frame[4:] for frame in frames]
    assert not recorded.link.wants_to_write


@pytest.mark.process
def test_flush_waits_for_unsent_data_up_to_its_timeout(ends: tuple[RecordedLink, socket.socket]) -> None:
    recorded, other = ends
    while not recorded.link.wants_to_write:  # the peer does not read, but the kernel's buffers grow at first
        recorded.link.send(BEAT * 1000)
        recorded.link.flush(0.01)
    reader = subprocess.Popen(
        [sys.executable, "-c", "import socket,sys; s=socket.socket(fileno=0)\nwhile s.recv(1<<16): pass"], stdin=other
    )
    recorded.link.flush(30.0)
    assert not recorded.link.wants_to_write
    recorded.link.close()
    other.close()
    assert reader.wait(30) == 0


# --- acknowledged data ------------------------------------------------------------------------------------------------


@pytest.mark.process
@on_linux
def test_data_sent_to_a_stopped_process_is_acknowledged() -> None:
    """By its kernel: the host is not cut off."""
    with listener() as listening:
        code = "import socket,sys; s=socket.create_connection(('127.0.0.1',int(sys.argv[1]))); sys.stdin.read()"
        child = subprocess.Popen(python(code, listening.getsockname()[1]), stdin=subprocess.PIPE)
        sock, _ = listening.accept()
    recorded = RecordedLink(sock)
    try:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        recorded.link.send(BEAT)
        until_all_has_arrived(recorded)
    finally:
        recorded.link.close()
        child.kill()
        child.communicate()


@on_linux
def test_data_that_the_other_kernel_does_not_accept_is_not_acknowledged(
    ends: tuple[RecordedLink, socket.socket],
) -> None:
    recorded, other = ends
    recorded.link.send(BEAT)
    until_all_has_arrived(recorded)
    while not recorded.link.wants_to_write:
        recorded.link.send(BEAT * 1000)
    assert not recorded.link.all_has_arrived()
    reader = RecordedLink(other)
    serve([recorded, reader], lambda: not recorded.link.wants_to_write)
    until_all_has_arrived(recorded, reader)


def test_nothing_is_acknowledged_on_a_closed_link(ends: tuple[RecordedLink, socket.socket]) -> None:
    recorded, _ = ends
    recorded.link.close()
    assert not recorded.link.all_has_arrived()


def until_all_has_arrived(recorded: RecordedLink, *readers: RecordedLink) -> None:
    """Wait for the acknowledgement, which may be delayed until the other side sends something."""
    from kit.processes import until

    def arrived() -> bool:
        for reader in readers:
            reader.link.on_readable()
        return recorded.link.all_has_arrived()

    until(arrived, "the acknowledgement")


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def tls_ends(server: TlsFiles, client: TlsFiles, name: str = "localhost") -> tuple[RecordedLink, RecordedLink]:
    one, other = connected_pair()
    return (
        RecordedLink(one, server.for_server(), is_server=True),
        RecordedLink(other, client.for_client(), server_hostname=name),
    )


@pytest.mark.process
@needs_openssl
def test_frames_pass_through_tls_in_both_directions(certificates: Certificates) -> None:
    """Also frames sent before the handshake is done, and frames longer than a TLS record."""
    with leaving_nothing():
        files = TlsFiles(certificates.cert, certificates.key, certificates.ca)
        server, client = tls_ends(files, files)
        client.link.send(BEAT)
        serve([server, client], lambda: server.bodies)
        long = wire.encode(wire.Refused("x" * 3_000_000))
        client.link.trust()
        for _ in range(3):
            server.link.send(long)
        serve([server, client], lambda: len(client.bodies) == 3)
        assert server.bodies == [BEAT[4:]]
        assert client.bodies == [long[4:]] * 3
        client.link.close()
        serve([server], lambda: server.closed)
        assert server.closed == ("connection closed", True)


@needs_openssl
def test_a_tls_stream_contains_no_plain_text(certificates: Certificates) -> None:
    files = TlsFiles(certificates.cert, certificates.key, certificates.ca)
    one, other = connected_pair()
    client = RecordedLink(other, files.for_client(), server_hostname="localhost")
    client.link.send(wire.encode(wire.Cancel("a secret word")))
    assert b"secret" not in one.recv(1 << 16)
    assert not client.bodies
    client.link.close()
    one.close()


@needs_openssl
def test_a_server_with_an_untrusted_certificate_is_rejected(certificates: Certificates) -> None:
    server, client = tls_ends(TlsFiles(certificates.other_cert, certificates.other_key), TlsFiles(ca=certificates.ca))
    serve([server, client], lambda: server.closed and client.closed)
    assert client.closed is not None
    assert client.closed[0].startswith("TLS handshake failed: ")
    assert not client.closed[1]


@needs_openssl
def test_a_server_with_a_certificate_for_another_name_is_rejected(certificates: Certificates) -> None:
    server, client = tls_ends(
        TlsFiles(certificates.cert, certificates.key), TlsFiles(ca=certificates.ca), "elsewhere.example"
    )
    serve([server, client], lambda: client.closed)
    assert client.closed is not None
    assert "elsewhere.example" in client.closed[0]
    server.link.close()


@needs_openssl
@pytest.mark.parametrize("certificate", ["none", "untrusted"])
def test_a_client_without_a_trusted_certificate_is_rejected(certificates: Certificates, certificate: str) -> None:
    """Mutual TLS."""
    theirs = TlsFiles(ca=certificates.ca)
    if certificate == "untrusted":
        theirs = TlsFiles(certificates.other_cert, certificates.other_key, certificates.ca)
    server, client = tls_ends(TlsFiles(certificates.cert, certificates.key, certificates.ca), theirs)
    client.link.send(BEAT)
    serve([server, client], lambda: server.closed and client.closed)
    assert server.closed is not None
    assert server.closed[0].startswith("TLS handshake failed: ")
    assert server.bodies == []


@needs_openssl
def test_both_sides_report_that_only_one_uses_tls(certificates: Certificates) -> None:
    """And that a retry does not help."""
    files = TlsFiles(certificates.cert, certificates.key, certificates.ca)
    for with_tls, is_server in ((files.for_server(), True), (files.for_client(), False)):
        one, other = connected_pair()
        hostname = None if is_server else "localhost"
        tls, plain = RecordedLink(one, with_tls, is_server=is_server, server_hostname=hostname), RecordedLink(other)
        plain.link.send(BEAT)
        serve([tls, plain], lambda tls=tls, plain=plain: tls.closed and plain.closed)  # type: ignore[misc]
        assert tls.closed is not None
        assert plain.closed == ("the peer uses TLS and this side does not", False)
        assert "TLS" in tls.closed[0]
        assert tls.link.is_tls_mismatch
        assert plain.link.is_tls_mismatch


@needs_openssl
def test_unusable_tls_files_are_rejected_with_a_message(certificates: Certificates, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    for files in (
        TlsFiles(str(tmp_path / "missing.pem"), certificates.key),
        TlsFiles(str(empty), certificates.key),
        TlsFiles(certificates.cert, certificates.other_key),
        TlsFiles(ca=str(empty)),
    ):
        with pytest.raises(ValueError, match=r"^could not load the TLS files \(.*\): "):
            files.for_client()
    with pytest.raises(ValueError, match="needs a certificate"):
        TlsFiles(ca=certificates.ca).for_server()
