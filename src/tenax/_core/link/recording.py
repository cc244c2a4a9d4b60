"""Recording of the machines of links and leadership: every call with its arguments, and a digest of what it returned.

The machines decide from what they are called with and from nothing else, so the same calls in the same order must
return the same: ``tenax.testing.link_replay`` makes them again. Pure: lines are passed to ``write``. Classes of
leadership are recognized by their names, so that runs without etcd do not import them. Invariants:

- Beats and their answers, and keep-alives of leases in etcd, would fill any journal. They are not recorded: what they
  have changed is recorded once, before the next call of another kind (``Quiet``).
- Peers that have not authenticated leave no line: what they send cannot fill the journal.
- Secrets are replaced by keyed digests, under a key that is not recorded, and proofs are removed.
- A value that a recorded machine has returned is recorded by its digest where it is an argument later (``Send``, the
  coordinator's events).
"""

from __future__ import annotations

import re
import zlib
from binascii import b2a_base64
from collections import deque
from typing import Any

import msgspec

from tenax._core.coordinator import CoordinatorState, Received
from tenax._core.link import client, server, wire
from tenax._core.messages import NodeProgress
from tenax._core.policy import AnyDecision
from tenax._core.text import storable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    M = TypeVar("M")

# The machines by class, and their methods that change them.
MACHINES = {
    "LinkClient": (
        "client",
        "tick connecting unserved serves backoff_s retry refuse opened received announce send cancel ended drop closed",
    ),
    "LinkServer": ("server", "opened received deliver closed tick"),
    "Leadership": (
        "leadership",
        "tick answered failed submit stepped probed followed changed troubled replaced connected refused unreachable "
        "link_lost listening cannot_listen served leave",
    ),
    "CoordinatorMachine": ("coordinator", "step"),
}
_PUBLIC = ("tenax._core.events", "tenax._core.messages", "tenax._core.run_state")
_OUTPUTS = (client.__name__, server.__name__, "tenax._core.leadership.term", "tenax._core.leadership.machine")
_MAX_PENDING = 10_000  # calls and digests that are kept in memory
_CONFIDENTIAL_NAMES = ("secret", "fit")
_CONFIDENTIAL = re.compile(rb'"(secret|fit)":"([^"]*)"')  # the same in values of etcd, which are JSON


class Call(msgspec.Struct, frozen=True, tag="call", tag_field="line", omit_defaults=True):
    """One call of a machine's method; without a method, the machine was created."""

    at: float
    machine: str
    method: str = ""
    given: list[Any] = []  # arguments by position, as ``Recorder.plain`` writes them
    named: dict[str, Any] = {}
    outputs: list[str] = []  # their types
    digest: int = 0
    decision: AnyDecision | None = None  # of the restart policy, if the coordinator called it


class Quiet(msgspec.Struct, frozen=True, tag="quiet", tag_field="line", omit_defaults=True):
    """What a machine's calls that are not recorded have changed since the last line."""

    machine: str
    state: Any


class _Pending(msgspec.Struct, frozen=True):
    """A call that is not encoded yet. Encoding waits until nothing is urgent."""

    at: float
    machine: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any


def b64encode(data: bytes) -> bytes:
    return b2a_base64(data, newline=False)


def digest_of(data: bytes) -> int:
    return zlib.crc32(data) << 32 | zlib.adler32(data)


def _is_public(value: Any) -> bool:
    """Return whether this is a message or an event, which has neither secrets nor bytes: the most frequent values."""
    return type(value).__module__ in _PUBLIC or isinstance(value, wire.Message | wire.Event)


def _is_encodable(plain: Any) -> bool:
    try:
        msgspec.json.encode(plain)
    except UnicodeEncodeError:  # a worker's output may contain any bytes
        return False
    return True


