"""Helpers for the tests of the etcd client: a client in a loop, and scripted servers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from kit.processes import TIMEOUT_S
from tenax._core.etcd.errors import EtcdError
from tenax._core.etcd.operations import Operation
from tenax._io.etcd.client import EtcdClient
from tenax._io.etcd.settings import EtcdSettings
from tenax._io.loop import Loop

A = TypeVar("A")


class ClientInLoop:
    """A client in a loop that runs only while the test waits."""

    def __init__(self, settings: EtcdSettings) -> None:
        self.loop = Loop()
        self.etcd = EtcdClient(self.loop, settings)

    def until(self, condition: Callable[[], object], what: str = "", patience_s: float = TIMEOUT_S) -> None:
        give_up = self.loop.now() + patience_s
        self.loop.next_event(lambda: 0.0 if condition() else give_up)
        if not condition():
            pytest.fail(f"timed out after {patience_s:g} s: {what}; etcd: {self.etcd.trouble}")

    def run_for(self, seconds: float) -> None:
        """Run the loop, to check that something does not happen; never to wait for an event."""
        end = self.loop.now() + seconds
        self.loop.next_event(lambda: end)

    def call(self, operation: Operation[A], patience_s: float = TIMEOUT_S) -> A:
        """Return the answer. Raises the error of the call."""
        answers: list[A] = []
        errors: list[EtcdError] = []
        self.etcd.call(operation, answers.append, errors.append, patience_s=patience_s)
        self.until(lambda: answers or errors, f"an answer to {operation!r}"[:200], patience_s + TIMEOUT_S)
        if errors:
            raise errors[0]
        return answers[0]

    def close(self) -> None:
        self.etcd.close()
        self.loop.close()

    def __enter__(self) -> ClientInLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ScriptedServer:
    """Serves one connection after the other, one script each. Records the requests."""

    def __init__(self, *scripts: Callable[[ScriptedServer, socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._scripts = scripts
        self.requests: list[bytes] = []
        self._thread = threading.Thread(target=self._serve, name="scripted server")
        self._thread.start()

    def _serve(self) -> None:
        for script in self._scripts:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # the test is over
                return
            sock.settimeout(TIMEOUT_S)
            with sock, contextlib.suppress(OSError):
                script(self, sock)

    def read_request(self, sock: socket.socket) -> bytes:
        """Read one complete request. Return its body."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += _receive(sock)
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(body) < length:
            body += _receive(sock)
        self.requests.append(head + b"\r\n\r\n" + body)
        return body

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _receive(sock: socket.socket) -> bytes:
    data = sock.recv(65536)
    if not data:
        raise ConnectionError("the client has disconnected")
    return data


def http(body: bytes, status: str = "200 OK", *more: str) -> bytes:
    """Return a response."""
    head = "\r\n".join((f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *more))
    return head.encode() + b"\r\n\r\n" + body


def answer_to(*responses: bytes) -> Callable[[ScriptedServer, socket.socket], None]:
    """Return a script that answers one request with each response, then closes the connection."""

    def script(server: ScriptedServer, sock: socket.socket) -> None:
        for response in responses:
            server.read_request(sock)
            sock.sendall(response)

    return script


def silent_until_disconnect(server: ScriptedServer, sock: socket.socket) -> None:
    """A script: read the request, and answer nothing until the client disconnects."""
    server.read_request(sock)
    sock.recv(1)


PUT_DONE = http(b'{"header":{"revision":"7"}}')


def raised(call: Callable[[], Any], kind: type[BaseException]) -> str:
    """Return the message of the exception."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)
