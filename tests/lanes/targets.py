"""The targets of the fuzzer: each takes bytes of a peer, a worker or a file, and checks its invariants.

A target is a class. ``case(draw)`` runs one case and raises if something broke; ``close()`` releases its resources.
"""

from __future__ import annotations

import json
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tenax._core import commands as command_types
from tenax._core import coordinator as run
from tenax._core import events
from tenax._core.agent import AgentMachine
from tenax._core.bounds import MAX_TEXT
from tenax._core.etcd.errors import EtcdRejected
from tenax._core.etcd.operations import KeyValue
from tenax._core.events import AnyEvent, FromCoordinator
from tenax._core.leadership import keys
from tenax._core.lease import LeaseTerms
from tenax._core.link import wire
from tenax._core.messages import FailureSeen, FromNode, NodeInfo
from tenax._core.model import AgentSettings, Assignment, Failure, Outcome, Verdict
from tenax._core.run_state import AnyCoordinatorEvent, RunSettings
from tenax._core.text import shortened_texts
from tenax._core.watchdog import Request, Watchdog
from tenax._failures import python_traceback
from tenax._failures.evidence import gather
from tenax._failures.report import Report, render, to_json
from tenax._io.http.message import Response
from tenax._io.http.server import HttpServer
from tenax._io.listen import listen
from tenax._node.journal import (
    AnyLine,
    AnyRunLine,
    Header,
    JournalUnreadable,
    RunHeader,
    RunStep,
    Step,
    read_journal,
    read_run_journal,
    replay_run,
)
from tenax._node.messages import lines_for, live_line
from tenax._view.chrome_trace import trace_in_text
from tenax._view.history import histories_of
from tenax._view.html.report_page import report_page
from tenax._view.html.timeline_page import timeline_page
from tenax._view.journal_parts import history_of_node, history_of_run
from tenax._view.status import RunStatus, status_of
from tenax._view.summary import format_summary, summary_of
from tenax.store import _wire as store_wire
from tenax.store._key_values import KeyValues, Limits
from tenax.store._protocol import Session
from tenax.testing.replay import replay

from .values import Draw

TIMEOUT_S = 20.0


class Frames:
    """Frames of both directions: they are rejected, or have the same meaning when they are encoded again."""

    def case(self, draw: Draw) -> None:
        for kind, decode in ((wire.FromAgent, wire.decode_from_agent), (wire.FromServer, wire.decode_from_server)):
            body = draw.json(kind)
            try:
                frame = decode(body)
            except wire.WireError:
                continue
            again = decode(wire.encode(frame)[4:])  # the sender truncates texts that are too long
            assert decode(wire.encode(again)[4:]) == again

    def close(self) -> None:
        """Nothing was opened."""


class Coordinator:
    """The coordinator machine: valid messages with values at their limits, in any order, from any node.

    It raises nothing; its messages are within the limits of their receivers; its state can be shown, and its journal
    can be read and replayed.
    """

    def case(self, draw: Draw) -> None:
        random_ = draw.random_
        on_hang = random_.choice(("off", "report", "restart"))
        settings = RunSettings("run", 1, 3, random_.choice((0, 1, 100)), serving_node="a", on_hang=on_hang)
        machine = run.CoordinatorMachine(settings)
        now, recent = 0.0, []
        steps: list[RunStep] = []
        for _ in range(random_.randrange(2, 40)):
            now += random_.choice((0.0, 0.1, 5.0, 1000.0))
            event = self._event(draw)
            if event is None:
                continue
            sends = machine.step(event, now).sends
            recent.append((now, event, sends))
            steps.append(RunStep(now, event, sends))
            for send in sends:
                wire.decode_from_server(wire.encode(wire.Event(send.event))[4:])
            machine.state.next_deadline()
        status = status_of(machine.state, recent, machine.describe_activity(now), now, 1e9)
        msgspec.json.decode(wire.encode_answer(1, status, "")[4:])
        msgspec.json.decode(msgspec.json.encode(status), type=RunStatus)
        header = RunHeader(3, "0", settings, "h", 1e9, 0.0)
        for step in steps:
            plain = shortened_texts(msgspec.to_builtins(step), MAX_TEXT)  # as the journal writes it
            msgspec.json.decode(msgspec.json.encode(plain), type=AnyRunLine)
        replay_run(header, steps)
        show([history_of_run(header, steps, None)], [])

    def _event(self, draw: Draw) -> Any:
        random_ = draw.random_
        while True:
            if random_.random() < 0.75:
                node_id = random_.choice("abc")
                message = draw.of(FromNode)
                if message["message"] == "NodeJoined":
                    message["node"] = {**draw.of(NodeInfo), "node_id": node_id, "min_nodes": 1, "max_nodes": 3}
                    message["restarts_used"] = 0
                    message["generation"] = random_.choice((0, 1, 2, 3, 1_000_000))
                plain = {"event": "Received", "node_id": node_id, "message": message}
            else:
                plain = draw.of(AnyCoordinatorEvent)
            try:
                return msgspec.convert(plain, AnyCoordinatorEvent)
            except msgspec.ValidationError:
                continue  # out of range: the decoder rejects it

    def close(self) -> None:
        """Nothing was opened."""