class Plain:
    """Writes values as plain ones that JSON can hold. Peers are numbered."""

    def __init__(self) -> None:
        self.peers: dict[server.Peer, int] = {}

    def conceal(self, text: bytes) -> bytes:
        """Return what is written instead of a confidential text."""
        return text

    def builtins(self, value: Any, key: str = "") -> Any:
        """Return lists, dicts and scalars; bytes as base64."""
        if isinstance(value, dict):
            return {name: self.builtins(each, str(name)) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.builtins(each, key) for each in value]
        if key == "proof" and isinstance(value, bytes):
            return ""
        if key in _CONFIDENTIAL_NAMES and isinstance(value, str | bytes):
            return self.conceal(b64encode(value) if isinstance(value, bytes) else value.encode()).decode()
        if isinstance(value, bytes):
            return b64encode(_CONFIDENTIAL.sub(self._conceal_field, value)).decode()
        if isinstance(value, float) and value.is_integer():  # a setting of 30 is read back as 30.0
            return int(value)
        return storable(value) if isinstance(value, str) else value

    def _conceal_field(self, match: re.Match[bytes]) -> bytes:
        return b'"%s":"%s"' % (match[1], self.conceal(match[2]))

    def struct(self, value: Any) -> Any:
        if _is_public(value):
            plain = msgspec.to_builtins(value)
            return plain if _is_encodable(plain) else self.builtins(plain)
        return self.builtins(msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=self._number))

    def _number(self, value: Any) -> Any:
        if isinstance(value, server.Peer):
            return self.peers.get(value, 0)
        raise NotImplementedError(f"no plain form of {type(value).__name__}")

    def digest(self, value: Any) -> int:
        """Return the digest of a value; that of an output and of a list is made of those of its parts."""
        if isinstance(value, msgspec.Struct):
            if type(value).__module__ in _OUTPUTS:
                parts = [self.digest(getattr(value, name)) for name in value.__struct_fields__]
                return digest_of(f"{type(value).__name__}{parts}".encode())
            return digest_of(msgspec.json.encode(self.struct(value)))
        if isinstance(value, list | tuple):
            return digest_of(str([self.digest(each) for each in value]).encode())
        if isinstance(value, server.Peer):
            value = self.peers.get(value, 0)
        return digest_of(msgspec.json.encode(self.builtins(value)))

    def outputs(self, outputs: Any) -> tuple[list[str], int]:
        """Return the types and the digest of what a call returned, without what concerns unknown peers."""
        if isinstance(outputs, wire.WireError):
            return ["WireError"], digest_of(str(outputs).encode())
        if outputs is None:
            return [], 0
        if not isinstance(outputs, list):  # the sends of the coordinator are listed; a delay is a number
            outputs = getattr(outputs, "sends", [outputs])
        kept = [output for output in outputs if not self._is_of_unknown_peer(output)]
        names = [type(output).__name__ for output in kept]
        return names, self.digest(kept) if kept else 0

    def _is_of_unknown_peer(self, output: Any) -> bool:
        match output:
            case server.SendFrame(peers):
                return not any(peer in self.peers for peer in peers)
            case server.Close(peer) | server.Trust(peer):
                return peer not in self.peers
        return False


