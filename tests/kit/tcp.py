"""Helpers for the tests of the tcp engine: loops in threads, plain clients, certificates, unique addresses.

Nothing here sleeps. A test waits for a frame on a socket, or for an event of a loop.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kit.addresses import own_endpoint
from kit.fake_node import fake_node
from kit.processes import TIMEOUT_S
from tenax._core.coordinator import Opened, RunSettings
from tenax._core.events import Fenced, GenerationEnded, GenerationFormed, SignalReceived, Waiting
from tenax._core.lease import LeaseTerms
from tenax._core.link import wire
from tenax._core.messages import FromNode, NodeInfo, NodeJoined, NodeReady
from tenax._core.model import AgentSettings, Assignment
from tenax._engines.tcp.engine import TcpEngine, TcpSettings
from tenax._engines.tcp.link import Link
from tenax._engines.tcp.server import CoordinatorServer
from tenax._io.loop import Loop

T = TypeVar("T")

SHORT = LeaseTerms(beat_s=0.1, lease_s=0.6)
LONG = LeaseTerms(lease_s=2 * TIMEOUT_S)  # for clients that send no beats: none is lost on a busy machine


def listener(address: str = "127.0.0.1", backlog: int = 4096) -> socket.socket:
    sock = socket.socket()
    sock.bind((address, 0))
    sock.listen(backlog)
    return sock


def connected_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a real TCP connection."""
    with listener() as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


def wait_readable(sock: socket.socket | int, timeout_s: float = TIMEOUT_S) -> bool:
    return bool(select.select([sock], [], [], timeout_s)[0])


# --- links, served by hand --------------------------------------------------------------------------------------------


class RecordedLink:
    """A link, and what it received."""

    def __init__(
        self, sock: socket.socket, tls: Any = None, on_body: Callable[[bytes], None] = lambda _: None, **options: Any
    ) -> None:
        self.bodies: list[bytes] = []
        self.closed: tuple[str, bool] | None = None

        def take(body: bytes) -> None:
            self.bodies.append(body)
            on_body(body)

        self.link = Link(sock, take, self._on_closed, tls, **options)

    def _on_closed(self, why: str, was_announced: bool) -> None:
        assert self.closed is None, "a link closes once"
        self.closed = (why, was_announced)


def serve(links: list[RecordedLink], condition: Callable[[], T], timeout_s: float = TIMEOUT_S) -> T:
    """Serve these links as a loop would, until the condition is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        left_s = deadline - time.monotonic()
        assert left_s > 0, f"timed out; closed: {[each.closed for each in links]}"
        poll = select.poll()
        open_links = {each.link.fileno(): each.link for each in links if not each.link.is_closed}
        for descriptor, link in open_links.items():
            poll.register(descriptor, select.POLLIN | (select.POLLOUT if link.wants_to_write else 0))
        for descriptor, mask in poll.poll(left_s * 1000):
            if mask & select.POLLOUT:
                open_links[descriptor].on_writable()
            if mask & ~select.POLLOUT:
                open_links[descriptor].on_readable()
    return found


# --- a loop in a thread -----------------------------------------------------------------------------------------------


class LoopThread:
    """A real loop in a thread. ``call`` runs a function in it and returns the result."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.loop = Loop(clock)
        self._reader, self._writer = os.pipe()
        self._calls: list[Callable[[], None]] = []
        self._is_over = False
        self.raised: BaseException | None = None  # the exception that ended the loop
        self.loop.watch(self)
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_over:
                self.loop.next_event(lambda: None)
        except BaseException as error:
            self.raised = error

    def call(self, function: Callable[[], T]) -> T:
        done = threading.Event()
        answer: list[Any] = []

        def run() -> None:
            try:
                answer.append(function())
            except BaseException as error:
                answer.extend((None, error))
            done.set()

        self._calls.append(run)
        os.write(self._writer, b"!")
        assert done.wait(TIMEOUT_S), f"the loop does not respond; it raised {self.raised!r}"
        if len(answer) > 1:
            raise answer[1]
        result: T = answer[0]
        return result

    # Watched by the loop.

    def fileno(self) -> int:
        return self._reader

    @property
    def wants_to_write(self) -> bool:
        return False

    def on_writable(self) -> None:
        """Nothing is written."""

    def on_readable(self) -> None:
        os.read(self._reader, 1)
        self._calls.pop(0)()

    def close(self) -> None:
        self._is_over = True
        self.loop.soon(lambda: self.loop.post(SignalReceived(0)))
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the loop does not end"
        self.loop.close()
        os.close(self._reader)
        os.close(self._writer)
        if self.raised is not None:
            raise self.raised