class Agent:
    """The agent machine: messages of coordinators and events of this node, in any order.

    It raises nothing; its messages are within the limits; its history can be shown and its journal read.
    """

    def case(self, draw: Draw) -> None:
        random_ = draw.random_
        settings = AgentSettings("run", "default", 2, 3)
        machine = AgentMachine(settings)
        now = 0.0
        steps = []
        for _ in range(random_.randrange(2, 40)):
            now += random_.choice((0.0, 0.1, 5.0, 100.0))
            try:
                event = msgspec.convert(draw.of(random_.choice((AnyEvent, AnyEvent, FromCoordinator))), AnyEvent)
            except msgspec.ValidationError:
                continue
            commands = machine.step(event, now)
            for command in commands:
                if isinstance(command, command_types.SendMessage):
                    wire.decode_from_agent(wire.encode(wire.Message(command.message))[4:])
            list(lines_for(event, commands, machine.state))
            live_line(machine.state)
            plain = shortened_texts(msgspec.to_builtins(Step(now, event, commands)), MAX_TEXT)
            steps.append(msgspec.json.decode(msgspec.json.encode(plain), type=AnyLine))
        header = Header(3, "0", settings, "train.py", "h", 1e9, 0.0)
        replay(header, steps, None)
        show([], [history_of_node(header, steps, None)])
        if machine.state.verdict is not None:
            report = Report(
                verdict=machine.state.verdict, entrypoint="t", host="h", run_id="r", role="d", max_restarts=3
            )
            render(report, True, 80)
            to_json(report)

    def close(self) -> None:
        """Nothing was opened."""


def show(runs: list[Any], nodes: list[Any]) -> None:
    """Render every page of these histories."""
    histories = histories_of(runs, nodes)
    for history in histories:
        timeline_page(history)
        trace_in_text(history)
    summary = summary_of(histories)
    format_summary(summary)
    report_page(summary, histories)


class Journals:
    """Journal files: they are read and shown, or rejected as unreadable."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tenax-fuzz-")

    def case(self, draw: Draw) -> None:
        random_ = draw.random_
        path = Path(self._folder.name) / "journal.jsonl"
        is_run = random_.random() < 0.5
        first, kinds = (RunHeader, AnyRunLine) if is_run else (Header, AnyLine)
        lines = [draw.json(first), *(draw.json(kinds) for _ in range(random_.randrange(8)))]
        path.write_bytes(b"\n".join(lines) + b"\n" * random_.randrange(2))
        with suppress(JournalUnreadable):
            if is_run:
                header, steps, footer = read_run_journal(str(path))
                replay_run(header, steps)
                show([history_of_run(header, steps, footer)], [])
            else:
                agent_header, agent_steps, footer = read_journal(str(path))
                replay(agent_header, agent_steps, footer)
                show([], [history_of_node(agent_header, agent_steps, footer)])

    def close(self) -> None:
        self._folder.cleanup()


_MESSAGES = ("RuntimeError: boom", "", "x\ny", "\x1b[31m", "\ud800", f"{python_traceback._HEADER}\n  File", 1, None)
_OUTPUT = (
    *(python_traceback._HEADER, '  File "x", line 1, in f', "RuntimeError: boom", "", "Fatal Python error: x"),
    *(*python_traceback._CONNECTORS, "terminate called without an active exception", "  what():  x", "SyntaxError: x"),
    *("[rank1]: x", "CUDA out of memory", "Killed", "\x00\udcff", "loss is nan", "  | + Exception Group "),
)


class ErrorFiles:
    """Error files and stderr of a dead worker: the evidence can be sent and shown."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tenax-fuzz-")

    def case(self, draw: Draw) -> None:
        random_ = draw.random_
        path = Path(self._folder.name) / "error.json"
        times = ("1", "1e999", "nan", -1, None, "9" * 400)
        extra = {"py_callstack": random_.choice(_MESSAGES), "timestamp": random_.choice(times)}
        message = {"message": random_.choice(_MESSAGES), "extraInfo": random_.choice((extra, None, []))}
        message["errorCode"] = random_.choice((1, "x", 10**30))
        written: tuple[object, ...] = ({"message": message}, {"message": random_.choice(_MESSAGES)}, [], message)
        data = json.dumps(random_.choice(written)).encode()
        path.write_bytes(draw.damaged(data) if random_.random() < 0.7 else data)
        printed = "\n".join(random_.choice(_OUTPUT) for _ in range(random_.randrange(30)))
        code = random_.choice((1, 0, -9, -6, -11, 127, 300))
        evidence = gather(
            pid=7,
            exit_code=code,
            error_file=str(path),
            stderr_tail=printed.encode("utf-8", "surrogateescape"),
            tail_is_cut=random_.random() < 0.5,
            wall_to_agent_clock=random_.choice((0.0, -1e9)),
        )
        failure = Failure(1, 0, 0, 7, code, 1.0, evidence=evidence)
        wire.decode_from_agent(wire.encode(wire.Message(FailureSeen(1, failure, 1.0)))[4:])
        report_on(Verdict(Outcome.FAILED, "why", failures=(failure,)))

    def close(self) -> None:
        self._folder.cleanup()


