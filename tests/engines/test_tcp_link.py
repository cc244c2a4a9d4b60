"""A link: frames over one connection; it never blocks, bounds what it holds, and says once how it ended."""

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
from kit.tcp import Certificates, HeardLink, connected_pair, listener, needs_openssl, serve
from tenax._engines.tcp import wire
from tenax._io.tls import TlsFiles

BEAT = wire.encode(wire.Beat(1))


@pytest.fixture
def ends() -> Iterator[tuple[HeardLink, socket.socket]]:
    """A link, and the plain socket at its other end."""
    with leaving_nothing():
        one, other = connected_pair()
        heard = HeardLink(one)
        yield heard, other
        heard.link.close()
        other.close()


def reset(sock: socket.socket) -> None:
    """Close so that the other side gets an error instead of an end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# --- frames -----------------------------------------------------------------------------------------------------------


def test_frames_arrive_whole_and_in_order(ends: tuple[HeardLink, socket.socket]) -> None:
    heard, other = ends
    frames = [wire.encode(wire.Beat(number)) for number in range(1000)]
    other.sendall(b"".join(frames))
    serve([heard], lambda: len(heard.bodies) == 1000)
    assert [wire.decode_from_agent(body) for body in heard.bodies] == [wire.Beat(number) for number in range(1000)]


def test_what_is_not_a_frame_closes_the_link_with_a_sentence(ends: tuple[HeardLink, socket.socket]) -> None:
    heard, other = ends
    other.sendall(b"GET / HTTP/1.1\r\n\r\n")
    serve([heard], lambda: heard.closed)
    assert heard.closed is not None
    why, was_told = heard.closed
    assert why.startswith("invalid data: frame of ")
    assert not was_told
    assert other.recv(1) == b""


def test_a_stranger_may_send_little_and_a_trusted_peer_more(ends: tuple[HeardLink, socket.socket]) -> None:
    heard, other = ends
    long = wire.encode(wire.Cancel("x" * 10_000))
    heard.link.trust()
    other.sendall(long)
    serve([heard], lambda: heard.bodies)
    assert heard.bodies == [long[4:]]


def test_a_long_frame_of_a_stranger_is_refused(ends: tuple[HeardLink, socket.socket]) -> None:
    heard, other = ends
    other.sendall(wire.encode(wire.Cancel("x" * 10_000)))
    serve([heard], lambda: heard.closed)
    assert heard.bodies == []


def test_frames_after_one_that_closed_the_link_are_not_given() -> None:
    one, other = connected_pair()
    heard: list[bytes] = []

    def take(body: bytes) -> None:
        heard.append(body)
        raise wire.WireError("something that was not wanted")

    from tenax._engines.tcp.link import Link

    closed: list[str] = []
    link = Link(one, take, lambda why, _: closed.append(why))
    other.sendall(BEAT * 3)
    other.close()
    while not link.is_closed:
        link.on_readable()
    assert len(heard) == 1
    assert closed == ["invalid data: something that was not wanted"]


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_a_peer_that_closes_has_told_us(ends: tuple[HeardLink, socket.socket]) -> None:
    heard, other = ends
    other.close()
    serve([heard], lambda: heard.closed)
    assert heard.closed == ("connection closed", True)
    assert heard.link.was_finished


def test_a_peer_that_only_stops_sending_is_gone_too(ends: tuple[HeardLink, socket.socket]) -> None:
    """Half-open: no tenax node does that, so nobody is there any more."""
    heard, other = ends
    other.sendall(BEAT)
    other.shutdown(socket.SHUT_WR)
    serve([heard], lambda: heard.closed)
    assert len(heard.bodies) == 1, "what it had said before counts"
    assert heard.closed == ("connection closed", True)
    assert other.recv(1) == b""


def test_a_reset_has_told_us(ends: tuple[HeardLink, socket.socket]) -> None:
    heard, other = ends
    reset(other)
    serve([heard], lambda: heard.closed)
    assert heard.closed == ("connection closed", True)
    assert not heard.link.was_finished


def test_a_reset_after_words_is_still_a_reset(ends: tuple[HeardLink, socket.socket]) -> None:
    """The system tells an error once; who asked for it too early would take what follows for an end in good order."""
    heard, other = ends
    other.sendall(BEAT)
    reset(other)
    serve([heard], lambda: heard.closed)
    assert len(heard.bodies) == 1
    assert not heard.link.was_finished


def test_last_words_and_the_end_are_read_although_nothing_can_be_sent_any_more(
    ends: tuple[HeardLink, socket.socket],
) -> None:
    """It has left while we were still talking to it: its words count, and it left in good order."""
    heard, other = ends
    other.sendall(BEAT)
    other.close()
    heard.link.send(BEAT)  # which its system answers with a reset
    select.select([heard.link], [], [])
    for _ in range(3):
        heard.link.send(BEAT)
    assert not heard.link.all_has_arrived()
    serve([heard], lambda: heard.closed)
    assert len(heard.bodies) == 1
    assert heard.link.was_finished


def test_a_word_that_is_answered_after_its_sender_has_left_does_not_hide_how_it_left() -> None:
    """The answer is sent while the word is taken; its system resets, and the end had come before."""
    with leaving_nothing():
        one, other = connected_pair()
        heard: HeardLink

        def answer(_: bytes) -> None:
            for _ in range(2):
                heard.link.send(BEAT)

        heard = HeardLink(one, on_body=answer)
        other.sendall(BEAT)
        other.close()
        serve([heard], lambda: heard.closed)
        assert heard.link.was_finished


def test_the_two_ways_to_close_are_told_apart_at_the_other_end() -> None:
    for close, was_finished in (("finish", True), ("reset", False)):
        one, other = connected_pair()
        ours, theirs = HeardLink(one), HeardLink(other)
        ours.link.send(BEAT)
        if close == "finish":
            ours.link.finish(1.0)
        else:
            ours.link.reset()
        serve([theirs], lambda theirs=theirs: theirs.closed)  # type: ignore[misc]
        assert theirs.link.was_finished is was_finished


def test_sending_to_a_peer_that_is_gone_tells_the_same(ends: tuple[HeardLink, socket.socket]) -> None:
    heard, other = ends
    reset(other)
    while heard.closed is None:
        heard.link.send(BEAT)
    assert heard.closed == ("connection closed", True)
    heard.link.send(BEAT)  # which is no use, and no harm


@pytest.mark.process
def test_a_killed_process_has_told_us(tmp_path: Path) -> None:
    """Its kernel does: that is how a dead agent is known in milliseconds."""
    with listener() as door:
        code = "import socket,sys; s=socket.create_connection(('127.0.0.1',int(sys.argv[1]))); sys.stdin.read()"
        child = subprocess.Popen(python(code, door.getsockname()[1]), stdin=subprocess.PIPE)
        sock, _ = door.accept()
    heard = HeardLink(sock)
    child.kill()
    serve([heard], lambda: heard.closed)
    assert heard.closed == ("connection closed", True)
    child.communicate()


@on_linux
def test_a_connection_that_times_out_is_broken_and_nobody_told_us(ends: tuple[HeardLink, socket.socket]) -> None:
    """The other host's system takes nothing more: for all we know, it is cut off."""
    heard, _ = ends
    heard.link._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 50)
    while not heard.link.wants_to_write:
        heard.link.send(BEAT * 1000)
    serve([heard], lambda: heard.closed)
    assert heard.closed == ("connection failed: Connection timed out", False)