# --- a server and its clients -----------------------------------------------------------------------------------------


class ServerThread:
    """A coordinator's server on its own loop. Events and messages of the coordinator are recorded."""

    def __init__(self, nodes: tuple[int, int] = (1, 4), secret: bytes = b"", **options: Any) -> None:
        self.secret = secret
        self.record: list[tuple[Any, list[Any]]] = []
        self._recorded = threading.Condition()
        self.thread = LoopThread(options.pop("clock", time.monotonic))
        first = options.pop("listener", None) or listener()
        self.port: int = first.getsockname()[1]
        listeners = [first, *options.pop("more_listeners", [])]
        run = RunSettings(
            options.pop("run_id", "run"),
            *nodes,
            options.pop("max_restarts", 3),
            last_call_s=options.pop("last_call_s", 0),
        )
        opened = options.pop("opened", Opened())
        terms = options.pop("terms", LONG)

        def start() -> CoordinatorServer:
            made = CoordinatorServer(listeners, run, terms, secret, self.thread.loop, record=self._note, **options)
            made.open(opened)
            return made

        self.server = self.thread.call(start)

    def _note(self, _at: float, event: Any, sends: list[Any], _state: Any) -> None:
        with self._recorded:
            self.record.append((event, sends))
            self._recorded.notify_all()

    def until_event(
        self, kind: type[Any], *, number: int = 0, message_kind: type[Any] | None = None, **fields: object
    ) -> Any:
        """Wait until the coordinator received this event for the n-th time."""

        def is_it(event: Any) -> bool:
            return (
                isinstance(event, kind)
                and (message_kind is None or isinstance(event.message, message_kind))
                and all(getattr(event, key) == value for key, value in fields.items())
            )

        def found() -> Any:
            return dict(enumerate(event for event, _ in self.record if is_it(event))).get(number)

        with self._recorded:
            assert self._recorded.wait_for(found, TIMEOUT_S), f"no {kind.__name__} {fields} in {self.record}"
            return found()

    def events(self, kind: type[Any]) -> list[Any]:
        return [event for event, _ in self.record if isinstance(event, kind)]

    def client(self, node_id: str = "", **options: Any) -> Client:
        return Client(self.port, node_id or os.urandom(8).hex(), options.pop("secret", self.secret), **options)

    def member(self, node_id: str = "", **info: Any) -> Client:
        """Return a client that is a member of the run: authenticated, joined and ready."""
        client = self.client(node_id)
        client.greet()
        client.join(**info)
        return client

    def close(self) -> None:
        self.thread.call(self.server.close)
        self.thread.close()


@contextmanager
def run_server(**options: Any) -> Iterator[ServerThread]:
    made = ServerThread(**options)
    try:
        yield made
    finally:
        made.close()


class Client:
    """A node's side of the wire, controlled by the test: it blocks, and does nothing by itself."""

    def __init__(
        self, port: int, node_id: str, secret: bytes = b"", run_id: str = "run", address: str = "127.0.0.1"
    ) -> None:
        self.node_id = node_id
        self.run_id = run_id
        self.secret = secret
        self.sock = socket.create_connection((address, port), TIMEOUT_S)
        self._reader = wire.FrameReader(wire.MAX_BYTES)
        self._bodies: list[bytes] = []
        self.hello = wire.Hello(wire.VERSION, run_id, node_id, os.urandom(wire.NONCE_BYTES))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, frame: wire.FromAgent) -> None:
        self.sock.sendall(wire.encode(frame))

    def send_message(self, message: FromNode) -> None:
        self.send(wire.Message(message))

    def receive(self) -> wire.FromServer | None:
        """Return the next frame, or None when the server has closed."""
        while not self._bodies:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._bodies += self._reader.feed(data)
        return wire.decode_from_server(self._bodies.pop(0))

    def until(self, kind: type[Any]) -> Any:
        """Return the next event or frame of this kind; skip everything before it."""
        while (frame := self.receive()) is not None:
            what = frame.event if isinstance(frame, wire.Event) else frame
            if isinstance(what, kind):
                return what
        pytest.fail(f"the server closed and sent no {kind.__name__}")

    def is_closed_by_server(self) -> bool:
        """Read to the end, however long that takes."""
        while self.receive() is not None:
            pass
        return True

    def challenge(self) -> wire.Challenge:
        self.send(self.hello)
        challenge: wire.Challenge = self.until(wire.Challenge)
        return challenge

    def proof(self, challenge: wire.Challenge) -> wire.Proof:
        return wire.Proof(wire.prove(self.secret, "agent", self.hello, challenge.nonce))

    def greet(self) -> wire.Accepted:
        challenge = self.challenge()
        self.send(self.proof(challenge))
        accepted: wire.Accepted = self.until(wire.Accepted)
        assert accepted.proof == wire.prove(self.secret, "coordinator", self.hello, challenge.nonce)
        return accepted

    def info(self, nodes: tuple[int, int] = (1, 4), **fields: Any) -> NodeInfo:
        return NodeInfo(self.node_id, f"host-{self.node_id}", min_nodes=nodes[0], max_nodes=nodes[1], **fields)

    def join(self, generation: int = 0, nodes: tuple[int, int] = (1, 4), **fields: Any) -> None:
        self.send_message(NodeJoined(self.info(nodes, **fields), generation=generation))
        self.send_message(NodeReady(generation, "127.0.0.1", 1))

    def close(self) -> None:
        self.sock.close()