def report_on(verdict: Verdict) -> None:
    """Render the report as text and as JSON."""
    report = Report(verdict=verdict, entrypoint="t", host="h", run_id="r", role="d", max_restarts=3)
    render(report, True, 80)
    to_json(report)


class Timers:
    """Lines in the watchdog's pipe: they are requests, or are ignored alone."""

    def case(self, draw: Draw) -> None:
        random_ = draw.random_
        dog = Watchdog(2)
        part = Assignment(1)
        dog.on_step(events.GenerationFormed(part), [command_types.StartWorkers(part)])
        dog.on_step(events.WorkerStarted(1, 0, 7), [])
        now = 0.0
        for _ in range(random_.randrange(1, 20)):
            now += random_.choice((0.0, 1.0, 1e6))
            data = draw.json(Request) + b"\n" * random_.randrange(3)
            if random_.random() < 0.5:
                data = data.replace(b'"pid": ', b'"pid": 7, "was": ')
            at = random_.randrange(len(data) + 1)
            for piece in (data[:at], data[at:]):
                dog.take(piece, now, 1e9 + now)
            for expired in dog.expired(now):
                assert msgspec.json.decode(msgspec.json.encode(expired), type=AnyEvent) == expired
            dog.next_deadline()
            dog.take_notes()
            dog.scopes()

    def close(self) -> None:
        """Nothing was opened."""


class EtcdKeys:
    """The leader's key and the record in etcd, as any client of etcd could write them."""

    def case(self, draw: Draw) -> None:
        for kind in (keys.Leader, keys.Written):
            value = draw.json(kind)
            try:
                found = keys._read(KeyValue(b"/key", value, 1, 1), kind)
            except EtcdRejected:
                continue
            msgspec.json.encode(found)
            if isinstance(found, keys.Written):
                machine = run.CoordinatorMachine(RunSettings("run", 1, 3))
                opened = run.Opened(record=found.record, generation=found.record.generation, return_s=1.0, alone_s=1.0)
                for event in (opened, run.Tick(), run.NodeLost("a", "why")):
                    for send in machine.step(event, 1e6).sends:
                        wire.decode_from_server(wire.encode(wire.Event(send.event))[4:])
                status = status_of(machine.state, [], machine.describe_activity(0.0), 0.0, 0.0)
                msgspec.json.decode(msgspec.json.encode(status), type=RunStatus)

    def close(self) -> None:
        """Nothing was opened."""


class Store:
    """The workers' store: commands in any order, with absurd lengths, divided anywhere."""

    def case(self, draw: Draw) -> None:
        random_ = draw.random_
        table = KeyValues(Limits())
        sessions = [Session(table) for _ in range(3)]
        for session in sessions:
            session.receive(store_wire.GREETING)
        for _ in range(random_.randrange(1, 30)):
            session = random_.choice(sessions)
            parts = [bytes([random_.randrange(24)])]
            for _ in range(random_.randrange(5)):
                size = (
                    random_.choice((0, 1, 1, 2, 3, 1 << 40, (1 << 64) - 1))
                    if random_.random() < 0.3
                    else random_.randrange(4)
                )
                parts.append(size.to_bytes(8, "little") + b"k" * min(size, 8))
            data = b"".join(parts)
            at = random_.randrange(len(data) + 1)
            for piece in (data[:at], data[at:]):
                assert isinstance(session.receive(piece), bytes)
        for session in sessions:
            session.close()

    def close(self) -> None:
        """Nothing was opened."""