class Recorder(Plain):
    """Records the machines of one node, which it creates (``create``)."""

    def __init__(
        self,
        write: Callable[[Call | Quiet], None],
        now: Callable[[], float],
        key: bytes,
        plan: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """``key``: random. ``plan``: plans the next ``flush``; with True if it is the first after a pause."""
        super().__init__()
        self._write = write
        self._now = now
        self._key = key
        self._plan = plan
        self._machines: dict[str, Any] = {}
        self._is_inside = False
        self._pending: deque[_Pending | Quiet] = deque()
        self._is_planned = False
        self._unproven: dict[server.Peer, tuple[int, list[_Pending]]] = {}  # with their numbers, in order of opening
        self._progress: dict[str, _Pending] = {}  # the last one of each node
        self._quiet: set[str] = set()  # machines with calls that are not recorded
        self._keep_alives: set[int] = set()  # numbers of their requests
        self._peer_count = 0
        self._returned: dict[int, None] = {}  # digests of values that a machine has returned
        self._digests: dict[int, int] = {}  # of values in calls that are being written, by identity
        self._was_progress = False
        self._due = 0  # timers of the leadership before its last tick

    def conceal(self, text: bytes) -> bytes:
        """Secrets are base64 here, and the result is."""
        import hmac

        return b64encode(hmac.digest(self._key, text, "sha256")[:16]) if text else text

    def create(self, make: Callable[P, M], /, *args: P.args, **kwargs: P.kwargs) -> M:
        """Create a machine and record its calls from now on."""
        machine = make(*args, **kwargs)
        name, methods = MACHINES[make.__name__]
        self._machines[name] = machine
        self._quiet.discard(name)
        self._add(_Pending(self._now(), name, "", args, kwargs, None))
        for method in methods.split():
            setattr(machine, method, self._recorded(name, method, getattr(machine, method)))
        return machine

    def _recorded(self, name: str, method: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return act(*args, **kwargs)
            is_frequent = name == "server" and method == "received" and _is_quiet_frame(args[1])
            if is_frequent and args[0] in self.peers and name in self._quiet:
                return act(*args, **kwargs)  # like the one before
            states = [] if is_frequent else self._quiet_states()
            if (name, method) == ("leadership", "tick"):
                self._due = self._machines[name].due(args[0])
            self._is_inside = True
            outputs: Any = None
            try:
                outputs = act(*args, **kwargs)
            except wire.WireError as error:
                outputs = error
                raise
            finally:
                self._is_inside = False
                self._record(_Pending(self._now(), name, method, args, kwargs, outputs), states)
            return outputs

        return call

    # --- what is recorded ---------------------------------------------------------------------------------------------

    def _record(self, call: _Pending, states: list[Quiet]) -> None:
        if call.machine == "server" and call.method in ("opened", "received", "closed"):
            peer: server.Peer = call.args[0]
            if not peer.is_trusted:
                self._hold_unproven(peer, call)
                return
            if peer not in self.peers:
                if peer.is_operator or peer not in self._unproven:
                    self._unproven.pop(peer, None)
                    return
                self.peers[peer], held = self._unproven.pop(peer)
                for each in held:
                    self._add(each)
        if self._is_quiet(call):
            self._quiet.add(call.machine)
            if call.machine == "server" and "leadership" in self._machines:  # which decides whether answers count
                self._quiet.add("leadership")
            return
        if call.machine == "coordinator":
            event = call.args[0]
            self._was_progress = isinstance(event, Received) and isinstance(event.message, NodeProgress)
            if self._was_progress and not call.outputs.sends:
                self._progress[event.node_id] = call
                return
        elif self._was_progress and call.method == "stepped" and not call.outputs:
            return
        for state in states:
            self._quiet.discard(state.machine)
            self._pending.append(state)
        progress, self._progress = self._progress, {}
        for each in (*progress.values(), call):
            self._add(each)

    def _hold_unproven(self, peer: server.Peer, call: _Pending) -> None:
        if call.method == "opened":
            self._peer_count += 1
            self._unproven[peer] = (self._peer_count, [])
        if call.method == "closed" or (call.method == "received" and peer not in self._machines["server"].peers):
            self._unproven.pop(peer, None)
        elif peer in self._unproven:
            self._unproven[peer][1].append(call)
        for output in call.outputs if isinstance(call.outputs, list) else ():
            if isinstance(output, server.Close):  # evicted
                self._unproven.pop(output.peer, None)

    def _is_quiet(self, call: _Pending) -> bool:
        outputs = call.outputs
        match call.machine, call.method:
            case "client", "tick":
                return all(
                    isinstance(each, client.Hold)
                    or (isinstance(each, client.SendFrame) and isinstance(each.frame, wire.Beat))
                    for each in outputs
                )
            case "client", "received":
                return isinstance(call.args[0], wire.BeatAnswer | wire.Ask | wire.Answer) and isinstance(outputs, list)
            case "server", "received":
                return _is_quiet_frame(call.args[1]) and isinstance(outputs, list)
            case "server", "tick":
                return all(map(self._is_of_unknown_peer, outputs))
            case "leadership", "tick":
                kept = [each.number for each in outputs if _is_keep_alive(each)]
                if not len(kept) == len(outputs) == self._due:  # otherwise another timer fired, perhaps without outputs
                    return False
                self._keep_alives.update(kept)
                return True
            case "leadership", "answered":
                is_kept = call.args[0] in self._keep_alives
                self._keep_alives.discard(call.args[0])
                return is_kept and not outputs
            case "leadership", "failed":
                self._keep_alives.discard(call.args[0])
        return False

    def _quiet_states(self) -> list[Quiet]:
        return [Quiet(name, self._machines[name].quiet_state()) for name in sorted(self._quiet)]

    # --- lines --------------------------------------------------------------------------------------------------------

    def digest(self, value: Any) -> int:
        if not isinstance(value, msgspec.Struct):
            return super().digest(value)
        found = self._digests.get(id(value))
        if found is None:
            found = super().digest(value)
            self._digests[id(value)] = found
        return found

    def _add(self, call: _Pending) -> None:
        self._pending.append(call)
        if not self._is_planned:
            self._is_planned = True
            self._plan(True)
        if len(self._pending) > _MAX_PENDING:
            self._write_next(1)

    def flush(self, limit: int = 0) -> None:
        """Write the calls that are pending, at most ``limit``: the others later, so that nothing waits for long."""
        self._is_planned = False
        self._write_next(limit or len(self._pending))
        if self._pending:
            self._is_planned = True
            self._plan(False)
            return
        known = self._machines["server"].peers if "server" in self._machines else {}
        self.peers = {peer: number for peer, number in self.peers.items() if peer in known}

    def _write_next(self, count: int) -> None:
        written = [self._pending.popleft() for _ in range(min(count, len(self._pending)))]
        for each in written:
            self._write(self._line(each) if isinstance(each, _Pending) else self._quiet_line(each))
        self._digests.clear()

    def _quiet_line(self, quiet: Quiet) -> Quiet:
        if quiet.machine != "server":
            return quiet
        tick_at, absent, peers = quiet.state
        by_number = {self.peers[peer]: each for peer, each in peers.items() if peer in self.peers}
        return Quiet("server", [tick_at, absent, by_number])

    def _line(self, call: _Pending) -> Call:
        given = [self.argument(value) for value in call.args]
        if call.machine == "server" and call.method == "opened":
            peer: server.Peer = call.args[0]
            given[0] = [given[0], peer.since, b64encode(peer.nonce).decode(), peer.address]
        elif (call.machine, call.method) == ("leadership", "listening"):
            secret, *rest = call.args[2][:16], call.args[2][16:]
            given[2] = [self.builtins(secret, "secret"), self.builtins(rest)[0]]
        elif (call.machine, call.method) in (("server", ""), ("client", "opened")):
            at = 2 if call.machine == "server" else 1
            given[at] = self.builtins(call.args[at], "secret")
        elif (call.machine, call.method) == ("client", "received") and isinstance(call.args[0], wire.Accepted):
            is_valid = not any(isinstance(each, client.Emit | client.Lost) for each in call.outputs)
            given.append(is_valid)
        names, digest = self.outputs(call.outputs)
        self._note_returned(call)
        named = {name: self.argument(value, name) for name, value in call.kwargs.items()}
        decision = call.outputs.decision if call.machine == "coordinator" and call.method else None
        return Call(call.at, call.machine, call.method, given, named, names, digest, decision)

    def argument(self, value: Any, name: str = "") -> Any:
        """Return the plain form of an argument. A replay supplies machines, states and functions itself."""
        if isinstance(value, msgspec.Struct):
            if isinstance(value, CoordinatorState):
                return {"supplied": "state"}
            digest = self.digest(value)
            if digest in self._returned:
                return {"returned": digest}
            kind = type(value)
            plain = {"struct": f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}", "value": self.struct(value)}
            if kind.__name__ == "TransactionAnswer":  # the types of these answers follow from the request
                plain["value"]["answers"] = []
                plain["answers"] = [self.argument(each) for each in getattr(value, "answers", ())]
            return plain
        if isinstance(value, server.Peer):
            return {"peer": self.peers[value]}
        if isinstance(value, Exception):
            return {"error": type(value).__name__, "value": vars(value)}
        if isinstance(value, list | tuple):
            return [self.argument(each) for each in value]
        if isinstance(value, bytes | str):
            return self.builtins(value, name)
        if value is None or isinstance(value, int | float):
            return value
        return {"supplied": MACHINES.get(type(value).__name__, ("function",))[0]}

    def _note_returned(self, call: _Pending) -> None:
        for value in values_returned(call.outputs):
            self._returned[self.digest(value)] = None
        while len(self._returned) > _MAX_PENDING:
            del self._returned[next(iter(self._returned))]


def values_returned(outputs: Any) -> list[Any]:
    """Return the values in a machine's outputs that can be arguments of a later call."""
    if not isinstance(outputs, list):
        return list(getattr(outputs, "sends", ()))
    names = {"Step": "event", "StepCoordinator": "event", "Deliver": "send"}
    return [getattr(output, names[type(output).__name__]) for output in outputs if type(output).__name__ in names]


def _is_keep_alive(output: Any) -> bool:
    return type(output).__name__ == "Request" and type(output.operation).__name__ == "KeepAlive"


def _is_quiet_frame(frame: Any) -> bool:
    return isinstance(frame, wire.Beat | wire.Ask | wire.Answer) or (
        isinstance(frame, wire.Message) and isinstance(frame.message, NodeProgress)
    )
