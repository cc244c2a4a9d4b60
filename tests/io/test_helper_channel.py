"""Channel: complete messages with their descriptors, never blocking, and a reliable error when the peer is gone."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from kit.processes import descriptors, forks_with_threads, leaving_nothing
from tenax._io.helper_channel import Channel, ChannelClosed


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    with leaving_nothing():
        ours, theirs = Channel.pair()
        other = Channel(theirs)
        yield ours, other
        ours.close()
        other.close()


def received(channel: Channel) -> list[tuple[object, ...]]:
    return [message for message, _ in channel.receive()]


def test_messages_arrive_complete_and_in_order(ends: tuple[Channel, Channel]) -> None:
    """Plain values of every kind are received as they were sent."""
    ours, theirs = ends
    sent = [("start", 1, {"env": {"A": "ü", "B": "\udcff"}, "cpus": [0, 1]}), (b"\0\xff", 1.5, None, True, [])]
    for message in sent:
        ours.send(message)
    assert received(theirs) == sent
    assert received(theirs) == []


def test_a_message_larger_than_the_socket_buffer_is_queued(ends: tuple[Channel, Channel]) -> None:
    """If the peer does not read, send returns; the rest is queued, counted, and sent when the peer reads."""
    ours, theirs = ends
    big = bytes(5 << 20)
    ours.send((big,))
    assert ours.wants_to_write
    assert ours.queued_bytes > 0
    got: list[tuple[object, ...]] = []
    while not got:
        ours.flush()
        got += received(theirs)
    assert got == [(big,)]
    assert not ours.wants_to_write
    assert ours.queued_bytes == 0


def test_an_incomplete_message_is_not_returned(ends: tuple[Channel, Channel]) -> None:
    """Wherever the stream is cut."""
    ours, theirs = ends
    packet = _packet(("hello", 1))
    raw = socket.socket(fileno=os.dup(ours.fileno()))
    for index in range(len(packet) - 1):
        raw.send(packet[index : index + 1])
        assert received(theirs) == []
    raw.send(packet[-1:])
    raw.close()
    assert received(theirs) == [("hello", 1)]


def _packet(message: tuple[object, ...]) -> bytes:
    ours, theirs = Channel.pair()
    ours.send(message)
    data = theirs.recv(1 << 16)
    ours.close()
    theirs.close()
    return data


def test_each_message_arrives_with_its_own_descriptors(ends: tuple[Channel, Channel]) -> None:
    """In order, even if several messages are read at once."""
    ours, theirs = ends
    pipes = [os.pipe() for _ in range(6)]
    ours.send(("none",))
    ours.send(("one",), [pipes[0][1]])
    ours.send(("none again",))
    ours.send(("many",), [writer for _, writer in pipes[1:]])
    got = {message[0]: fds for message, fds in theirs.receive()}
    assert {name: len(fds) for name, fds in got.items()} == {"none": 0, "one": 1, "none again": 0, "many": 5}
    for number, descriptor in enumerate([*got["one"], *got["many"]]):
        os.write(descriptor, b"%d" % number)
        assert os.read(pipes[number][0], 10) == b"%d" % number
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)
    for reader, writer in pipes:
        os.close(reader)
        os.close(writer)


def test_descriptors_of_a_queued_message_stay_open(ends: tuple[Channel, Channel]) -> None:
    """The sender may close its descriptor while the message is still queued."""
    ours, theirs = ends
    ours.send((bytes(2 << 20),))
    reader, writer = os.pipe()
    ours.send(("late",), [writer])
    os.close(writer)
    got: list[int] = []
    while not got:
        ours.flush()
        got += [fd for _, fds in theirs.receive() for fd in fds]
    os.write(got[0], b"x")
    assert os.read(reader, 1) == b"x"
    os.close(got[0])
    os.close(reader)


def test_messages_sent_before_close_arrive(ends: tuple[Channel, Channel]) -> None:
    """ChannelClosed is raised after the last message."""
    ours, theirs = ends
    ours.send(("last",))
    ours.close()
    messages = theirs.receive()
    assert next(messages) == (("last",), [])
    with pytest.raises(ChannelClosed):
        next(messages)


def test_sending_to_a_closed_peer_raises_channel_closed(ends: tuple[Channel, Channel]) -> None:
    """Neither SIGPIPE nor an OSError."""
    ours, theirs = ends
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.send(("lost",))


def test_close_ends_the_stream_even_if_a_copy_of_the_descriptor_is_open(ends: tuple[Channel, Channel]) -> None:
    """A copy in a forked process does not hide the close from the peer."""
    ours, theirs = ends
    copy = os.dup(ours.fileno())
    ours.close()
    assert select.select([theirs], [], [], 0)[0], "the peer does not see the close"
    with pytest.raises(ChannelClosed):
        received(theirs)
    os.close(copy)


@pytest.mark.process
def test_a_forked_process_inherits_no_channel(ends: tuple[Channel, Channel]) -> None:
    """Otherwise a helper would not notice the death of its agent while a child of the agent lives."""
    ours, theirs = ends
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        inherited = {ours.fileno(), theirs.fileno()} & set(descriptors())
        os.write(writer, b"%d" % len(inherited))
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 10) == b"0"
    os.close(reader)
    os.close(writer)
    ours.send(("still here",))
    assert received(theirs) == [("still here",)]


@pytest.mark.process
@forks_with_threads
def test_a_fork_does_not_affect_channels_of_other_threads() -> None:
    """Forking closes only the copies in the child."""
    errors: list[object] = []
    stop = threading.Event()

    def use_channels() -> None:
        while not stop.is_set():
            ours, raw = Channel.pair()
            theirs = Channel(raw)
            ours.send(("ping",))
            if received(theirs) != [("ping",)]:
                errors.append("lost")
            ours.close()
            theirs.close()

    with leaving_nothing():
        threads = [threading.Thread(target=use_channels) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            errors += [status] if (status := os.waitpid(pid, 0)[1]) else []
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


def test_close_closes_queued_and_received_descriptors(ends: tuple[Channel, Channel]) -> None:
    """On both sides. Closing twice is allowed."""
    ours, theirs = ends
    reader, writer = os.pipe()
    ours.send((bytes(2 << 20),))
    ours.send(("queued",), [writer])
    theirs.send(("arrived",), [writer])
    messages = ours.receive()  # a generator: nothing is received yet
    ours.close()
    ours.close()
    messages.close()
    os.close(writer)
    theirs.close()
    assert os.read(reader, 1) == b"", "the write end is still open"
    os.close(reader)


def test_too_many_descriptors_raise_a_value_error(ends: tuple[Channel, Channel]) -> None:
    """And nothing is sent."""
    ours, theirs = ends
    with pytest.raises(ValueError, match="at most"):
        ours.send(("too many",), [0] * 251)
    assert not ours.wants_to_write
    assert received(theirs) == []
    ours.send(("the maximum",), [0] * 250)
    ((message, fds),) = theirs.receive()
    assert message == ("the maximum",)
    assert len(fds) == 250
    for descriptor in fds:
        os.close(descriptor)


@pytest.mark.process
def test_lost_descriptors_close_the_channel() -> None:
    """A receiver without free descriptors gets an error, not another message's descriptors."""
    code = """
    import os, resource, sys
    from tenax._io.helper_channel import Channel, ChannelClosed
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    ours.send(("first",), [1, 1, 1])
    ours.send(("second",), [2])
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, highest + 1))
    try:
        for message, fds in other.receive():
            print(message, len(fds))
    except ChannelClosed as error:
        print(error)
    """
    import subprocess

    from kit.processes import python

    done = subprocess.run(python(code, flags=()), capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "second" not in done.stdout
    assert "open files" in done.stdout
