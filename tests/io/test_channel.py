"""Channel: whole messages with their descriptors, never blocking, and a sure sign when the other end is gone."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from kit.processes import descriptors, forks_with_threads, leaving_nothing
from tenax._io.channel import Channel, ChannelClosed


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    with leaving_nothing():
        ours, theirs = Channel.pair()
        other = Channel(theirs)
        yield ours, other
        ours.close()
        other.close()


def heard(channel: Channel) -> list[tuple[object, ...]]:
    return [message for message, _ in channel.receive()]


def test_messages_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    """Plain values of every kind come out as they went in, one message at a time."""
    ours, theirs = ends
    sent = [("start", 1, {"env": {"A": "ü", "B": "\udcff"}, "cpus": [0, 1]}), (b"\0\xff", 1.5, None, True, [])]
    for message in sent:
        ours.send(message)
    assert heard(theirs) == sent
    assert heard(theirs) == []


def test_a_message_larger_than_the_socket_waits_without_blocking(ends: tuple[Channel, Channel]) -> None:
    """Nobody reads: send returns, the rest is queued and counted; it is sent when the peer reads."""
    ours, theirs = ends
    big = bytes(5 << 20)
    ours.send((big,))
    assert ours.wants_to_write
    assert ours.queued_bytes > 0
    got: list[tuple[object, ...]] = []
    while not got:
        ours.flush()
        got += heard(theirs)
    assert got == [(big,)]
    assert not ours.wants_to_write
    assert ours.queued_bytes == 0


def test_a_message_that_has_half_arrived_is_not_given_out(ends: tuple[Channel, Channel]) -> None:
    """A message is whole or not there, wherever the stream happens to be cut."""
    ours, theirs = ends
    packet = _packet(("hello", 1))
    raw = socket.socket(fileno=os.dup(ours.fileno()))
    for index in range(len(packet) - 1):
        raw.send(packet[index : index + 1])
        assert heard(theirs) == []
    raw.send(packet[-1:])
    raw.close()
    assert heard(theirs) == [("hello", 1)]


def _packet(message: tuple[object, ...]) -> bytes:
    ours, theirs = Channel.pair()
    ours.send(message)
    data = theirs.recv(1 << 16)
    ours.close()
    theirs.close()
    return data


def test_descriptors_come_with_their_own_message(ends: tuple[Channel, Channel]) -> None:
    """Each message brings its own descriptors, in order, however many messages are read at once."""
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


def test_descriptors_of_a_queued_message_are_kept_open(ends: tuple[Channel, Channel]) -> None:
    """The sender may close its descriptor at once, also when the message still waits in the queue."""
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


def test_what_was_sent_before_the_end_still_arrives(ends: tuple[Channel, Channel]) -> None:
    """The end of the stream is said after the last message, not instead of it."""
    ours, theirs = ends
    ours.send(("last",))
    ours.close()
    messages = theirs.receive()
    assert next(messages) == (("last",), [])
    with pytest.raises(ChannelClosed):
        next(messages)


def test_sending_to_nobody_says_so(ends: tuple[Channel, Channel]) -> None:
    """A peer that is gone is an exception of its own, not a signal and not an OSError."""
    ours, theirs = ends
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.send(("anyone?",))


def test_close_ends_the_stream_although_somebody_holds_a_copy(ends: tuple[Channel, Channel]) -> None:
    """A copy of our end (in a process that was forked meanwhile) does not hide from the peer that we let go."""
    ours, theirs = ends
    copy = os.dup(ours.fileno())
    ours.close()
    assert select.select([theirs], [], [], 0)[0], "the peer waits for whoever holds the copy"
    with pytest.raises(ChannelClosed):
        heard(theirs)
    os.close(copy)


@pytest.mark.process
def test_a_forked_process_holds_no_channel_of_its_parent(ends: tuple[Channel, Channel]) -> None:
    """Else a helper would not notice the death of its agent while some child of the agent lives on."""
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
    assert heard(theirs) == [("still here",)]


@pytest.mark.process
@forks_with_threads
def test_a_fork_while_other_threads_open_channels_is_harmless() -> None:
    """Forking closes copies only: channels that other threads of the parent open and close go on working."""
    wrong: list[object] = []
    stop = threading.Event()

    def use_channels() -> None:
        while not stop.is_set():
            ours, raw = Channel.pair()
            theirs = Channel(raw)
            ours.send(("ping",))
            if heard(theirs) != [("ping",)]:
                wrong.append("lost")
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
            wrong += [status] if (status := os.waitpid(pid, 0)[1]) else []
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_close_forgets_what_nobody_took(ends: tuple[Channel, Channel]) -> None:
    """Descriptors that wait in a queue on either side are closed with the channel, and closing twice is allowed."""
    ours, theirs = ends
    reader, writer = os.pipe()
    ours.send((bytes(2 << 20),))
    ours.send(("queued",), [writer])
    theirs.send(("arrived",), [writer])
    messages = ours.receive()  # a generator: nothing is taken yet
    ours.close()
    ours.close()
    messages.close()
    os.close(writer)
    theirs.close()
    assert os.read(reader, 1) == b"", "somebody still holds the write end"
    os.close(reader)


def test_too_many_descriptors_are_refused_in_words(ends: tuple[Channel, Channel]) -> None:
    """A message can carry a bounded number of descriptors; more is a mistake that is named, and nothing is sent."""
    ours, theirs = ends
    with pytest.raises(ValueError, match="at most"):
        ours.send(("too many",), [0] * 251)
    assert not ours.wants_to_write
    assert heard(theirs) == []
    ours.send(("as many as allowed",), [0] * 250)
    ((message, fds),) = theirs.receive()
    assert message == ("as many as allowed",)
    assert len(fds) == 250
    for descriptor in fds:
        os.close(descriptor)


@pytest.mark.process
def test_lost_descriptors_are_not_mistaken_for_others() -> None:
    """A receiver that may open no more files is told so, rather than given another message's descriptors."""
    code = """
    import os, resource, sys
    from tenax._io.channel import Channel, ChannelClosed
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