class Http:
    """The HTTP server of pages, health checks and metrics, over real connections: it still answers an honest client."""

    def __init__(self) -> None:
        listener = listen("127.0.0.1", 0)
        self._address = listener.getsockname()[:2]
        self._server = HttpServer(listener, lambda _: Response(200, b"ok"), name="fuzz")
        self._server.start()

    def case(self, draw: Draw) -> None:
        random_ = draw.random_
        method, path = random_.choice(("GET", "POST", "HEAD", "x" * 90)), random_.choice(("/", "/a?b=%zz&c", "*", ""))
        lines = [f"{method} {path} HTTP/1.{random_.choice((0, 1, 9))}"]
        for _ in range(random_.randrange(6)):
            name = random_.choice(
                ("Host", "Content-Length", "Transfer-Encoding", "Connection", "X" * 200, "Expect", " ")
            )
            value = random_.choice(
                ("h", "0", "-1", "9" * 30, "chunked", "close", " " * 500 + "x", "\x00", "100-continue")
            )
            lines.append(f"{name}{random_.choice((': ', ':', ' : ', ''))}{value}")
        data = "\r\n".join(lines).encode() + b"\r\n\r\n" + b"ffff\r\n" * random_.randrange(3)
        if random_.random() < 0.5:
            data = draw.damaged(data)
        with socket.create_connection(self._address, TIMEOUT_S) as peer, suppress(OSError):
            peer.sendall(data)
            if random_.random() < 0.5:
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(1 << 16):
                    pass
        if random_.random() < 0.1:
            self._check_honest_client()

    def _check_honest_client(self) -> None:
        with socket.create_connection(self._address, TIMEOUT_S) as honest:
            honest.sendall(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
            answer = b""
            while part := honest.recv(1 << 16):
                answer += part
        assert b" 200 " in answer.split(b"\r\n")[0], answer

    def close(self) -> None:
        self._check_honest_client()
        self._server.stop()


class TcpLinks:
    """Both ends of real links: a server with an honest member and an authenticated peer that sends anything, and an
    engine to which the server sends anything. The honest member is answered, and the loops continue."""

    def __init__(self) -> None:
        from kit import tcp

        self._kit = tcp
        self._cases = 0
        self._open()

    def _open(self) -> None:
        kit = self._kit
        # Both must be in the first generation: alone in it, the honest member, which never stops its workers, would
        # block the engine. It sends one heartbeat per case, so the lease must be long.
        nodes = (2, 4)
        self._served = kit.ServerThread(nodes, max_restarts=1000, terms=LeaseTerms(beat_s=1.0, lease_s=3600.0))
        self._honest = self._served.member("honest", nodes=nodes)
        self._engine = kit.EngineNode(f"127.0.0.1:{self._served.port}", nodes)
        self._engine.until(kit.GenerationFormed)

    def case(self, draw: Draw) -> None:
        random_ = draw.random_
        self._cases += 1
        peer = self._served.client(random_.choice(("p", "q", f"peer-{self._cases}")))
        try:
            peer.greet()
            bodies = []
            for _ in range(random_.randrange(1, 10)):
                body = draw.json(wire.FromAgent)
                if b"StopRequest" in body or b"Cancel" in body:
                    continue  # allowed for an authenticated operator
                bodies.append(body)
            with suppress(OSError):
                peer.sock.sendall(b"".join(len(body).to_bytes(4, "big") + body for body in bodies))
        finally:
            peer.close()
        event = self._event(draw)
        if event is not None:
            nodes = tuple(each for each in self._served.server.coordinator.state.nodes if each != "honest")
            self._served.thread.call(lambda: self._served.server.deliver(run.Send(nodes, event)))
        if self._served.server.links.is_over:  # its members can end a run by success or failures
            self._close()
            self._open()
        self._check()

    def _event(self, draw: Draw) -> Any:
        try:
            event = msgspec.convert(draw.of(FromCoordinator), FromCoordinator)
        except (msgspec.ValidationError, UnicodeEncodeError):
            return None
        return None if type(event).__name__ in ("RunEnded", "JoinRefused") else event

    def _check(self) -> None:
        """Check that the honest member is answered, unless the run has ended."""
        try:
            self._honest.send(wire.Beat(self._cases))
            while (frame := self._honest.receive()) is not None:
                if isinstance(frame, wire.BeatAnswer) and frame.number == self._cases:
                    break
        except OSError:
            frame = None
        for thread in (self._served.thread, self._engine.thread):
            assert thread.raised is None, thread.raised
        assert frame is not None or self._served.server.links.is_over, "the honest member was disconnected"

    def _close(self) -> None:
        self._engine.close()
        self._honest.close()
        self._served.close()

    def close(self) -> None:
        self._check()
        self._close()


TARGETS: dict[str, tuple[type[Any], float]] = {
    # With the share of absurd values.
    "frames": (Frames, 0.02),
    "coordinator": (Coordinator, 0.0),
    "agent": (Agent, 0.0),
    "journals": (Journals, 0.003),
    "errors": (ErrorFiles, 0.0),
    "timers": (Timers, 0.1),
    "etcd": (EtcdKeys, 0.005),
    "store": (Store, 0.0),
    "http": (Http, 0.0),
    "links": (TcpLinks, 0.005),
}
