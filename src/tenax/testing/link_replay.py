"""Replay of a node's links: make the recorded calls of the machines again, and compare what they return.

See ``_core/link/recording.py``. Machines, states and functions that a call got are those of the replay.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from typing import Any

import msgspec

from tenax._core import authority, coordinator, events, lease, messages, model, run_state
from tenax._core.coordinator import CoordinatorMachine
from tenax._core.etcd import errors, operations
from tenax._core.leadership import keys
from tenax._core.leadership.machine import Connect, Leadership, QuietLeadership, Serve
from tenax._core.leadership.term import StopServing
from tenax._core.link import client, server, wire
from tenax._core.link.recording import Call, Plain, Quiet, values_returned
from tenax._core.policy import RecordedPolicy
from tenax._node.link_journal import LinkHeader

# What a journal may name. A name that is not here is rejected, never imported.
_STRUCTS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": kind
    for module in (wire, messages, events, run_state, operations, keys, model, lease, authority)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
}
_ERRORS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.EtcdError)
}


class _Client(client.LinkClient):
    """Proofs are not recorded: this one accepts the coordinator if the recorded one did."""

    def prove(self, frame: wire.Accepted, *, is_valid: bool) -> wire.Accepted:
        proof = wire.prove(self._secret, "coordinator", self._hello, self._nonce) if is_valid else b""
        return msgspec.structs.replace(frame, proof=proof)


class LinkReplay(Plain):
    """Replays lines in order. ``story``: what happened, with the time; ``differences``: where a call returned another
    result than the journal has."""

    def __init__(self, lines: Sequence[Call | Quiet]) -> None:
        super().__init__()
        self.story: list[tuple[float, str]] = []
        self.differences: list[str] = []
        self._lines = lines
        self._machines: dict[str, Any] = {}
        self._by_number: dict[int, server.Peer] = {}
        self._returned: dict[int, Any] = {}
        self._secret = b""  # of the server, concealed
        for number, line in enumerate(lines):
            try:
                if isinstance(line, Quiet):
                    self._restore(line)
                elif line.method:
                    self._call(number, line)
                else:
                    self._machines[line.machine] = self._create(number, line)
            except (LookupError, ValueError, TypeError, AttributeError) as error:
                # Damaged, or of machines that have changed: what follows would be compared with a wrong state.
                what = f"{line.machine}.{getattr(line, 'method', 'quiet') or 'create'}"
                self.differences.append(f"line {number + 2}, {what}, cannot be replayed: {error!r}; ended there")
                return

    # --- machines -----------------------------------------------------------------------------------------------------

    def _create(self, number: int, line: Call) -> Any:
        given = [self._value(each) for each in line.given]
        named = {name: self._value(each) for name, each in line.named.items()}
        match line.machine:
            case "client":
                return _Client(*given, **named)
            case "leadership":
                return Leadership(*given, **named)
            case "coordinator":
                following = [line for line in self._lines[number + 1 :] if isinstance(line, Call)]
                decisions = (each.decision for each in following if each.machine == "coordinator")
                return CoordinatorMachine(given[0], RecordedPolicy(decisions))
            case "server":
                self._secret = given[2] = b64decode(line.given[2])
                leadership, linked = self._machines.get("leadership"), self._machines["client"]
                named["counts"] = leadership.counts if leadership is not None else lambda _: True
                named["is_unleased"] = lambda node_id: node_id == linked.node.node_id and linked.is_unleased
                return server.LinkServer(*given, **named)
        raise ValueError(f"no machine is called {line.machine!r}")

    def _restore(self, line: Quiet) -> None:
        machine = self._machines[line.machine]
        match line.machine:
            case "client":
                machine.set_quiet_state(msgspec.convert(line.state, client.Beats, str_keys=True))
            case "leadership":
                machine.set_quiet_state(msgspec.convert(line.state, QuietLeadership, str_keys=True))
            case "server":
                kind = tuple[float, dict[str, tuple[float, str]], dict[int, server.PeerBeats]]
                tick_at, absent, peers = msgspec.convert(line.state, kind, str_keys=True)
                machine.set_quiet_state(tick_at, absent)
                for number, beats in peers.items():
                    self._by_number[number].set_quiet_state(beats)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _call(self, number: int, line: Call) -> None:
        machine = self._machines[line.machine]
        args = self._arguments(line)
        named = {name: self._value(each) for name, each in line.named.items()}
        outputs: Any
        try:
            outputs = getattr(machine, line.method)(*args, **named)
        except wire.WireError as error:
            outputs = error
        for value in values_returned(outputs):
            self._returned[self.digest(value)] = value
        names, digest = self.outputs(outputs)
        if (names, digest) != (line.outputs, line.digest):
            what = "other contents" if names == line.outputs else f"{', '.join(names) or 'nothing'}"
            self.differences.append(
                f"line {number + 2}, {line.machine}.{line.method}: the journal has "
                f"{', '.join(line.outputs) or 'nothing'}, this version of tenax decides {what}"
            )
        if (line.machine, line.method) == ("server", "opened"):  # its line was written once it was authenticated
            machine.peers = dict.fromkeys(sorted(machine.peers, key=self.peers.__getitem__))
        self.story += [(line.at, text) for text in _texts(line, args, outputs)]

    def _arguments(self, line: Call) -> list[Any]:
        given = list(line.given)
        match line.machine, line.method:
            case "server", "opened":
                plain, since, nonce, address = given[0]
                number = plain["peer"]
                peer = self._by_number[number] = server.Peer(since, b64decode(nonce), address)
                self.peers[peer] = number
                return [peer]
            case "server", "received":
                peer, frame, now = map(self._value, given)
                if isinstance(frame, wire.Proof):
                    frame = wire.Proof(wire.prove(self._secret, "agent", peer.hello, peer.nonce))
                return [peer, frame, now]
            case "client", "opened":
                return [b64decode(given[0]), b64decode(given[1]), given[2]]
            case "client", "received" if len(given) == 3:
                frame, now, is_valid = map(self._value, given)
                return [self._machines["client"].prove(frame, is_valid=is_valid), now]
            case "leadership", "listening":
                seed = b"".join(map(b64decode, given[2]))
                return [self._value(given[0]), b64decode(given[1]), seed, given[3]]
        return [self._value(each) for each in given]

    def _value(self, plain: Any) -> Any:
        match plain:
            case {"answers": answers, "value": value}:
                header = msgspec.convert(value["header"], operations.Header)
                return operations.TransactionAnswer(header, value["succeeded"], tuple(map(self._value, answers)))
            case {"struct": name, "value": value}:
                return msgspec.convert(value, _STRUCTS[name], str_keys=True)
            case {"returned": digest}:
                return self._returned[digest]
            case {"peer": number}:
                return self._by_number[number]
            case {"error": name, "value": value}:
                error = _ERRORS[name](str(value["message"]))
                vars(error).update(value)
                return error
            case {"supplied": "state"}:
                return self._machines["coordinator"].state
            case {"supplied": "function"}:
                machine = self._machines.get("coordinator")
                return lambda: machine.state  # type: ignore[union-attr]
            case {"supplied": name}:
                return self._machines[name]
            case list():
                return [self._value(each) for each in plain]
        return plain


def _texts(line: Call, args: list[Any], outputs: Any) -> list[str]:
    """Return what a call meant, for people."""
    if isinstance(outputs, wire.WireError):
        return [f"rejected what the peer sent: {outputs}"]
    texts = []
    if line.machine == "client" and line.method in ("send", "announce") and outputs:
        sent = args[0] if isinstance(args[0], list) else [args[0]]
        texts.append(f"sent {', '.join(type(message).__name__ for message in sent) or 'nothing'} to the coordinator")
    for output in outputs if isinstance(outputs, list) else ():
        match output:
            case client.Linked():
                texts.append("linked to the coordinator")
            case client.Lost(reason):
                texts.append(reason)
            case client.Emit(event):
                texts.append(f"received {type(event).__name__}" if line.method == "received" else repr(event))
            case client.Print(text) | server.Print(text):
                texts.append(text)
            case server.Trust(peer):
                texts.append(f"node {peer.node_id[:8]} linked from {peer.address or 'this host'}")
            case server.Step(coordinator.NodeLost(node_id, why)):
                texts.append(f"node {node_id[:8]} lost: {why}")
            case server.Unlinked(node_id):
                texts.append(f"the link of node {node_id[:8]} closed")
            case Connect(leader):
                texts.append(f"connects to the leader on {leader.address.host}")
            case Serve(elected):
                texts.append(f"leads from term {elected.term}")
            case StopServing():
                texts.append("serves the coordinator no longer")
    return texts


def replay_links(header: LinkHeader, lines: Sequence[Call | Quiet]) -> LinkReplay:
    replay = LinkReplay(lines)
    replay.story = [(at - header.at, text) for at, text in replay.story]
    return replay
