"""The safety properties: what must hold at every moment of every simulation.

The checks do not rely on the machines' state. They take which workers run from the fake workers, and what was decided
from what was sent; the state of a machine is read only for its size. The properties, with the numbers of the
reliability plan:

S1   A generation has one list of members; workers start only with an assignment; workers of two generations never act
     at the same time, on any host: a held worker does not act. Generations are distinguished by when they were formed,
     not by number.
S2   When a worker starts, no process of an earlier generation is alive on its node, except workers that acknowledged
     its end and continue.
S3   The ranks of a generation are a permutation; all members get the same world size, master and restart count.
S4   No two generations have the same store.
S5   Restarts never exceed the budget and never decrease. A restart is charged if a worker failed by itself and no node
     joined or left, and only if a worker failed by itself.
S6   After the verdict no worker starts, and there is one verdict.
S8   The reported first cause is the earliest real failure, never a consequence of another worker's exit. The order of
     two failures is known only up to the delay of a message.
S10  The number of a generation is greater than every earlier one.
S11  A worker of a generation starts at most once, and acts in one generation at most at any time.
S12  All state is bounded in size.
S13  No side of a link receives a frame that it must reject.

S7 (no lost evidence) and S9 (nothing from unauthenticated peers) concern real I/O and are tested there: log and error
files (``tests/logs``, ``tests/failures``), and the parsers of servers (``tests/store``, ``tests/network``).

S5, S6 and S10 depend on persistent state, which in this engine is the marker at the endpoint and the live agents. If
the endpoint's host loses power, and the marker with it, a new coordinator knows only what nodes report before it
decides. The checks then require no more than that, and count it (``memory lost``). An engine whose marker survives a
power loss, or is in etcd, needs no such exception. S1 has one: workers that are in their grace period after the lost
verdict may be alive when a new run begins at the endpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenax._core import events
from tenax._core.coordinator import Ending, RestartRequested
from tenax._core.model import Outcome
from tenax.testing.simulator.setup import ENDPOINT

if TYPE_CHECKING:
    from tenax._core.coordinator import AnyCoordinatorEvent, Send, Step
    from tenax._core.leadership.keys import Written
    from tenax._core.model import Assignment, Failure, Verdict
    from tenax.testing.simulator.agent import AgentProcess
    from tenax.testing.simulator.cluster import Cluster
    from tenax.testing.simulator.server import Server
    from tenax.testing.simulator.workers import Worker

MESSAGE_DELAY_S = 0.02  # how precisely failures on two hosts can be ordered
_MAX_EARLIER = 100
_MAX_STOPPED = 10_000


class PropertyBroken(AssertionError):
    """A property does not hold. Carries its number in the reliability plan and what was observed."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name = name


class Formation:
    """One generation, as the coordinator formed it."""

    def __init__(
        self, ordinal: int, number: int, parts: dict[str, Assignment], formed_at: float, succeeds_at: float
    ) -> None:
        self.ordinal = ordinal  # the true order in which generations were formed
        self.formed_at = formed_at
        self.number = number
        self.parts = parts
        self.succeeds_at = succeeds_at
        self.workers: list[Worker] = []
        self.starts: set[int] = set()  # global ranks
        self.started_on: set[str] = set()  # nodes
        self.alive = 0
        self.failed: list[tuple[float, int]] = []  # by themselves: when, global rank
        first = next(iter(parts.values()))
        self.world_size = first.world_size
        self.master = (first.master_addr, first.master_port)
        self.restarts_used = first.restarts_used

    def __str__(self) -> str:
        return f"generation {self.number}"


