"""Signals as events: handled during a run, with the handlers restored afterwards."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kit.processes import TIMEOUT_S, leaving_nothing
from tenax._core.events import NoticeReceived, SignalReceived
from tenax._io.loop import Loop
from tenax._node.signals import DEFAULT_SIGNALS, SignalSource, parse_signals

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture
def loop() -> Iterator[Loop]:
    with leaving_nothing():
        made = Loop()
        yield made
        made.close()


@pytest.fixture(autouse=True)
def handlers() -> Iterator[list[int]]:
    """Handlers of the host program, which record the signals they receive."""
    seen: list[int] = []
    before = {number: signal.signal(number, lambda number, _: seen.append(number)) for number in (USR1, USR2)}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def take(loop: Loop, source: SignalSource) -> list[int]:
    """Return the signals received so far. (A signal to this process has arrived when ``os.kill`` returns.)"""
    source.on_readable()
    taken = []
    while isinstance(event := loop.next_event(loop.now), SignalReceived):
        taken.append(event.signal)
    return taken


def test_signal_names_are_parsed() -> None:
    """Spaces, empty parts and repeated names are allowed."""
    assert parse_signals(DEFAULT_SIGNALS) == [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    assert parse_signals(" SIGUSR1 ,, SIGTERM,") == [USR1, signal.SIGTERM]
    assert parse_signals("SIGUSR1,SIGUSR1") == [USR1]
    assert parse_signals("") == []


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ("SIGNOPE", "unknown signal 'SIGNOPE'; use names such as SIGTERM"),
        ("SIG_IGN", "unknown signal 'SIG_IGN'"),
        ("15", "unknown signal '15'"),
        ("SIGTERM,SIGKILL", "SIGKILL cannot be caught; remove it"),
        ("SIGSTOP", "SIGSTOP cannot be caught"),
    ],
)
def test_invalid_names_are_rejected_with_a_message(names: str, sentence: str) -> None:
    """Unknown names, and signals that cannot be caught."""
    with pytest.raises(ValueError, match=sentence):
        parse_signals(names)


def test_chosen_signals_become_events(loop: Loop, handlers: list[int]) -> None:
    """In order; the host's handler is not called."""
    with SignalSource(loop, [USR1, USR2]) as source:
        for number in (USR1, USR2, USR1):
            os.kill(os.getpid(), number)
        assert take(loop, source) == [USR1, USR2, USR1]
    assert handlers == []


@pytest.mark.parametrize(("notice_s", "expected"), [(None, 41.5), (60.0, 60.0)])
def test_the_scheduler_is_asked_for_a_time_that_is_not_given(
    loop: Loop, notice_s: float | None, expected: float
) -> None:
    with SignalSource(loop, [USR2], notices=[USR1], notice_s=notice_s, ask_notice_s=lambda: 41.5) as source:
        os.kill(os.getpid(), USR1)
        source.on_readable()
        event = loop.next_event(lambda: loop.now() + 10)
        assert event == NoticeReceived("its agent received SIGUSR1", expected)


@pytest.mark.parametrize("notice_s", [None, 60.0])
def test_a_notice_signal_becomes_a_notice_event(loop: Loop, handlers: list[int], notice_s: float | None) -> None:
    """With the time until the node must leave, if known; other signals are unaffected."""
    with SignalSource(loop, [USR2], notices=[USR1], notice_s=notice_s) as source:
        for number in (USR1, USR2):
            os.kill(os.getpid(), number)
        source.on_readable()
        assert [loop.next_event(loop.now) for _ in range(2)] == [
            NoticeReceived("its agent received SIGUSR1", notice_s),
            SignalReceived(USR2),
        ]
    os.kill(os.getpid(), USR1)
    assert handlers == [USR1]


def test_an_ignored_notice_signal_stays_ignored(loop: Loop) -> None:
    signal.signal(USR1, signal.SIG_IGN)
    with SignalSource(loop, [USR2], notices=[USR1]) as source:
        os.kill(os.getpid(), USR1)
        os.kill(os.getpid(), USR2)
        assert take(loop, source) == [USR2]


