"""StoreContract: the contract of a store, as tests. tenax's and torch's stores pass it, and yours can::

    class TestMyStore(StoreContract):
        def make_store(self):
            return MyStore()

``make_store`` returns an empty store; each test calls it once. Tests use ``clone`` to get more handles for other
threads. Use a fixture to close or remove resources.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from tenax.store._api import QueueEmptyError, StoreError, StoreTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["StoreContract"]

TIMEOUT_S = 60.0  # maximum time for an operation, even on a busy machine
_SHORT = timedelta(milliseconds=50)  # timeout for operations that must time out
_THREADS = 4


class StoreContract:
    """The tests. Subclass it under a name that begins with ``Test``, and provide ``make_store``."""

    has_queues = True
    error: type[Exception] = StoreError
    timeout_error: type[Exception] = StoreTimeoutError
    queue_empty_error: type[Exception] = QueueEmptyError

    def make_store(self) -> Any:
        raise NotImplementedError("a subclass must return an empty store")

    # --- values -------------------------------------------------------------------------------------------------------

    def test_a_value_comes_back_as_bytes(self) -> None:
        store = self.make_store()
        store.set("text", "grüß dich")
        store.set("bytes", b"\x00\xff/")
        assert store.get("text") == "grüß dich".encode()
        assert store.get("bytes") == b"\x00\xff/"

    def test_every_byte_and_no_byte_can_be_stored(self) -> None:
        store = self.make_store()
        store.set("all", bytes(range(256)))
        store.set("none", b"")
        assert store.get("all") == bytes(range(256))
        assert store.get("none") == b""
        assert store.check(["none"])

    def test_a_later_value_replaces_an_earlier_one(self) -> None:
        store = self.make_store()
        for value in ("long " * 1000, "short", "longer again"):
            store.set("key", value)
            assert store.get("key") == value.encode()

    def test_a_value_of_megabytes_arrives_whole(self) -> None:
        store = self.make_store()
        value = bytes(range(251)) * 16_000  # about 4 MB
        store.set("big", value)
        assert store.get("big") == value

    def test_keys_may_have_any_characters(self) -> None:
        store = self.make_store()
        keys = ["", "/", "a/b//c", "ключ", "with space", "x" * 4000]
        for number, key in enumerate(keys):
            store.set(key, str(number))
        assert [store.get(key) for key in keys] == [str(number).encode() for number in range(len(keys))]
        assert sorted(store.list_keys()) == sorted(keys)

    def test_get_waits_until_another_client_sets_the_value(self) -> None:
        store = self.make_store()
        clone = store.clone()
        with _Threads([lambda: clone.get("late")]) as waiting:
            store.set("late", "here")
        assert waiting.results == [b"here"]

    def test_get_times_out(self) -> None:
        store = self.make_store()
        store.set_timeout(_SHORT)
        with _raises(self.timeout_error):
            store.get("never")

    def test_a_key_can_be_deleted_once(self) -> None:
        store = self.make_store()
        store.set("key", "value")
        assert store.delete_key("key") is True
        assert store.delete_key("key") is False
        assert not store.check(["key"])

    def test_append_creates_and_extends(self) -> None:
        store = self.make_store()
        for part in ("one", b" two", " three"):
            store.append("list", part)
        assert store.get("list") == b"one two three"

    # --- counting -----------------------------------------------------------------------------------------------------

    def test_add_counts_from_zero_in_both_directions(self) -> None:
        store = self.make_store()
        assert [store.add("n", amount) for amount in (1, 5, -10, 0)] == [1, 6, -4, -4]
        assert store.get("n") == b"-4"

    def test_add_continues_from_a_number_that_was_set(self) -> None:
        store = self.make_store()
        for text, expected in (("41", 42), (" +41", 42), ("41 and more", 42), ("-1", 0), ("007", 8)):
            store.set("n", text)
            assert store.add("n", 1) == expected

    def test_add_wraps_around_after_eight_bytes(self) -> None:
        store = self.make_store()
        store.set("n", str((1 << 63) - 1))
        assert store.add("n", 1) == -(1 << 63)

    def test_adding_to_a_value_that_is_not_a_number_is_an_error(self) -> None:
        for value in ("hello", "", str(1 << 63)):
            store = self.make_store()
            store.set("n", value)
            with _raises(self.error):
                store.add("n", 1)

    def test_concurrent_adds_lose_no_count(self) -> None:
        store = self.make_store()
        clones = [store.clone() for _ in range(_THREADS)]

        def count(clone: Any) -> list[int]:
            return [clone.add("n", 1) for _ in range(50)]

        with _Threads([partial(count, clone) for clone in clones]) as counting:
            pass
        counted = [number for numbers in counting.results for number in numbers]
        assert sorted(counted) == list(range(1, 50 * _THREADS + 1))

    # --- compare and set ----------------------------------------------------------------------------------------------

    def test_compare_set_creates_a_key_when_nothing_is_expected(self) -> None:
        store = self.make_store()
        assert store.compare_set("key", "", "first") == b"first"
        assert store.get("key") == b"first"

    def test_compare_set_of_an_absent_key_returns_the_expected_value(self) -> None:
        store = self.make_store()
        assert store.compare_set("key", "something", "first") == b"something"
        assert not store.check(["key"])

    def test_compare_set_replaces_only_what_was_expected(self) -> None:
        store = self.make_store()
        store.set("key", "first")
        assert store.compare_set("key", "other", "second") == b"first"
        assert store.compare_set("key", "", "second") == b"first"
        assert store.compare_set("key", "first", "second") == b"second"
        assert store.get("key") == b"second"

    def test_compare_set_wakes_waiting_clients(self) -> None:
        store = self.make_store()
        clone = store.clone()
        with _Threads([lambda: clone.get("key")]) as waiting:
            store.compare_set("key", "", "value")
        assert waiting.results == [b"value"]

    def test_one_of_many_concurrent_compare_sets_wins(self) -> None:
        store = self.make_store()
        clones = [store.clone() for _ in range(_THREADS)]

        def claim(number: int) -> bytes:
            return bytes(clones[number].compare_set("leader", "", str(number)))

        with _Threads([partial(claim, number) for number in range(_THREADS)]) as claiming:
            pass
        assert len(set(claiming.results)) == 1
        assert store.get("leader") == claiming.results[0]

    # --- many keys ----------------------------------------------------------------------------------------------------

    def test_check_returns_whether_all_keys_exist(self) -> None:
        store = self.make_store()
        store.multi_set(["a", "b"], ["", "2"])
        assert store.check(["a"])
        assert store.check(["a", "b", "a"])
        assert store.check([])
        assert not store.check(["a", "b", "c"])

    def test_wait_returns_when_the_last_key_exists(self) -> None:
        store = self.make_store()
        clone = store.clone()
        store.set("a", "1")
        with _Threads([lambda: clone.wait(["a", "b", "c", "b"], timedelta(seconds=TIMEOUT_S))]) as waiting:
            store.set("b", "2")
            store.add("c", 3)
        assert waiting.results == [None]

    def test_wait_times_out_and_the_store_still_works(self) -> None:
        store = self.make_store()
        store.set("a", "1")
        with _raises(self.timeout_error):
            store.wait(["a", "never"], _SHORT)
        assert store.get("a") == b"1"
        store.wait(["a"], timedelta(seconds=TIMEOUT_S))
        store.wait([], timedelta(seconds=TIMEOUT_S))

    def test_multi_get_returns_values_in_the_order_of_the_keys(self) -> None:
        store = self.make_store()
        keys = [f"key{number}" for number in range(300)]
        store.multi_set(keys, [str(number) for number in range(300)])
        assert store.multi_get(keys[::-1]) == [str(number).encode() for number in range(300)][::-1]
        assert store.multi_get(["key7", "key7"]) == [b"7", b"7"]
        assert store.multi_get([]) == []

    def test_multi_get_waits_for_all_keys(self) -> None:
        store = self.make_store()
        clone = store.clone()
        with _Threads([lambda: clone.multi_get(["a", "b"])]) as waiting:
            store.set("b", "2")
            store.set("a", "1")
        assert waiting.results == [[b"1", b"2"]]

    def test_multi_set_takes_one_value_for_each_key(self) -> None:
        store = self.make_store()
        with _raises((self.error, ValueError)):
            store.multi_set(["a", "b"], ["1"])
        assert not store.check(["a"])
        store.multi_set([], [])

    def test_keys_are_counted_and_listed(self) -> None:
        store = self.make_store()
        before = store.num_keys()
        store.set("a", "1")
        store.add("b", 1)
        store.set("a", "2")
        assert store.num_keys() == before + 2
        assert sorted(store.list_keys()) == ["a", "b"]
        store.delete_key("a")
        assert store.num_keys() == before + 1
        assert store.list_keys() == ["b"]

    # --- queues -------------------------------------------------------------------------------------------------------

    def test_a_queue_is_first_in_first_out(self) -> None:
        store = self._store_with_queues()
        for value in ("one", b"two", ""):
            store.queue_push("queue", value)
        assert store.queue_len("queue") == 3
        assert [store.queue_pop("queue") for _ in range(3)] == [b"one", b"two", b""]
        assert store.queue_len("queue") == 0

    def test_popping_an_empty_queue_without_waiting_is_an_error(self) -> None:
        store = self._store_with_queues()
        with _raises(self.queue_empty_error):
            store.queue_pop("queue", False)
        store.set_timeout(_SHORT)
        with _raises(self.timeout_error):
            store.queue_pop("queue")

    def test_a_queue_exists_while_it_is_not_empty(self) -> None:
        store = self._store_with_queues()
        before = store.num_keys()
        store.queue_push("queue", "value")
        assert store.check(["queue"])
        store.wait(["queue"], timedelta(seconds=TIMEOUT_S))
        assert store.num_keys() == before
        assert store.list_keys() == []
        store.queue_pop("queue")
        assert not store.check(["queue"])

    def test_every_pushed_value_goes_to_one_waiting_client(self) -> None:
        store = self._store_with_queues()
        clones = [store.clone() for _ in range(_THREADS)]
        with _Threads([partial(clone.queue_pop, "queue") for clone in clones]) as waiting:
            for number in range(_THREADS):
                store.queue_push("queue", str(number))
        assert sorted(waiting.results) == [str(number).encode() for number in range(_THREADS)]
        assert store.queue_len("queue") == 0

    def _store_with_queues(self) -> Any:
        if not self.has_queues:
            import pytest

            pytest.skip("this store has no queues")
        return self.make_store()

    # --- barriers -----------------------------------------------------------------------------------------------------

    def test_a_barrier_opens_when_the_last_client_arrives(self) -> None:
        store = self.make_store()
        clones = [store.clone() for _ in range(_THREADS)]
        with _Threads([partial(clone.barrier, "barrier", _THREADS + 1) for clone in clones]) as waiting:
            store.barrier("barrier", _THREADS + 1, timedelta(seconds=TIMEOUT_S))
        assert waiting.results == [None] * _THREADS

    def test_a_client_that_timed_out_at_a_barrier_stays_counted(self) -> None:
        store = self.make_store()
        with _raises(self.timeout_error):
            store.barrier("two", 2, _SHORT)
        store.barrier("two", 2, timedelta(seconds=TIMEOUT_S))

    # --- the store itself ---------------------------------------------------------------------------------------------

    def test_a_clone_is_the_same_store(self) -> None:
        store = self.make_store()
        clone = store.clone()
        store.set("key", "value")
        assert clone.get("key") == b"value"
        clone.set("key", "new")
        assert store.get("key") == b"new"

    def test_the_timeout_is_what_was_set(self) -> None:
        store = self.make_store()
        store.set_timeout(timedelta(seconds=7))
        assert store.timeout == timedelta(seconds=7)


class _Threads:
    """Runs functions in threads. At the end of the block all have returned, and ``results`` has their results."""

    def __init__(self, functions: Iterable[Callable[[], Any]]) -> None:
        self.results: list[Any] = []
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(index, function), daemon=True)
            for index, function in enumerate(functions)
        ]
        self.results = [None] * len(self._threads)

    def _run(self, index: int, function: Callable[[], Any]) -> None:
        try:
            self.results[index] = function()
        except BaseException as error:
            self._errors.append(error)

    def __enter__(self) -> _Threads:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        if kind is None:
            assert not any(thread.is_alive() for thread in self._threads), "a thread is still waiting"
            if self._errors:
                raise self._errors[0]


@contextmanager
def _raises(kind: type[Exception] | tuple[type[Exception], ...]) -> Iterator[None]:
    """Assert that the block raises this error, like ``pytest.raises``, which this kit does not require."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"nothing was raised, expected {kind}")