class Beating:
    """Keeps an honest member's lease: sends heartbeats and reads, until it is stopped."""

    def __init__(self, client: Client, every_s: float) -> None:
        self.client = client
        self.events: list[Any] = []
        self.answered = 0
        self.was_closed = False
        self._every_s = every_s
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="beating")
        self._thread.start()

    def _run(self) -> None:
        client, number = self.client, 0
        due = time.monotonic()
        while True:
            ready, _, _ = select.select([client.sock, self._stop_reader], [], [], max(0.0, due - time.monotonic()))
            if self._stop_reader in ready:
                return
            if client.sock in ready:
                frame = client.receive()
                if frame is None:
                    self.was_closed = True
                    return
                self.answered += isinstance(frame, wire.BeatAnswer)
                if isinstance(frame, wire.Event):
                    self.events.append(frame.event)
            if time.monotonic() >= due:
                number += 1
                due = time.monotonic() + self._every_s
                client.send(wire.Beat(number))

    def pause(self) -> None:
        """Stop the heartbeats; the test may use the client again."""
        os.write(self._stop_writer, b"!")
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self.pause()
        os.close(self._stop_reader)
        os.close(self._stop_writer)


@contextmanager
def beating(client: Client, every_s: float = 0.1) -> Iterator[Beating]:
    made = Beating(client, every_s)
    try:
        yield made
    finally:
        made.stop()


# --- certificates -----------------------------------------------------------------------------------------------------


class Certificates:
    """A certificate authority, a node signed by it, and a node signed by another one. Uses ``openssl``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.endpoint = own_endpoint()  # in the certificates
        self.ca = self._authority("ca")
        self.cert, self.key = self._signed("node", "ca")
        self.other_ca = self._authority("strange-ca")
        self.other_cert, self.other_key = self._signed("stranger", "strange-ca")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)

    def _authority(self, name: str) -> str:
        new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        self._openssl("req", "-x509", *new, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
        return str(self.folder / f"{name}.pem")

    def _signed(self, name: str, by: str) -> tuple[str, str]:
        new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        self._openssl("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (self.folder / f"{name}.ext").write_text(f"subjectAltName=DNS:localhost,IP:{self.endpoint.partition(':')[0]}")
        authority = ("-CA", f"{by}.pem", "-CAkey", f"{by}.key", "-CAcreateserial")
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", *authority), *("-extfile", f"{name}.ext", "-out", f"{name}.pem")
        )
        return str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key")


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")


# --- a server in its own process --------------------------------------------------------------------------------------


class ServerProcess:
    """A server process that can be stopped, limited and measured."""

    def __init__(
        self,
        nodes: tuple[int, int] = (1, 4),
        terms: LeaseTerms = SHORT,
        handshake_timeout_s: float = 5.0,
        max_descriptors: int = 0,
    ) -> None:
        options = {
            "nodes": nodes,
            "beat_s": terms.beat_s,
            "lease_s": terms.lease_s,
            "handshake_timeout_s": handshake_timeout_s,
            "max_descriptors": max_descriptors,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "tcp_server_main.py"), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.port = int(self._line())

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        assert wait_readable(self.process.stdout.fileno()), "the server printed nothing"
        return self.process.stdout.readline()

    def figures(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(b"?\n")
        self.process.stdin.flush()
        figures: dict[str, Any] = json.loads(self._line())
        return figures

    def client(self, node_id: str = "") -> Client:
        return Client(self.port, node_id or os.urandom(8).hex())

    def member(self, node_id: str = "", **info: Any) -> Client:
        client = self.client(node_id)
        client.greet()
        client.join(**info)
        return client

    def stop(self) -> None:
        """Send SIGSTOP; returns when it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.resume()
        self.process.kill()
        self.process.communicate()


