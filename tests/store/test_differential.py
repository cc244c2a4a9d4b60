"""The server's answers equal those of torch's libuv server, byte for byte."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import pytest

from store import requests as ask
from store.requests import Peer
from store.servers import torch_server
from tenax.store import StoreServer

pytestmark = pytest.mark.process

PEERS = 3
OPERATIONS = 250


class Conversation:
    """The same random requests to both servers, on several connections, cut at random places.

    Left out is what torch does wrong, or what no client does: two waits at once on one connection; a queue that is
    pushed to after it has ended a wait (torch keeps the client on its list, and ends its next wait as well); and a
    COMPARE_SET of a key that a client waits for (torch ends the wait even if nothing was stored).
    """

    def __init__(self, seed: int, ours: int, torchs: int) -> None:
        self._random = random.Random(seed)
        self._ports = (ours, torchs)
        self._peers = [self._connect() for _ in range(PEERS)]
        self._waits: dict[int, list[bytes]] = {}  # which connection waits, and for what
        self._queues = 0
        self._spent: set[bytes] = set()
        self._keys = [b"/%d/%d" % (seed, number) for number in range(6)]

    def _connect(self) -> tuple[Peer, Peer]:
        first, second = (Peer(port) for port in self._ports)
        return first, second

    def close(self) -> None:
        for pair in self._peers:
            for peer in pair:
                peer.close()

    def go_on(self) -> None:
        sender = self._random.randrange(PEERS)
        request = self._request(sender)
        for peer in self._peers[sender]:
            for piece in self._cut(request):
                peer.send(piece)
        self._compare(sender, request)

    def _cut(self, request: bytes) -> list[bytes]:
        cuts = sorted(self._random.choices(range(len(request) + 1), k=self._random.choice((0, 0, 1, 3))))
        return [request[start:end] for start, end in zip([0, *cuts], [*cuts, len(request)], strict=True)]

    def _compare(self, sender: int, request: bytes) -> None:
        for index in sorted(range(PEERS), key=lambda index: index != sender):  # the sender of the request first
            ours, torchs = (peer.answers() for peer in self._peers[index])
            if request == ask.LIST_KEYS and index == sender:
                ours, torchs = _sorted(ours), _sorted(torchs)
            assert ours == torchs, f"connection {index}, after {request!r} on {sender}"
            if ours is None:
                self._waits.pop(index, None)
                for peer in self._peers[index]:
                    peer.close()
                self._peers[index] = self._connect()
            elif index in self._waits and ours:
                self._spent.update(self._waits.pop(index))

    def _request(self, sender: int) -> bytes:
        pick = self._random.choice
        key, other, value = pick(self._keys), pick(self._keys), self._value()
        queue = self._queue()
        choices = [  # what has no answer may also be sent while we wait for one
            ask.set_(key, value),
            ask.set_(other, value),
            ask.append(key, value),
            ask.multi_set(*((name, self._value()) for name in self._random.choices(self._keys, k=pick((0, 1, 4))))),
            ask.push(queue, value),
            ask.CANCEL_WAIT,
        ]
        if sender not in self._waits:
            if key not in self._awaited():
                choices += [ask.compare_set(key, self._value(), value), ask.compare_set(key, b"", value)]
            keys = self._random.choices(self._keys, k=pick((0, 1, 3)))
            choices += [
                ask.get(key),
                ask.add(key, pick((-3, 0, 1, 7, (1 << 63) - 1))),
                ask.add(key, 1),
                ask.check(*self._random.choices([*self._keys, queue], k=pick((0, 1, 2, 5)))),
                ask.COUNT_KEYS,
                ask.delete(key),
                ask.delete(other),
                ask.multi_get(*self._random.choices(self._keys, k=pick((0, 1, 4)))),
                ask.pop(queue),
                ask.queue_length(queue),
                ask.LIST_KEYS,
                ask.barrier(key, pick((-1, 0, 1, 2, 3))),
                ask.wait(queue),
                ask.wait(key),
                ask.wait(*keys),
            ]
        request = pick(choices)
        if request[0] in (0x06, 0x12):
            self._waits[sender] = (
                keys if request == ask.wait(*keys) else [queue] if request == ask.wait(queue) else [key]
            )
        return request

    def _awaited(self) -> set[bytes]:
        return {key for keys in self._waits.values() for key in keys}

    def _value(self) -> bytes:
        return self._random.choice([b"", b"1", b"-12", b" 3x", b"hello", b"x" * 40, bytes(range(256)) * 20])

    def _queue(self) -> bytes:
        """Return a queue that never ended a wait."""
        name = b"/queue%d" % self._queues
        if name in self._spent or name in self._awaited() or self._random.random() < 0.1:
            self._queues += 1
            name = b"/queue%d" % self._queues
        return name


def _sorted(answer: bytes | None) -> object:
    """Return the answer with its list of keys sorted."""
    if answer is None:
        return None
    (count,) = struct.unpack_from("<q", answer)
    at, keys = 8, []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", answer, at)
        keys.append(answer[at + 8 : at + 8 + length])
        at += 8 + length
    return sorted(keys), answer[at:]


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    with StoreServer.in_thread() as ours:
        torchs = torch_server("libuv")
        yield ours.port, torchs.port


@pytest.mark.parametrize("seed", range(12))
def test_random_requests_have_the_same_answers_as_torchs_server(seed: int, ports: tuple[int, int]) -> None:
    conversation = Conversation(seed, *ports)
    try:
        for _ in range(OPERATIONS):
            conversation.go_on()
    finally:
        conversation.close()