def test_the_hosts_handlers_are_restored(loop: Loop, handlers: list[int]) -> None:
    """And its wakeup descriptor."""
    host_reader, host_writer = socket.socketpair()
    for end in (host_reader, host_writer):
        end.setblocking(False)
    before = signal.set_wakeup_fd(host_writer.fileno(), warn_on_full_buffer=False)
    try:
        with SignalSource(loop, [USR1]):
            pass
        os.kill(os.getpid(), USR1)
        assert handlers == [USR1]
        assert host_reader.recv(10) == bytes([USR1])
    finally:
        assert signal.set_wakeup_fd(before) == host_writer.fileno()
        host_reader.close()
        host_writer.close()


def test_a_repeated_name_still_restores_the_hosts_handler(loop: Loop, handlers: list[int]) -> None:
    with SignalSource(loop, [USR1, USR1]):
        pass
    os.kill(os.getpid(), USR1)
    assert handlers == [USR1]


def test_other_signals_reach_the_hosts_wakeup_descriptor(loop: Loop, handlers: list[int]) -> None:
    """A host that uses a wakeup descriptor (asyncio) misses none of its signals."""
    host_reader, host_writer = socket.socketpair()
    for end in (host_reader, host_writer):
        end.setblocking(False)
    before = signal.set_wakeup_fd(host_writer.fileno(), warn_on_full_buffer=False)
    try:
        with SignalSource(loop, [USR1]) as source:
            os.kill(os.getpid(), USR2)
            os.kill(os.getpid(), USR1)
            assert take(loop, source) == [USR1]
            assert host_reader.recv(10) == bytes([USR2])
            os.kill(os.getpid(), USR2)  # not read before the end
        assert host_reader.recv(10) == bytes([USR2])
        assert handlers == [USR2, USR2]
    finally:
        signal.set_wakeup_fd(before)
        host_reader.close()
        host_writer.close()


def test_an_ignored_signal_stays_ignored(loop: Loop) -> None:
    """As with ``nohup``."""
    signal.signal(USR1, signal.SIG_IGN)
    with SignalSource(loop, [USR1, USR2]) as source:
        os.kill(os.getpid(), USR1)
        os.kill(os.getpid(), USR2)
        assert take(loop, source) == [USR2]
    assert signal.getsignal(USR1) is signal.SIG_IGN


@pytest.mark.process
def test_a_signal_to_a_forked_process_is_its_own(loop: Loop, handlers: list[int]) -> None:
    """It has the host's handlers, and the run in its parent gets no event."""
    ready_reader, ready_writer = os.pipe()
    signal.signal(USR2, signal.SIG_DFL)
    with SignalSource(loop, [USR1, USR2], exits_afterwards=True) as source:
        os.kill(os.getpid(), USR1)  # not read before the fork
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), USR1)
            os.write(ready_writer, bytes([0, *handlers]))
            time.sleep(TIMEOUT_S)  # the signal ends it
            os._exit(0)
        received = os.read(ready_reader, 10)
        os.kill(child, USR2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -USR2
        assert received == bytes([0, USR1])
        assert take(loop, source) == [USR1]
        os.kill(os.getpid(), USR2)
        assert take(loop, source) == [USR2]
    signal.signal(USR1, signal.SIG_DFL)  # it was ignored after the run
    for descriptor in (ready_reader, ready_writer):
        os.close(descriptor)


def test_off_the_main_thread_no_signal_is_handled(loop: Loop, handlers: list[int]) -> None:
    """Python allows no handlers there; nothing is changed or watched."""
    wrong: list[object] = []

    def run() -> None:
        with SignalSource(loop, [USR1]) as source:
            wrong.append(source.fileno() if source.fileno() != -1 else None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert wrong == [None]
    os.kill(os.getpid(), USR1)
    assert handlers == [USR1]
