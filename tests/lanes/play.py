"""Playing a plan: a real etcd of three, real agents with real workers, and everything that the plan does to them.

Afterwards everything is made well: then the run must come to work with everybody who is there, and succeed when its
workers do. Whatever is started here is ended here, by its pid.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import signal
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path

from kit.etcd import EtcdCluster
from kit.jobs import Bench
from tenax._core.record import RunRecord

from .desk import WorkerHub
from .history import History, broken
from .nodes import Node
from .plan import LEAST_NODES, MAX_AGENTS, MAX_NODES, Fault, Plan
from .watcher import Watcher

PATIENCE_S = 90.0  # until everybody is at work: longer than every timeout on the way, on a slow machine
_SETTLED_S = 5.0  # an agent that leaves says goodbye; longer than that
_GRACE_S = 1.0
_LEAVES_S = 5.0  # what an agent that was killed has started, until it is gone
_runs = itertools.count(1)


class Play:
    """One plan, played once, in an empty folder. ``broken`` is what was found; ``story`` tells it all."""

    def __init__(
        self, plan: Plan, home: Path, patience_s: float = PATIENCE_S, conf: dict[str, object] | None = None
    ) -> None:
        """``patience_s``: for the run to come to work when everything is well; half of it for its end. ``conf`` is
        added to the settings of every agent."""
        self.plan = plan
        self._conf = {"last_call_timeout": 1, **(conf or {})}
        self.history = History(plan.max_restarts)
        self.broken: list[str] = []
        self.counts: dict[str, int] = {}
        self._patience_s = patience_s
        self._notes: list[tuple[float, str]] = []
        self._since = time.monotonic()
        self._bench = Bench(home, f"lane-{plan.seed}-{next(_runs)}")
        self._desk = WorkerHub()
        self._nodes: list[Node] = []
        self._etcd = EtcdCluster(home, 3)
        self._run_id = f"lane-{os.getpid()}-{plan.seed}"
        self._watcher = Watcher(self._etcd.settings(), self._run_id)
        # What is to be done, in order of time: first the plan, then also what undoes it.
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def run(self) -> list[str]:
        try:
            self._since = time.monotonic()
            for _ in range(self.plan.agents):
                self._start_agent()
            for fault in self.plan.faults:
                self._at(fault.at_s, lambda fault=fault: self._do(fault))  # type: ignore[misc]
            self._follow_the_plan()
            self._make_well()
            self._must_work_and_succeed()
        finally:
            self._close()
        return self.broken

    # --- the plan -----------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() - self._since

    def _note(self, text: str) -> None:
        self._notes.append((self._now(), text))

    def _at(self, at_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at_s, next(self._numbers), call))

    def _follow_the_plan(self) -> None:
        while self._due:
            at_s, _, call = heapq.heappop(self._due)
            self._desk.wait_for(lambda: False, max(0.0, at_s - self._now()))  # a plan is a matter of time
            call()

    def _do(self, fault: Fault) -> None:
        if fault.target == "worker":
            did = self._hurt_worker(fault)
        elif "etcd" in fault.target:
            did = self._hurt_etcd(fault)
        else:
            did = self._hurt_agent(fault)
        name = f"{fault.kind} {fault.target}" if did else "had no target"
        self.counts[name] = self.counts.get(name, 0) + 1
        self._note(f"FAULT {fault.kind} {fault.target}: {did or 'there is none'}")

    def _hurt_worker(self, fault: Fault) -> str:
        alive = self._desk.alive()
        if not alive:
            return ""
        worker = alive[fault.which % len(alive)]
        self.history.hurts += 1
        if fault.kind == "fail":
            self._desk.tell_exit(worker, 1)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        return str(worker)

    def _hurt_etcd(self, fault: Fault) -> str:
        members = self._etcd.members
        well = [index for index, member in enumerate(members) if member.process is not None and not member.is_stopped]
        if not well:
            return ""
        if fault.target == "all of etcd":
            chosen = well
        elif fault.target == "etcd leader":
            chosen = [self._etcd_leader(well)]
        else:
            chosen = [well[fault.which % len(well)]]
        for index in chosen:
            if fault.kind == "kill":
                self._etcd.kill(index)
            else:
                self._etcd.stop(index)
            if fault.lasts_s:
                pid = 0 if fault.kind == "kill" else members[index].pid
                self._at(fault.at_s + fault.lasts_s, lambda i=index, p=pid: self._heal_member(i, p))  # type: ignore[misc]
        return ", ".join(members[index].name for index in chosen)

    def _etcd_leader(self, well: list[int]) -> int:
        for index in well:
            with contextlib.suppress(urllib.error.URLError, OSError):
                leader = self._etcd.ask(index, "/v3/maintenance/status", {}, timeout_s=0.5).get("leader", "0")
                for other in well:
                    status = self._etcd.ask(other, "/v3/maintenance/status", {}, timeout_s=0.5)
                    if status["header"]["member_id"] == leader:
                        return other
        return well[0]

    def _heal_member(self, index: int, stopped_pid: int) -> None:
        member = self._etcd.members[index]
        if member.process is None and not stopped_pid:
            self._etcd.start(index, wait=False)
            self._note(f"etcd {member.name} is started again")
        elif member.process is not None and member.is_stopped and member.pid == stopped_pid:
            self._etcd.cont(index)
            self._note(f"etcd {member.name} continues")

    def _hurt_agent(self, fault: Fault) -> str:
        if fault.kind == "start":
            return self._start_agent() if len(self._alive()) < MAX_AGENTS else ""
        well = [node for node in self._alive() if not node.is_stopped]
        leaders = [node for node in well if node.addr == self._watcher.leader]
        others = [node for node in well if node not in leaders]
        chosen = leaders if fault.target == "leader" else others
        if not chosen:
            return ""
        node = chosen[fault.which % len(chosen)]
        if fault.kind == "kill":
            node.kill()
        else:
            node.stop()
            self._at(fault.at_s + fault.lasts_s, lambda: self._continue(node))
        return node.name

    def _continue(self, node: Node) -> None:
        if node.is_stopped:
            node.cont()
            self._note(f"{node.name} continues")

    def _alive(self) -> list[Node]:
        return [node for node in self._nodes if node.is_running]

    def _start_agent(self) -> str:
        told = {
            "nodes": (LEAST_NODES, MAX_NODES),
            "run_id": self._run_id,
            "endpoint": self._etcd.endpoints,
            "conf": self._conf,
            "max_restarts": self.plan.max_restarts,
            "grace_s": _GRACE_S,
            "deaf": self.plan.is_deaf,
        }
        node = Node(f"node{len(self._nodes)}", self._bench, self._desk.name, told, self._since)
        self._nodes.append(node)
        return node.name

    # --- the end ------------------------------------------------------------------------------------------------------

    def _make_well(self) -> None:
        self._note("everything is made well")
        self._due.clear()
        for index, member in enumerate(self._etcd.members):
            if member.process is None:
                self._etcd.start(index, wait=False)
            elif member.is_stopped:
                self._etcd.cont(index)
        for node in self._nodes:
            if node.is_running:
                node.cont()
        while len(self._alive()) < LEAST_NODES:
            self._note(f"{self._start_agent()} is started, so that there are enough")

    def _must_work_and_succeed(self) -> None:
        for node in self._nodes:
            if not node.is_running and not node.was_killed:
                self.broken.append(f"{node.name} ended by itself, with exit code {node.process.poll()}")
        crew = self._alive()
        if not self._desk.wait_for(lambda: self._is_whole(len(crew)), self._patience_s):
            alive = "; ".join(map(str, self._desk.alive())) or "nobody"
            self.broken.append(f"after {self._patience_s:g} s not everybody was at work; at work was {alive}")
        self._note("all workers are told to succeed")
        self._desk.finish()
        end_s = self._patience_s / 2
        until = time.monotonic() + end_s
        for node in crew:
            if not node.ended_within(until - time.monotonic()):
                self.broken.append(f"{node.name} is still running {end_s:g} s after its workers succeeded")
            elif node.process.returncode != 0 and not self._came_too_late(node):
                self.broken.append(f"{node.name} ended with exit code {node.process.returncode}")
        outcome = self._watcher.wait_for_verdict(_SETTLED_S)
        if outcome != "succeeded":
            self.broken.append(f"the verdict on record is {outcome or 'none'}; expected success")

    def _came_too_late(self, node: Node) -> bool:
        """There was no place for it, and the run was over before it was here: then it is refused, with that reason."""
        never_worked = all(life.agent != node.name for life in self._desk.lives)
        return never_worked and "is over: all" in node.said

    def _is_whole(self, agents: int) -> bool:
        alive = self._desk.alive()
        latest = max((worker.generation for worker in alive), default=0)
        count = min(MAX_NODES, agents)
        group = [worker for worker in alive if worker.generation == latest]
        return len(group) == count and {worker.world_size for worker in group} == {count}

    def _close(self) -> None:
        ended_s = self._now()
        for node in self._nodes:
            node.close()
        try:
            self._watcher.close()
        finally:
            self._etcd.close()
            self._desk.close()
            self._bench.leaves_within_s = _LEAVES_S
            try:
                self._bench.close()
            except AssertionError as error:
                self.broken.append(f"processes outlived their agents: {error}")
        self.history.workers = self._desk.lives
        self.history.records = self._watcher.records
        self.broken += broken(self.history)
        if self._watcher.begun > 1:
            self.broken.append("etcd has forgotten what it knew")
        self.counts["generations"] = max((life.generation for life in self._desk.lives), default=0)
        self.counts["leaders"] = sum(bool(addr) for _, addr in self._watcher.led)
        self.counts["seconds"] = round(ended_s)

    # --- for people ---------------------------------------------------------------------------------------------------

    @property
    def story(self) -> str:
        names = {node.addr: node.name for node in self._nodes}
        told = list(self._notes)
        for life in self._desk.lives:
            told.append((life.began_at - self._since, f"began    {life}"))
            told.append((life.alive_at - self._since, f"lived    {life}"))
            if life.gone_at:
                told.append((life.gone_at - self._since, f"is gone  {life}"))
        for each in self._watcher.records:
            told.append((each.at - self._since, f"RECORD   {_in_words(each.record)} by {names.get(each.by, each.by)}"))
        for at, addr in self._watcher.led:
            told.append((at - self._since, f"LEADER   {names.get(addr, addr) or 'nobody'}"))
        lines = [f"{at:7.2f}  {text}" for at, text in sorted(told)]
        return "\n".join([str(self.plan), "", *lines, "", *(node.console for node in self._nodes)])


def _in_words(record: RunRecord | None) -> str:
    if record is None:
        return "is gone"
    members = ", ".join(f"{each.rank}={each.label}" for each in record.members)
    verdict = record.verdict.outcome.value if record.verdict is not None else "no verdict"
    return (
        f"generation {record.generation} ({members}), settled {record.settled}, restarts {record.restarts_used}, "
        f"{verdict}"
    )