def test_our_own_close_is_told_to_nobody(ends: tuple[HeardLink, socket.socket]) -> None:
    heard, other = ends
    heard.link.close()
    heard.link.close("again")
    assert heard.closed is None
    assert heard.link.is_closed
    assert other.recv(1) == b""


def test_closing_with_a_reason_tells_it_once(ends: tuple[HeardLink, socket.socket]) -> None:
    heard, _ = ends
    heard.link.close("it was silent")
    heard.link.close("again")
    assert heard.closed == ("it was silent", False)


# --- what is unsent ---------------------------------------------------------------------------------------------------


def test_a_peer_that_never_reads_costs_a_bounded_amount(ends: tuple[HeardLink, socket.socket]) -> None:
    heard, _ = ends
    frame = wire.encode(wire.Cancel("x" * 100_000))
    sent = 0
    while heard.closed is None:
        heard.link.send(frame)
        sent += len(frame)
        assert sent < 64 << 20, "there must be an end to it"
    assert heard.closed == ("the peer does not read what it is sent", False)


def test_what_could_not_be_sent_at_once_follows_in_order(ends: tuple[HeardLink, socket.socket]) -> None:
    heard, other = ends
    frames = [wire.encode(wire.Cancel(f"{number} " + "x" * 1000)) for number in range(5000)]
    for frame in frames:
        heard.link.send(frame)
    assert heard.link.wants_to_write
    reader = HeardLink(other)
    reader.link.trust()
    serve([heard, reader], lambda: len(reader.bodies) == 5000)
    assert reader.bodies == [frame[4:] for frame in frames]
    assert not heard.link.wants_to_write