class Checks:
    """Receives everything that happens; raises ``PropertyBroken``."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.formations: list[Formation] = []
        self.verdict: Verdict | None = None
        self._verdict_at = 0.0
        self._outcomes_sent: set[tuple[str, Outcome]] = set()  # to which node; it may read it after a new run began
        self.has_lost_memory = False  # the endpoint's host has lost power, and with it the marker ...
        self._floor = 0  # ... with the numbers up to this one
        self._restarts_floor = 0
        self.may_begin_anew = False  # the last node has left a run that was gathering
        self._disturbed_at = 0.0
        self._servers: dict[str, Server] = {}  # the last one of each node
        self._recorded = 0  # with etcd: the generation in the record
        self._alive: dict[int, Formation] = {}  # generations with live workers, by ordinal
        self._stores: dict[tuple[str, int], Formation] = {}

    # --- the coordinator ----------------------------------------------------------------------------------------------

    def opened(self, server: Server) -> None:
        """Check that the coordinator is at the endpoint, where only one process can listen."""
        server.floor = self._floor
        if server.agent.host.index != ENDPOINT and not self.cluster.setup.has_etcd:
            raise PropertyBroken("S1", f"a coordinator opens on {server.agent.host.name}, not at the endpoint")

    def stepped(self, server: Server, event: AnyCoordinatorEvent, step: Step, now: float) -> None:
        if isinstance(event, RestartRequested):
            self.on_disturbance()  # not when it was sent: a suspended coordinator handles it later
        self._servers[server.agent.info.node_id] = server
        for send in step.sends:
            if isinstance(send.event, events.GenerationFormed):
                part = send.event.assignment
                if all(each.generation != part.generation for each in server.formed.values()):
                    server.formed, server.formed_at = {}, self.cluster.schedule.now
                    server.known_when_formed = server.known_generation
                server.formed.update(dict.fromkeys(send.to, part))
        if not self.cluster.setup.has_etcd:
            self.sent(server, step.sends)
            if server.state.verdict is not None:  # perhaps no node was connected, and none was sent it
                self._check_verdict(server, server.state.verdict)
        self._check_ledger(server)
        self._check_bounds(server)
        if self.cluster.parts.are_checked_inside:
            server.checker.check(server.state, event, step, now)

    def sent(self, server: Server, sends: list[Send]) -> None:
        """Check what nodes are sent: at once, or when the decision behind it is stored."""
        parts: dict[str, Assignment] = {}
        last = self.formations[-1].parts if self.formations else {}
        for send in sends:
            match send.event:
                case events.GenerationFormed(assignment):
                    for node_id in send.to:
                        if last.get(node_id) == assignment:
                            continue  # sent again: it may not have received it
                        if node_id in parts:
                            raise PropertyBroken("S1", f"{node_id} is sent generation {assignment.generation} twice")
                        parts[node_id] = assignment
                case events.RunEnded(verdict, _):
                    self._outcomes_sent.update((node_id, verdict.outcome) for node_id in send.to)
        if parts and not self.cluster.setup.has_etcd:
            self._check_formed(server, parts)

    def recorded(self, written: Written, *, is_first: bool) -> None:
        """Check a decision when etcd has it. ``is_first``: there was no record."""
        record, server = written.record, self._servers.get(written.by.node_id)
        if is_first:
            self._on_run_begun_anew()
        elif server is not None and record.generation > self._recorded:
            formed = {node_id: part for node_id, part in server.formed.items() if part.generation == record.generation}
            if formed:  # else the coordinator has adopted the number that a node of an earlier run reported
                self._check_formed(server, formed)
        if record.verdict is not None and server is not None:
            self._check_verdict(server, record.verdict)
            outcome = record.verdict.outcome
            self._outcomes_sent.update((node_id, outcome) for node_id in self._nodes_of_run())
        self._recorded = record.generation

    def _nodes_of_run(self) -> set[str]:
        """Return the nodes that may read the verdict in etcd."""
        former = {node_id for each in self.formations[: self._floor] for node_id in each.parts}
        members = {node_id for each in self.formations[self._floor :] for node_id in each.parts}
        return members | (self.cluster.slots.keys() - former)

    def _check_formed(self, server: Server, parts: dict[str, Assignment]) -> None:
        number = next(iter(parts.values())).generation
        formed_at = server.formed_at  # with etcd, nodes are sent it when it is stored, which may be much later
        formation = Formation(len(self.formations), number, parts, formed_at, self.cluster.draw_success())
        self._check_number(server, formation)
        self._check_ranks(formation)
        self._check_budget(server, formation)
        if formation.master in self._stores:
            raise PropertyBroken("S4", f"{formation} has the store of {self._stores[formation.master]}")
        if self.verdict is not None:
            self._fail_unless_memory_lost("S6", f"{formation} is formed after the verdict: {self.verdict.why}")
            self.verdict = None
        self._stores[formation.master] = formation
        self.formations.append(formation)

    def _check_number(self, server: Server, formation: Formation) -> None:
        highest = max((each.number for each in self.formations[self._floor :]), default=0)
        if formation.number <= server.known_when_formed:
            raise PropertyBroken(
                "S10", f"{formation} is formed, but generation {server.known_when_formed} was already known"
            )
        server.known_generation = max(server.known_generation, formation.number)
        if formation.number > highest:
            return
        what = f"{formation} is formed after generation {highest}"
        self._fail_unless_memory_lost("S10", what)
        self._floor = len(self.formations)
        self._restarts_floor = 0

    def _fail_unless_memory_lost(self, name: str, what: str) -> None:
        if not self.has_lost_memory:
            raise PropertyBroken(name, what)
        self.cluster.counts["memory lost"] += 1

    def on_disturbance(self) -> None:
        """Record an event that may make a generation uncharged."""
        self._disturbed_at = self.cluster.schedule.now

    def _on_run_begun_anew(self) -> None:
        """etcd has no record of the run: it has never begun, or has ended, and workers of it must be gone."""
        if self._alive:
            raise PropertyBroken("S1", f"a run begins anew while {self.alive[0]} is alive")
        if len(self.formations) > self._floor and self.verdict is None and not self.may_begin_anew:
            raise PropertyBroken("S10", "the record of a run is gone that has not ended")
        self.verdict = None
        self.may_begin_anew = False
        self._floor = len(self.formations)
        self._restarts_floor = 0

    @property
    def _may_meet_earlier_nodes(self) -> bool:
        """Whether a node may report a generation of a run that the coordinator does not know."""
        return self.has_lost_memory or self._floor > 0

    def _check_ranks(self, formation: Formation) -> None:
        by_rank: dict[int, str] = {}
        for node_id, part in formation.parts.items():
            seen = (part.generation, part.world_size, (part.master_addr, part.master_port), part.restarts_used)
            if seen != (formation.number, formation.world_size, formation.master, formation.restarts_used):
                raise PropertyBroken("S3", f"{node_id} has another assignment than its peers: {part}")
            if part.group_world_size != len(formation.parts):
                raise PropertyBroken(
                    "S3", f"{node_id} got group world size {part.group_world_size}, expected {len(formation.parts)}"
                )
            by_rank[part.group_rank] = node_id
        if sorted(by_rank) != list(range(len(formation.parts))):
            raise PropertyBroken("S3", f"the group ranks of {formation} are {sorted(by_rank)}")
        first = 0
        for group_rank in range(len(formation.parts)):
            node_id = by_rank[group_rank]
            if formation.parts[node_id].first_global_rank != first:
                raise PropertyBroken(
                    "S3", f"{node_id} has first rank {formation.parts[node_id].first_global_rank}, expected {first}"
                )
            first += self.cluster.slots[node_id]
        if first != formation.world_size:
            raise PropertyBroken("S3", f"{formation} has {first} workers, but world size {formation.world_size}")

    def _check_budget(self, server: Server, formation: Formation) -> None:
        used, limit = formation.restarts_used, self.cluster.setup.max_restarts
        if used > limit:
            raise PropertyBroken("S5", f"{formation} is restart {used} of at most {limit}")
        before = self.formations[-1] if len(self.formations) > self._floor else None
        known = before.restarts_used if before else self._restarts_floor
        known = max(known, server.known_restarts) if self._may_meet_earlier_nodes else known
        if used < known:
            self._fail_unless_memory_lost("S5", f"{formation} counts {used} restarts after {known}")
        elif used == known and before is not None:
            is_same = before.parts.keys() == formation.parts.keys() and formation.number == before.number + 1
            was_whole = before.parts.keys() == before.started_on  # else a member was not sent its assignment
            if before.failed and is_same and was_whole and self._disturbed_at < before.formed_at:
                raise PropertyBroken("S5", f"{formation} is uncharged, but {before} failed by itself")
        elif used > known and before is not None:
            if used > known + 1:
                raise PropertyBroken("S5", f"{formation} is charged {used - known} restarts")
            if not before.failed and not self._has_forgotten_failure(formation.number - 1):
                raise PropertyBroken(
                    "S5", f"{formation} is charged a restart, but no worker failed by itself in {before}"
                )

    def _has_forgotten_failure(self, number: int) -> bool:
        """Whether a worker failed in the generation of that number, which a coordinator may learn of late."""
        return self.has_lost_memory and any(each.failed for each in self.formations if each.number == number)

    def _check_ledger(self, server: Server) -> None:
        """Check the cause that a report will name for the end of an earlier generation."""
        earlier = server.state.earlier
        if len(earlier) > server.causes_seen:
            self._check_cause(server, earlier[-1])
        server.causes_seen = len(earlier)

    def _check_verdict(self, server: Server, verdict: Verdict) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self._verdict_at = self.cluster.schedule.now
            if verdict.restarts_used > self.cluster.setup.max_restarts:
                raise PropertyBroken("S5", f"the verdict counts {verdict.restarts_used} restarts")
            self._check_causes(server, verdict)
        elif (verdict.outcome, verdict.why) != (self.verdict.outcome, self.verdict.why):
            both = f"first '{self.verdict.why}', then '{verdict.why}'"
            self._fail_unless_memory_lost("S6", f"two verdicts: {both}")
            self.verdict = verdict

    def _check_causes(self, server: Server, verdict: Verdict) -> None:
        if verdict.outcome is Outcome.FAILED:
            self._check_cause(server, verdict.failures[0])
        if verdict.outcome is Outcome.SUCCEEDED:
            last = self.formations[-1] if self.formations else None
            if last is None or last.alive or last.failed:
                raise PropertyBroken("S6", f"success was sent, but {last} did not succeed")

    def _check_cause(self, server: Server, failure: Failure) -> None:
        if self.cluster.setup.has_etcd and server.floor != self._floor:
            return  # it was suspended, and its run is over
        matching = [each for each in self.formations[self._floor :] if each.number == failure.generation]
        if not matching:
            return  # formed before the memory was lost
        formation = matching[-1]
        failed = formation.failed
        named = next((each.failed_at for each in formation.workers if each.global_rank == failure.global_rank), None)
        named = {rank: at for at, rank in failed}.get(failure.global_rank, named)
        first_at, first_rank = min(failed, default=(0.0, -1))
        if named is None or named > first_at + MESSAGE_DELAY_S + server.clock_error_s(failure.generation):
            raise PropertyBroken(
                "S8",
                f"rank {failure.global_rank} is named as the first cause of the end of {formation}, "
                + (
                    f"which was rank {first_rank} at {first_at:.4f}"
                    if failed
                    else "in which no worker failed by itself"
                ),
            )

    # --- workers ------------------------------------------------------------------------------------------------------

    def granted(self, agent: AgentProcess, assignment: Assignment) -> Formation:
        """Return the formation that an agent starts workers for."""
        for formation in reversed(self.formations):
            if formation.number == assignment.generation:
                if formation.parts.get(agent.info.node_id) == assignment:
                    formation.started_on.add(agent.info.node_id)
                    return formation
                break
        raise PropertyBroken(
            "S1", f"{agent.label} starts workers of generation {assignment.generation} without an assignment"
        )

    def kept(
        self, agent: AgentProcess, assignment: Assignment, alive: list[Worker], survivors: tuple[int, ...]
    ) -> None:
        """Check which processes of the last generation a node keeps when it starts the next one."""
        for worker in alive:
            if worker.generation == assignment.generation:
                continue  # a second start, see ``began``
            if worker.local_rank not in survivors:
                raise PropertyBroken("S2", f"{agent.label} starts {assignment.generation} while {worker} is alive")
            if worker.acts:
                raise PropertyBroken("S11", f"{worker} is to continue, but has not acknowledged the end")

    def served(self, agent: AgentProcess, assignment: Assignment, ports: list[int]) -> None:
        """Check that rank 0 serves the store whose address the others got."""
        if assignment.group_rank == 0 and assignment.master_port not in ports:
            store = f"{assignment.master_addr}:{assignment.master_port}"
            raise PropertyBroken("S3", f"the store is at {store}, but {agent.label} serves only {ports}")

    def began(self, worker: Worker) -> None:
        formation = worker.formation
        if worker.global_rank in formation.starts:
            raise PropertyBroken("S11", f"{worker} starts twice")
        if not 0 <= worker.global_rank < formation.world_size:
            raise PropertyBroken("S3", f"{worker} starts in a world of {formation.world_size}")
        for other in self._alive.values():
            if other is not formation:
                for alive in other.workers:
                    if alive.acts and not self._has_grace(alive):
                        raise PropertyBroken("S1", f"{worker} starts while {alive} is alive")
        left = worker.keeper.leftovers
        if left is not None and left is not formation:
            raise PropertyBroken("S2", f"{worker} starts while processes of {left} are alive")
        if self.verdict is not None:
            # The assignment may have been sent before the verdict, which is then still in transit to this agent.
            late_s = self.cluster.schedule.now - self._verdict_at
            if formation.ordinal != len(self.formations) - 1 or late_s > self.cluster.setup.terms.lease_s:
                raise PropertyBroken("S6", f"{worker} starts after the verdict")
        formation.starts.add(worker.global_rank)
        formation.workers.append(worker)
        formation.alive += 1
        self._alive[formation.ordinal] = formation

    def _has_grace(self, worker: Worker) -> bool:
        """Return whether this worker is being stopped after a verdict that the endpoint's host has lost."""
        decided = worker.keeper.agent.state.decided
        return self.has_lost_memory and decided is not None and not decided.is_refused

    def ended(self, worker: Worker) -> None:
        """A worker does not act any more: it exited, or acknowledged the end of its generation."""
        formation = worker.formation
        formation.alive -= 1
        if not formation.alive:
            del self._alive[formation.ordinal]

    def failed(self, worker: Worker) -> None:
        """A worker fails by itself, now."""
        worker.failed_by_itself, worker.failed_at = True, self.cluster.schedule.now
        worker.formation.failed.append((worker.failed_at, worker.global_rank))

    @property
    def alive(self) -> list[Worker]:
        return [worker for formation in self._alive.values() for worker in formation.workers if worker.acts]

    # --- agents -------------------------------------------------------------------------------------------------------

    def left(self, agent: AgentProcess, verdict: Verdict) -> None:
        was_sent = (agent.info.node_id, verdict.outcome) in self._outcomes_sent
        if agent.is_elected:  # etcd keeps the verdict, also for a node that found the run just before its end
            was_sent |= any(outcome is verdict.outcome for _, outcome in self._outcomes_sent)
        if verdict.outcome is Outcome.SUCCEEDED and not was_sent:
            raise PropertyBroken("S6", f"{agent.label} leaves with success, which was not sent")
        if verdict.outcome not in (Outcome.ABANDONED, Outcome.BROKEN):
            alive = [worker for worker in agent.keeper.workers.values() if worker.is_alive]
            if alive or agent.keeper.leftovers is not None:
                raise PropertyBroken(
                    "S2", f"{agent.label} leaves while {alive[0] if alive else 'a leftover process'} is alive"
                )

    def on_protocol_error(self, label: str, error: Exception) -> None:
        raise PropertyBroken("S13", f"{label} received a frame that breaks the protocol: {error}")

    def bounded(self, agent: AgentProcess) -> None:
        terms = self.cluster.setup.terms
        unanswered = len(agent.client.lease._sent)
        if unanswered > 4 * terms.lease_s / terms.beat_s + 4:
            raise PropertyBroken("S12", f"{agent.label} remembers {unanswered} unanswered beats")

    def _check_bounds(self, server: Server) -> None:
        state, last, max_nodes = server.state, server.state.last, self.cluster.setup.max_nodes
        nodes = len(state.nodes)
        # Members of two generations with the same number cannot be distinguished.
        members = self.cluster.max_nodes_seen if self._may_meet_earlier_nodes else max_nodes
        sizes = {
            "nodes": (nodes, self.cluster.max_nodes_seen),
            "ready": (len(state.ready), nodes),
            "members": (len(last.members), members),
            "done": (len(last.done), max_nodes),
            "gone": (len(last.gone), members),
            "unstopped": (len(state.phase.unstopped) if isinstance(state.phase, Ending) else 0, nodes),
            "lost": (len(last.lost), 2 * members),
            "drained": (len(last.drained), max_nodes),
            "failures": (len(last.failures), self.cluster.max_workers),
            "stopped": (len(last.stopped), _MAX_STOPPED),
            "earlier": (len(state.earlier), _MAX_EARLIER),
            "superseded": (len(state.names.superseded), _MAX_EARLIER),
            "ranks_by_name": (len(state.names.ranks_by_name), max_nodes),
            "deadlines": (len(state.deadlines), 5),
        }
        for name, (size, limit) in sizes.items():
            if size > limit:
                raise PropertyBroken("S12", f"the coordinator remembers {size} {name}, at most {limit} expected")