@contextmanager
def server_process(**options: Any) -> Iterator[ServerProcess]:
    made = ServerProcess(**options)
    try:
        yield made
    finally:
        made.close()


# --- an engine on its own loop ----------------------------------------------------------------------------------------


class EngineNode:
    """A node with a real engine and without workers.

    It joins every generation, stops on request, and reports that: all that the coordinator sees of an agent.
    """

    def __init__(self, endpoint: str, nodes: tuple[int, int] = (1, 4), max_restarts: int = 3, **settings: Any) -> None:
        self.events: list[Any] = []
        self.printed: list[str] = []
        self.holds: list[float] = []
        self.kept: list[str] = []  # connections of which a keeper would hold a copy
        self.released: list[str] = []
        self.generation = 0
        self.is_running = False
        self.part = Assignment(0)
        self._changed = threading.Condition()
        self.engine = TcpEngine(
            TcpSettings(endpoint, settings.pop("run_id", "run"), *nodes, last_call_s=0.0, **settings)
        )
        self.thread = LoopThread()
        agent = AgentSettings("run", "default", 1, max_restarts)
        self._node = fake_node(
            agent,
            messages_on_connecting=self._messages,
            hold=self._on_hold,
            keep=lambda name, _: self._note(self.kept, name),
            release=lambda name: self._note(self.released, name),
            print_line=self._on_printed,
        )
        self._is_open = True
        self.thread.call(lambda: self.engine.open(self.thread.loop, self._on_event, self._node))

    def _note(self, where: list[Any], what: Any) -> None:
        with self._changed:
            where.append(what)
            self._changed.notify_all()

    def _on_hold(self, seconds: float) -> None:
        self._note(self.holds, seconds)

    def _on_printed(self, text: str) -> None:
        self._note(self.printed, text)

    def _messages(self, info: NodeInfo) -> list[FromNode]:
        joined = NodeJoined(
            info,
            generation=self.generation,
            is_running=self.is_running,
            group_rank=self.part.group_rank if self.is_running else -1,
            group_world_size=self.part.group_world_size if self.is_running else 0,
            coordinator_rank=self.part.coordinator_rank if self.is_running else -1,
        )
        return [joined] if self.is_running else [joined, NodeReady(self.generation)]

    def _on_event(self, event: Any) -> None:
        match event:
            case GenerationFormed(part):
                self.generation, self.is_running, self.part = part.generation, True, part
            case GenerationEnded(generation) | Fenced(generation) if generation == self.generation:
                self.is_running = False
                self.engine.send(NodeReady(self.generation))
        self._note(self.events, event)

    def event_kinds(self) -> list[type[Any]]:
        """Return the kinds of the received events, except ``Waiting``."""
        return [type(event) for event in self.events if not isinstance(event, Waiting)]

    def until(self, kind: type[Any], timeout_s: float = TIMEOUT_S) -> Any:
        """Return the first event of this kind, when it has come."""

        def found() -> Any:
            return next((event for event in self.events if isinstance(event, kind)), None)

        return self._until(found, timeout_s)

    def until_printed(self, text: str) -> str:
        return str(self._until(lambda: next((line for line in self.printed if text in line), None)))

    def until_held(self, condition: Callable[[list[float]], bool]) -> None:
        self._until(lambda: condition(self.holds))

    def _until(self, condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
        with self._changed:
            came = self._changed.wait_for(condition, timeout_s)
            assert came, f"timed out; events {self.events}, printed {self.printed}, loop {self.thread.raised!r}"
            return condition()

    def send(self, message: FromNode) -> None:
        self.thread.call(lambda: self.engine.send(message))

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.thread.call(self.engine.close)
            self.thread.close()


@contextmanager
def engine_node(endpoint: str, **settings: Any) -> Iterator[EngineNode]:
    made = EngineNode(endpoint, **settings)
    try:
        yield made
    finally:
        made.close()


class ReservedAddress:
    """An address that is bound but does not listen until requested: connections are refused."""

    def __init__(self) -> None:
        self.endpoint = own_endpoint()
        host, _, port = self.endpoint.rpartition(":")
        self.sock = socket.socket()
        self.sock.bind((host, int(port)))  # without SO_REUSEADDR, so that no other process can bind it

    def listen(self) -> socket.socket:
        self.sock.listen(16)
        return self.sock

    def close(self) -> None:
        self.sock.close()


@contextmanager
def reserved_address() -> Iterator[ReservedAddress]:
    made = ReservedAddress()
    try:
        yield made
    finally:
        made.close()