@pytest.mark.process
def test_flush_gives_what_is_unsent_a_moment_and_no_more(ends: tuple[HeardLink, socket.socket]) -> None:
    heard, other = ends
    while not heard.link.wants_to_write:
        heard.link.send(BEAT * 1000)
    heard.link.flush(0.01)  # nobody reads
    assert heard.link.wants_to_write
    reader = subprocess.Popen(
        [sys.executable, "-c", "import socket,sys; s=socket.socket(fileno=0)\nwhile s.recv(1<<16): pass"], stdin=other
    )
    heard.link.flush(30.0)
    assert not heard.link.wants_to_write
    heard.link.close()
    other.close()
    assert reader.wait(30) == 0


# --- what has arrived -------------------------------------------------------------------------------------------------


@pytest.mark.process
@on_linux
def test_what_a_stopped_process_was_sent_has_arrived() -> None:
    """Its host's system takes it: the host is not cut off, whatever the process does."""
    with listener() as door:
        code = "import socket,sys; s=socket.create_connection(('127.0.0.1',int(sys.argv[1]))); sys.stdin.read()"
        child = subprocess.Popen(python(code, door.getsockname()[1]), stdin=subprocess.PIPE)
        sock, _ = door.accept()
    heard = HeardLink(sock)
    try:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        heard.link.send(BEAT)
        until_all_has_arrived(heard)
    finally:
        heard.link.close()
        child.kill()
        child.communicate()


@on_linux
def test_what_the_other_system_does_not_take_has_not_arrived(ends: tuple[HeardLink, socket.socket]) -> None:
    heard, other = ends
    heard.link.send(BEAT)
    until_all_has_arrived(heard)
    while not heard.link.wants_to_write:
        heard.link.send(BEAT * 1000)
    assert not heard.link.all_has_arrived()
    reader = HeardLink(other)
    serve([heard, reader], lambda: not heard.link.wants_to_write)
    until_all_has_arrived(heard, reader)


def test_nothing_arrives_on_a_closed_link(ends: tuple[HeardLink, socket.socket]) -> None:
    heard, _ = ends
    heard.link.close()
    assert not heard.link.all_has_arrived()


def until_all_has_arrived(heard: HeardLink, *readers: HeardLink) -> None:
    """An acknowledgement may take a moment, and nobody announces it: the other side answers, and that carries it."""
    from kit.processes import until

    def arrived() -> bool:
        for reader in readers:
            reader.link.on_readable()
        return heard.link.all_has_arrived()

    until(arrived, "the acknowledgement")


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def tls_ends(server: TlsFiles, client: TlsFiles, name: str = "localhost") -> tuple[HeardLink, HeardLink]:
    one, other = connected_pair()
    return (
        HeardLink(one, server.for_server(), is_server=True),
        HeardLink(other, client.for_client(), server_hostname=name),
    )


