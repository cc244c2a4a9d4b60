"""Protocol: the server's half of one TCPStore connection, without I/O: bytes in, bytes out.

``Session.receive`` takes bytes in arbitrary pieces and returns the answers to all complete requests. A request may also
produce an answer for another session (a wait that ends): that session is then in ``KeyValues.woken``.

P1  The first bytes must be the greeting. A session gets a ``fault`` at the first byte that differs from it.
P2  A session with a ``fault`` accepts and answers nothing more. Its owner sends pending answers and closes the
    connection.
P3  A request is atomic: it takes effect when its last byte has arrived, or not at all.
P4  Announced lengths are checked before memory is used for them. A session buffers at most one incomplete request and,
    beyond ``unread_bytes``, one answer: then it ``is_paused`` until its owner has sent that and calls ``resume``.
P5  Parsing never restarts from the beginning: the work is proportional to the bytes, in whatever pieces they arrive.
P6  A session waits for one set of keys at a time; a later WAIT or BARRIER replaces the earlier one.

The commands have the semantics of torch's libuv server, without its bugs: there, a COMPARE_SET that stores nothing ends
waits for the key, two pushes into a queue count as two of the keys that a client waits for, and half of a MULTI_SET is
visible.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

from tenax.store import _wire as wire
from tenax.store._key_values import KeyValues, Refused, Waiter
from tenax.store._table import NotANumber, added

_u64: Callable[[bytes, int], tuple[int]] = wire.U64.unpack_from
_i64: Callable[[bytes, int], tuple[int]] = wire.I64.unpack_from
_u8_u64: Callable[[bytes, int], tuple[int, int]] = struct.Struct("<BQ").unpack_from
_pack_u64 = wire.U64.pack
_pack_i64 = wire.I64.pack
_SET = wire.SET
_PING = bytes([wire.PING])
_SHORTEST_RUN = 4  # the number of equal-sized SETs from which unpacking them in bulk pays off
_ITEM_COST = 48  # Python's overhead in bytes for one list item


class _Incomplete(Exception):
    """Parsing can continue with ``needed`` bytes; everything before ``keep_from`` is done."""

    def __init__(self, needed: int, keep_from: int = -1) -> None:
        self.needed = needed
        self.keep_from = keep_from


class _List:
    """A request with a list of items that is not complete yet."""

    __slots__ = ("bytes", "count", "finish", "has_values", "items")

    def __init__(self, count: int, has_values: bool, finish: Callable[[Session, list[bytes]], None]) -> None:
        self.count = count
        self.has_values = has_values  # keys and values alternate
        self.finish = finish  # called with all items
        self.items: list[bytes] = []
        self.bytes = 0


class Session(Waiter):
    """The protocol state of one connection. Close it with the connection."""

    __slots__ = (
        *("_answer_bytes", "_awaited", "_limits", "_list", "_max_key", "_max_unread", "_max_value", "_missing"),
        *("_needed", "_out", "_table", "_tail", "fault", "has_greeted", "held_bytes", "is_paused", "is_used"),
    )

    def __init__(self, table: KeyValues) -> None:
        self.fault = ""  # why the connection must be closed
        self.has_greeted = False
        self.is_used = False  # a request other than a ping was received
        self.is_paused = False
        self.held_bytes = 0  # buffered for incomplete requests
        self._table = table
        self._limits = table.limits
        self._max_key = table.limits.key_bytes
        self._max_value = table.limits.value_bytes
        self._max_unread = table.limits.unread_bytes
        self._tail = bytearray()  # the start of an incomplete request
        self._needed = 0  # the length of the tail at which parsing can continue
        self._list: _List | None = None
        self._out: list[bytes] = []
        self._answer_bytes = 0  # in ``_out``, of answers that may be longer than their request
        self._awaited: Iterable[bytes] = ()
        self._missing = 0  # the number of awaited keys that have not appeared

    def receive(self, data: bytes) -> bytes:
        """Process received bytes. Return the bytes to send."""
        if self.fault:
            return b""
        if not self._tail and not self.is_paused:
            return self._work(data)
        self._tail += data
        if self.is_paused or len(self._tail) < self._needed:
            self._count_held()
            return b""
        return self._work(self._take_tail())

    def resume(self) -> bytes:
        """Continue with buffered requests after the answers were sent. Return the bytes to send."""
        self.is_paused = False
        return self._work(self._take_tail())

    def take(self) -> bytes:
        """Take the bytes to send."""
        out = self._out
        if not out:
            return b""
        answer = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return answer

    def close(self) -> None:
        self._stop_waiting()
        self._tail.clear()
        self._list = None
        self._count_held()

    # --- the stream of requests ---------------------------------------------------------------------------------------

    def _work(self, data: bytes) -> bytes:
        handlers = _HANDLERS
        size = len(data)
        start = at = 0
        try:
            if not self.is_used:
                if not self.has_greeted:
                    at = self._check_greeting(data)
                while data[at : at + 1] == _PING:
                    start = at
                    at = self._ping(data, at + 1)
                self.is_used = at < size
            elif self._list is not None:
                at = self._take_items(data, 0)
            while at < size:
                start = at
                at = handlers[data[at]](self, data, at + 1)
                if self._answer_bytes > self._max_unread:
                    self.is_paused = True
                    break
            start = at
        except _Incomplete as more:
            if more.keep_from >= 0:
                start = more.keep_from
            self._needed = more.needed - start
        except struct.error:  # the next integer is incomplete
            self._needed = size - start + 1
        except (Refused, NotANumber) as refusal:
            self.fault = str(refusal)
            self._list = None
            start = size
        if start < size:
            self._tail += data[start:]
        if start < size or self.held_bytes or self._list is not None:
            self._count_held()
        self._answer_bytes = 0
        return self._out.pop() if len(self._out) == 1 else self.take()

    def _take_tail(self) -> bytes:
        data = bytes(self._tail)
        self._tail.clear()
        return data

    def _count_held(self) -> None:
        held = len(self._tail)
        if self._list is not None:
            held += self._list.bytes + _ITEM_COST * len(self._list.items)
        self._table.held_bytes += held - self.held_bytes
        self.held_bytes = held

    def _check_greeting(self, data: bytes) -> int:
        greeting = wire.GREETING
        if data[: len(greeting)] != greeting[: len(data)]:
            raise Refused("it did not send the greeting of a store client")
        if len(data) < len(greeting):
            raise _Incomplete(len(greeting))
        self.has_greeted = True
        return len(greeting)

    # --- fields -------------------------------------------------------------------------------------------------------

    def _key(self, data: bytes, at: int) -> tuple[bytes, int]:
        """Return a key and its end. A caller that reads no integer after it must check that the key is complete."""
        (length,) = _u64(data, at)
        if length > self._max_key:
            raise Refused(f"a key of {length} bytes is too long")
        at += 8
        return data[at : at + length], at + length

    def _value(self, data: bytes, at: int) -> tuple[bytes, int]:
        (length,) = _u64(data, at)
        if length > self._max_value:
            raise Refused(f"a value of {length} bytes is too long")
        at += 8
        end = at + length
        if end > len(data):
            raise _Incomplete(end)
        return data[at:end], end

    def _only_key(self, data: bytes, at: int) -> tuple[bytes, int]:
        key, end = self._key(data, at)
        if end > len(data):
            raise _Incomplete(end)
        return key, end

    def _begin_list(
        self, data: bytes, at: int, finish: Callable[[Session, list[bytes]], None], has_values: bool = False
    ) -> int:
        (count,) = _u64(data, at)
        if count > self._limits.keys_per_request:
            raise Refused(f"{count} keys in a request are too many")
        self._list = _List(count * 2 if has_values else count, has_values, finish)
        return self._take_items(data, at + 8)

    def _take_items(self, data: bytes, at: int) -> int:
        """Take the complete items; once all are there, execute the request."""
        request = self._list
        assert request is not None
        start = at
        at, needed = self._parse_items(data, at, request)
        request.bytes += at - start
        if request.bytes + _ITEM_COST * len(request.items) > self._limits.request_bytes:
            raise Refused(f"a request of {request.bytes} bytes is too long")
        if needed:
            raise _Incomplete(needed, at)
        self._list = None
        request.finish(self, request.items)
        return at

    def _parse_items(self, data: bytes, at: int, request: _List) -> tuple[int, int]:
        """Return the end of the last complete item, and the end of the next one if it is incomplete, else 0."""
        items, size = request.items, len(data)
        append, unpack = items.append, _u64
        max_length, next_max = self._max_key, self._max_value if request.has_values else self._max_key
        if len(items) % 2:
            max_length, next_max = next_max, max_length
        for _ in range(request.count - len(items)):
            start = at + 8
            if start > size:
                return at, start
            (length,) = unpack(data, at)
            if length > max_length:
                raise Refused(f"a key or value of {length} bytes is too long")
            end = start + length
            if end > size:
                return at, end
            append(data[start:end])
            at = end
            max_length, next_max = next_max, max_length
        return at, 0

    # --- commands -----------------------------------------------------------------------------------------------------

    def _set(self, data: bytes, at: int) -> int:
        """Execute a SET and all SETs that follow: they have no answer, so clients send them in long runs.

        Function calls dominate the cost here, so ``_key``, ``_value`` and, for equal lengths, ``put`` are inlined.
        """
        size, command_and_length, unpack = len(data), _u8_u64, _u64
        max_key, max_value, table = self._max_key, self._max_value, self._table
        values, waiters = table.values, table.waiters
        last_size = 0
        at -= 1
        try:
            while True:
                command, key_size = command_and_length(data, at)
                if command != _SET:
                    return at
                if key_size > max_key:
                    raise Refused(f"a key of {key_size} bytes is too long")
                end = at + 9 + key_size
                key = data[at + 9 : end]
                (value_size,) = unpack(data, end)
                if value_size > max_value:
                    raise Refused(f"a value of {value_size} bytes is too long")
                start = end + 8
                end = start + value_size
                if end > size:
                    raise _Incomplete(end, at)
                old = values.get(key)
                if old is None or len(old) != value_size or waiters:
                    table.put(key, data[start:end])
                else:
                    values[key] = data[start:end]
                own_size = end - at
                if own_size == last_size and own_size * _SHORTEST_RUN <= size - end:
                    end = self._set_alike(data, end, key_size, value_size)
                    own_size = 0  # the request after the run has another size
                last_size = own_size
                at = end
                if at == size:
                    return at
        except struct.error:  # the data ends in the middle of a SET, or is a shorter command
            if data[at] != _SET:
                return at
            raise _Incomplete(size + 1, at) from None

    def _set_alike(self, data: bytes, at: int, key_size: int, value_size: int) -> int:
        """Execute the SETs that follow with keys and values of these lengths, each unpacked in one step.

        The lengths are already checked. Return the start of the first request that differs.
        """
        table = self._table
        values, waiters = table.values, table.waiters
        shape = struct.Struct(f"<BQ{key_size}sQ{value_size}s")
        step = shape.size
        whole = (len(data) - at) // step * step
        for command, this_key_size, key, this_value_size, value in shape.iter_unpack(memoryview(data)[at : at + whole]):
            if this_key_size != key_size or this_value_size != value_size or command != _SET:
                break
            old = values.get(key)
            if old is None or len(old) != value_size or waiters:
                table.put(key, value)
            else:
                values[key] = value
            at += step
        return at

    def _get(self, data: bytes, at: int) -> int:
        key, at = self._only_key(data, at)
        self._answer_value(self._table.values.get(key, b""))
        return at

    def _add(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        (amount,) = _i64(data, at)
        self._out.append(_pack_i64(self._table.add(key, amount)))
        return at + 8

    def _compare_set(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        expected, at = self._value(data, at)
        desired, at = self._value(data, at)
        self._answer_value(self._table.compare_set(key, expected, desired))
        return at

    def _check(self, data: bytes, at: int) -> int:
        (count,) = _u64(data, at)
        if count != 1:
            return self._begin_list(data, at, Session._answer_check)
        key, at = self._only_key(data, at + 8)
        self._out.append(wire.READY if self._table.has(key) else wire.NOT_READY)
        return at

    def _answer_check(self, keys: list[bytes]) -> None:
        self._out.append(wire.READY if all(map(self._table.has, keys)) else wire.NOT_READY)

    def _wait(self, data: bytes, at: int) -> int:
        (count,) = _u64(data, at)
        if count != 1:
            return self._begin_list(data, at, Session._answer_wait)
        key, at = self._only_key(data, at + 8)  # the most frequent case
        if self._table.has(key):
            self._out.append(wire.STOP_WAITING)
        else:
            self._wait_for((key,))
        return at

    def _answer_wait(self, keys: list[bytes]) -> None:
        has = self._table.has
        missing = [key for key in keys if not has(key)]
        if missing:
            self._wait_for(dict.fromkeys(missing))
        else:
            self._out.append(wire.STOP_WAITING)

    def _cancel_wait(self, data: bytes, at: int) -> int:  # noqa: ARG002 - the signature of all handlers
        self._stop_waiting()
        self._out.append(wire.WAIT_CANCELED)
        return at

    def _count_keys(self, data: bytes, at: int) -> int:  # noqa: ARG002
        self._out.append(_pack_i64(len(self._table.values)))
        return at

    def _delete_key(self, data: bytes, at: int) -> int:
        key, at = self._only_key(data, at)
        self._out.append(_pack_i64(self._table.drop(key)))
        return at

    def _append(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        value, at = self._value(data, at)
        self._table.append(key, value)
        return at

    def _answer_multi_get(self, keys: list[bytes]) -> None:
        get = self._table.values.get
        self._answer_strings([get(key, b"") for key in keys])

    def _finish_multi_set(self, items: list[bytes]) -> None:
        self._table.put_all(dict(zip(items[::2], items[1::2], strict=True)))

    def _ping(self, data: bytes, at: int) -> int:
        if at + 4 > len(data):
            raise _Incomplete(at + 4)
        self._out.append(data[at : at + 4])
        return at + 4

    def _queue_push(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        value, at = self._value(data, at)
        self._table.push(key, value)
        return at

    def _queue_pop(self, data: bytes, at: int) -> int:
        key, at = self._only_key(data, at)
        length = self._table.queue_length(key)
        self._out.append(_pack_i64(length))
        if length:
            self._answer_value(self._table.pop(key))
        return at

    def _queue_length(self, data: bytes, at: int) -> int:
        key, at = self._only_key(data, at)
        self._out.append(_pack_i64(self._table.queue_length(key)))
        return at

    def _list_keys(self, data: bytes, at: int) -> int:  # noqa: ARG002
        keys = list(self._table.values)
        self._out.append(_pack_i64(len(keys)))
        self._answer_strings(keys)
        return at

    def _barrier(self, data: bytes, at: int) -> int:
        """Increment the counter; answer when it reaches the world size, or when another client changes it."""
        key, at = self._key(data, at)
        (world_size,) = _i64(data, at)
        table = self._table
        count = added(table.values.get(key), 1)
        table.store(key, b"%d" % count)
        if count >= world_size:
            table.wake(key)
            self._out.append(wire.STOP_WAITING)
        else:
            self._wait_for((key,))
        return at + 8

    def _unknown(self, data: bytes, at: int) -> int:
        raise Refused(f"unknown command {data[at - 1]:#04x}")

    def _answer_value(self, value: bytes) -> None:
        self._answer_bytes += len(value)
        self._out.append(_pack_u64(len(value)) + value)

    def _answer_strings(self, strings: list[bytes]) -> None:
        size = sum(map(len, strings)) + 8 * len(strings)
        if size > self._limits.answer_bytes:
            raise Refused(f"an answer of {size} bytes would be too long")
        self._answer_bytes += size
        pack = _pack_u64
        self._out.extend([part for string in strings for part in (pack(len(string)), string)])

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _wait_for(self, keys: tuple[bytes] | dict[bytes, None]) -> None:
        self._stop_waiting()
        if len(keys) > self._limits.waiting_keys:
            raise Refused(f"{len(keys)} keys to wait for are too many")
        self._awaited = keys  # set first, so that ``close`` unregisters them if one is refused
        self._missing = len(keys)
        for key in keys:
            self._table.register(key, self)

    def _stop_waiting(self) -> None:
        if self._missing:
            for key in self._awaited:
                self._table.unregister(key, self)
            self._awaited = ()
            self._missing = 0

    def seen(self, key: bytes) -> bool:  # noqa: ARG002 - only the count matters
        self._missing -= 1
        if self._missing:
            return False
        self._awaited = ()
        self._out.append(wire.STOP_WAITING)
        self._table.woken.append(self)
        return True


def _with_list(
    finish: Callable[[Session, list[bytes]], None], has_values: bool = False
) -> Callable[[Session, bytes, int], int]:
    """Return the handler of a command whose only field is a list."""
    return lambda session, data, at: session._begin_list(data, at, finish, has_values)


_KNOWN: dict[int, Callable[[Session, bytes, int], int]] = {
    wire.SET: Session._set,
    wire.COMPARE_SET: Session._compare_set,
    wire.GET: Session._get,
    wire.ADD: Session._add,
    wire.CHECK: Session._check,
    wire.WAIT: Session._wait,
    wire.GETNUMKEYS: Session._count_keys,
    wire.DELETE_KEY: Session._delete_key,
    wire.APPEND: Session._append,
    wire.MULTI_GET: _with_list(Session._answer_multi_get),
    wire.MULTI_SET: _with_list(Session._finish_multi_set, has_values=True),
    wire.CANCEL_WAIT: Session._cancel_wait,
    wire.PING: Session._ping,
    wire.QUEUE_PUSH: Session._queue_push,
    wire.QUEUE_POP: Session._queue_pop,
    wire.QUEUE_LEN: Session._queue_length,
    wire.LIST_KEYS: Session._list_keys,
    wire.BARRIER: Session._barrier,
}
_HANDLERS = tuple(_KNOWN.get(number, Session._unknown) for number in range(256))
