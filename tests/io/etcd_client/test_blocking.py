"""The blocking client: in one thread, in several, in a forked child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from kit.etcd import ALONE, EtcdCluster, unique_prefix
from kit.processes import AT_ONCE_S, INTERRUPTS, descriptors, forks_with_threads, until
from tenax._core.etcd.errors import EtcdCompacted, EtcdError, EtcdRejected, EtcdUnavailable
from tenax._core.etcd.operations import Change, Compact, Delete, Put, Range, Status, prefix_end
from tenax._io.etcd.blocking import BlockingEtcd

from .kit import TIMEOUT_S, raised


@pytest.fixture
def blocking(etcd: EtcdCluster) -> Iterator[BlockingEtcd]:
    client = etcd.client()
    yield client
    client.close()


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_calls_return_answers_and_raise_errors(blocking: BlockingEtcd) -> None:
    key = unique_prefix() + b"k"
    blocking.call(Put(key, b"v"))
    assert blocking.call(Range(key)).kvs[0].value == b"v"
    assert "key is not provided" in raised(lambda: blocking.call(Put(b"", b"")), EtcdRejected)
    assert blocking.trouble
    blocking.call(Status())
    assert blocking.trouble == ""
    assert blocking.local_address().startswith("127.")


def test_an_argument_of_the_wrong_type_ends_only_its_call(blocking: BlockingEtcd) -> None:
    with pytest.raises(TypeError):
        blocking.call(Put(object(), b"v"))  # type: ignore[arg-type]
    assert blocking.call(Status()).version


def test_wait_for_change_returns_changes_from_a_revision_on(blocking: BlockingEtcd) -> None:
    prefix = unique_prefix()
    first = blocking.call(Put(prefix + b"a", b"1")).revision
    second = blocking.call(Delete(prefix + b"a")).revision
    changes = blocking.wait_for_change(prefix, prefix_end(prefix), first, 30)
    assert (changes[0].kind, changes[0].kv.mod_revision) == ("put", first)
    assert blocking.wait_for_change(prefix, prefix_end(prefix), second, 30)[0].kind == "delete"
    assert blocking.wait_for_change(prefix, prefix_end(prefix), second + 1, 0.1) == []


def test_a_wait_does_not_delay_the_calls_of_other_threads(blocking: BlockingEtcd) -> None:
    """Not even the write that it waits for."""
    prefix = unique_prefix()
    revision = blocking.call(Put(prefix[:-1], b"")).revision
    seen: list[list[Change]] = []
    waiters = [
        in_thread(lambda: seen.append(blocking.wait_for_change(prefix, prefix_end(prefix), revision + 1, 30)))
        for _ in range(3)
    ]
    blocking.call(Put(prefix + b"k", b"v"))
    join(*waiters)
    assert [[change.kv.key for change in changes] for changes in seen] == [[prefix + b"k"]] * 3


def test_many_threads_share_one_client(blocking: BlockingEtcd) -> None:
    prefix = unique_prefix()

    def write(number: int) -> None:
        for each in range(10):
            blocking.call(Put(prefix + b"%d-%d" % (number, each), b""))

    join(*[in_thread(lambda number=number: write(number)) for number in range(8)])  # type: ignore[misc]
    assert blocking.call(Range(prefix, prefix_end(prefix), count_only=True)).count == 80


@forks_with_threads
def test_a_forked_child_gets_its_own_connections(blocking: BlockingEtcd) -> None:
    prefix = unique_prefix()
    blocking.call(Put(prefix + b"parent", b""))
    pid = os.fork()
    if pid == 0:
        try:
            blocking.call(Put(prefix + b"child", b""))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    blocking.call(Put(prefix + b"parent", b"again"))
    assert blocking.call(Range(prefix, prefix_end(prefix), count_only=True)).count == 2


@forks_with_threads
def test_the_threads_of_a_forked_child_share_its_client(blocking: BlockingEtcd) -> None:
    """None of them uses the parent's connections."""
    prefix = unique_prefix()
    blocking.call(Status())
    children = []
    for child in range(20):
        children.append(os.fork())
        if children[-1] == 0:
            sys.setswitchinterval(1e-6)
            begin = threading.Barrier(4)

            def put(number: int, child: int = child, begin: threading.Barrier = begin) -> None:
                begin.wait()
                blocking.call(Put(prefix + b"%d-%d" % (child, number), b""))

            threads = [threading.Thread(target=put, args=(number,), daemon=True) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(AT_ONCE_S * 10)
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    assert blocking.call(Range(prefix, prefix_end(prefix), count_only=True)).count == 80


def test_a_client_that_is_not_closed_leaves_nothing(etcd: EtcdCluster) -> None:
    before = descriptors()
    client = etcd.client()
    client.call(Status())
    assert descriptors() != before
    del client
    until(lambda: descriptors() == before, "its thread to close its descriptors")


def test_the_client_is_usable_after_an_interrupt(blocking: BlockingEtcd) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            blocking.wait_for_change(unique_prefix(), b"", 0, 60)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert blocking.call(Status()).version


_INTERRUPTED = """
import sys, threading
from tenax._core.etcd.operations import Status
from tenax.etcd import BlockingEtcd, etcd_settings

client = BlockingEtcd(etcd_settings(sys.argv[1]), patience_s=60)
is_over, others = False, []

def call_often():
    while not is_over:
        others.append(client.call(Status()))

threads = [threading.Thread(target=call_often, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
interrupt_often(300, 0.001, lambda: client.call(Status()))
is_over = True
for thread in threads:
    thread.join()
assert others
client.close()
print("closed")
"""


def test_a_signal_handler_may_raise_at_any_moment_of_a_call(etcd: EtcdCluster) -> None:
    """The calls of other threads are answered, and the client can be closed."""
    command = [sys.executable, "-c", INTERRUPTS + _INTERRUPTED, etcd.endpoints]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    assert done.stdout == "closed\n"


def test_a_signal_handler_may_close_the_client_during_a_call(etcd: EtcdCluster) -> None:
    client = etcd.client()
    old = signal.signal(signal.SIGALRM, lambda *_: client.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert "closed" in raised(lambda: client.wait_for_change(unique_prefix(), b"", 0, 60), EtcdError)
    finally:
        signal.signal(signal.SIGALRM, old)


def test_close_ends_the_waits_of_other_threads(etcd: EtcdCluster) -> None:
    client = etcd.client()
    errors: list[str] = []
    waiter = in_thread(lambda: errors.append(raised(lambda: client.wait_for_change(b"x", b"", 0, 60), EtcdError)))
    client.call(Status())
    client.close()
    client.close()
    join(waiter)
    assert "closed" in errors[0]
    assert "closed" in raised(lambda: client.call(Status()), EtcdError)


def test_a_wait_survives_a_restart_and_reports_compaction(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(**ALONE)
    client, other = cluster.client(), cluster.client()
    try:
        revision = other.call(Put(b"k", b"0")).revision
        seen: list[Change] = []
        waiter = in_thread(lambda: seen.extend(client.wait_for_change(b"k", b"", revision + 1, 60)))
        cluster.kill(0)
        cluster.start(0)
        last = other.call(Put(b"k", b"1")).revision
        join(waiter)
        assert [change.kv.value for change in seen] == [b"1"]
        other.call(Compact(last))
        with pytest.raises(EtcdCompacted) as caught:
            client.wait_for_change(b"k", b"", 1, 30)
        assert caught.value.compact_revision == last
        cluster.kill(0)
        assert "connection" in raised(lambda: client.wait_for_change(b"k", b"", 1, 0.5), EtcdUnavailable)
    finally:
        client.close()
        other.close()