@pytest.mark.process
@needs_openssl
def test_frames_pass_through_tls_in_both_directions(certificates: Certificates) -> None:
    """Also what was said before the handshake was done, and frames that are much longer than a TLS record."""
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
def test_nothing_in_a_tls_stream_can_be_read_on_the_way(certificates: Certificates) -> None:
    files = TlsFiles(certificates.cert, certificates.key, certificates.ca)
    one, other = connected_pair()
    client = HeardLink(other, files.for_client(), server_hostname="localhost")
    client.link.send(wire.encode(wire.Cancel("a secret word")))
    assert b"secret" not in one.recv(1 << 16)
    assert not client.bodies
    client.link.close()
    one.close()


@needs_openssl
def test_a_server_of_another_authority_is_not_believed(certificates: Certificates) -> None:
    server, client = tls_ends(
        TlsFiles(certificates.strange_cert, certificates.strange_key), TlsFiles(ca=certificates.ca)
    )
    serve([server, client], lambda: server.closed and client.closed)
    assert client.closed is not None
    assert client.closed[0].startswith("TLS handshake failed: ")
    assert not client.closed[1]


@needs_openssl
def test_a_server_of_another_name_is_not_believed(certificates: Certificates) -> None:
    server, client = tls_ends(
        TlsFiles(certificates.cert, certificates.key), TlsFiles(ca=certificates.ca), "elsewhere.example"
    )
    serve([server, client], lambda: client.closed)
    assert client.closed is not None
    assert "elsewhere.example" in client.closed[0]
    server.link.close()


@needs_openssl
@pytest.mark.parametrize("who", ["nobody", "stranger"])
def test_a_client_without_a_certificate_of_our_authority_is_refused(certificates: Certificates, who: str) -> None:
    """Mutual TLS: the coordinator asks for one."""
    theirs = TlsFiles(ca=certificates.ca)
    if who == "stranger":
        theirs = TlsFiles(certificates.strange_cert, certificates.strange_key, certificates.ca)
    server, client = tls_ends(TlsFiles(certificates.cert, certificates.key, certificates.ca), theirs)
    client.link.send(BEAT)
    serve([server, client], lambda: server.closed and client.closed)
    assert server.closed is not None
    assert server.closed[0].startswith("TLS handshake failed: ")
    assert server.bodies == []


@needs_openssl
def test_two_sides_of_which_one_has_tls_both_say_what_is_wrong(certificates: Certificates) -> None:
    """And that it is of no use to try again."""
    files = TlsFiles(certificates.cert, certificates.key, certificates.ca)
    for with_tls, is_server in ((files.for_server(), True), (files.for_client(), False)):
        one, other = connected_pair()
        hostname = None if is_server else "localhost"
        tls, plain = HeardLink(one, with_tls, is_server=is_server, server_hostname=hostname), HeardLink(other)
        plain.link.send(BEAT)
        serve([tls, plain], lambda tls=tls, plain=plain: tls.closed and plain.closed)  # type: ignore[misc]
        assert tls.closed is not None
        assert plain.closed == ("the peer uses TLS and this side does not", False)
        assert "TLS" in tls.closed[0]
        assert tls.link.is_tls_mismatch
        assert plain.link.is_tls_mismatch


@needs_openssl
def test_files_that_cannot_be_used_are_a_sentence(certificates: Certificates, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    for files in (
        TlsFiles(str(tmp_path / "missing.pem"), certificates.key),
        TlsFiles(str(empty), certificates.key),
        TlsFiles(certificates.cert, certificates.strange_key),
        TlsFiles(ca=str(empty)),
    ):
        with pytest.raises(ValueError, match=r"^could not load the TLS files \(.*\): "):
            files.for_client()
    with pytest.raises(ValueError, match="needs a certificate"):
        TlsFiles(ca=certificates.ca).for_server()
