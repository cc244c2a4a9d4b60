"""Executes a plan: a real etcd of three members, real agents with real workers, and the faults of the plan.

At the end all faults are repaired: then all agents must work in one generation, and the run must succeed when its
workers do. Everything that is started here is ended here, by its pid.
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
from kit.jobs import Runner
from tenax._core.record import RunRecord

from .history import History, broken
from .nodes import Node
from .plan import MAX_AGENTS, MAX_NODES, MIN_NODES, Fault, Plan
from .watcher import Watcher
from .worker_hub import WorkerHub

TIMEOUT_S = 90.0  # until all agents work: longer than the sum of all timeouts, on a slow machine
_SETTLED_S = 5.0  # longer than an agent takes to leave
_GRACE_S = 1.0
_LEAVES_S = 5.0  # for the processes of a killed agent to exit
_runs = itertools.count(1)


class Play:
    """Executes one plan once, in an empty folder. ``broken``: what was found."""

    def __init__(
        self, plan: Plan, home: Path, timeout_s: float = TIMEOUT_S, conf: dict[str, object] | None = None
    ) -> None:
        """``timeout_s``: for the run to be complete after the repair; half of it for its end. ``conf``: added to the
        settings of every agent."""
        self.plan = plan
        self._conf = {"last_call_timeout": 1, **(conf or {})}
        self.history = History(plan.max_restarts)
        self.broken: list[str] = []
        self.counts: dict[str, int] = {}
        self._timeout_s = timeout_s
        self._notes: list[tuple[float, str]] = []
        self._since = time.monotonic()
        self._runner = Runner(home, f"lane-{plan.seed}-{next(_runs)}")
        self._hub = WorkerHub()
        self._nodes: list[Node] = []
        self._etcd = EtcdCluster(home, 3)
        self._run_id = f"lane-{os.getpid()}-{plan.seed}"
        self._watcher = Watcher(self._etcd.settings(), self._run_id)
        # Pending actions by time: the plan, and repairs of its faults.
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def run(self) -> list[str]:
        try:
            self._since = time.monotonic()
            for _ in range(self.plan.agents):
                self._start_agent()
            for fault in self.plan.faults:
                self._at(fault.at_s, lambda fault=fault: self._do(fault))  # type: ignore[misc]
            self._execute_plan()
            self._repair_all()
            self._check_success()
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

    def _execute_plan(self) -> None:
        while self._due:
            at_s, _, call = heapq.heappop(self._due)
            self._hub.wait_for(lambda: False, max(0.0, at_s - self._now()))  # just waits
            call()

    def _do(self, fault: Fault) -> None:
        if fault.target == "worker":
            did = self._fault_in_worker(fault)
        elif "etcd" in fault.target:
            did = self._fault_in_etcd(fault)
        else:
            did = self._fault_in_agent(fault)
        name = f"{fault.kind} {fault.target}" if did else "had no target"
        self.counts[name] = self.counts.get(name, 0) + 1
        self._note(f"FAULT {fault.kind} {fault.target}: {did or 'no target'}")

    def _fault_in_worker(self, fault: Fault) -> str:
        alive = self._hub.alive()
        if not alive:
            return ""
        worker = alive[fault.which % len(alive)]
        self.history.caused_failures += 1
        if fault.kind == "fail":
            self._hub.request_exit(worker, 1)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        return str(worker)

    def _fault_in_etcd(self, fault: Fault) -> str:
        members = self._etcd.members
        healthy = [
            index for index, member in enumerate(members) if member.process is not None and not member.is_stopped
        ]
        if not healthy:
            return ""
        if fault.target == "all of etcd":
            chosen = healthy
        elif fault.target == "etcd leader":
            chosen = [self._etcd_leader(healthy)]
        else:
            chosen = [healthy[fault.which % len(healthy)]]
        for index in chosen:
            if fault.kind == "kill":
                self._etcd.kill(index)
            else:
                self._etcd.stop(index)
            if fault.lasts_s:
                pid = 0 if fault.kind == "kill" else members[index].pid
                self._at(fault.at_s + fault.lasts_s, lambda i=index, p=pid: self._repair_member(i, p))  # type: ignore[misc]
        return ", ".join(members[index].name for index in chosen)

    def _etcd_leader(self, healthy: list[int]) -> int:
        for index in healthy:
            with contextlib.suppress(urllib.error.URLError, OSError):
                leader = self._etcd.ask(index, "/v3/maintenance/status", {}, timeout_s=0.5).get("leader", "0")
                for other in healthy:
                    status = self._etcd.ask(other, "/v3/maintenance/status", {}, timeout_s=0.5)
                    if status["header"]["member_id"] == leader:
                        return other
        return healthy[0]

    def _repair_member(self, index: int, stopped_pid: int) -> None:
        member = self._etcd.members[index]
        if member.process is None and not stopped_pid:
            self._etcd.start(index, wait=False)
            self._note(f"etcd {member.name} is restarted")
        elif member.process is not None and member.is_stopped and member.pid == stopped_pid:
            self._etcd.cont(index)
            self._note(f"etcd {member.name} continues")

    def _fault_in_agent(self, fault: Fault) -> str:
        if fault.kind == "start":
            return self._start_agent() if len(self._alive()) < MAX_AGENTS else ""
        healthy = [node for node in self._alive() if not node.is_stopped]
        leaders = [node for node in healthy if node.addr == self._watcher.leader]
        others = [node for node in healthy if node not in leaders]
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
        options = {
            "nodes": (MIN_NODES, MAX_NODES),
            "run_id": self._run_id,
            "endpoint": self._etcd.endpoints,
            "conf": self._conf,
            "max_restarts": self.plan.max_restarts,
            "grace_s": _GRACE_S,
            "ignores_sigterm": self.plan.ignores_sigterm,
        }
        node = Node(f"node{len(self._nodes)}", self._runner, self._hub.name, options, self._since)
        self._nodes.append(node)
        return node.name

    # --- the end ------------------------------------------------------------------------------------------------------

    def _repair_all(self) -> None:
        self._note("all faults are repaired")
        self._due.clear()
        for index, member in enumerate(self._etcd.members):
            if member.process is None:
                self._etcd.start(index, wait=False)
            elif member.is_stopped:
                self._etcd.cont(index)
        for node in self._nodes:
            if node.is_running:
                node.cont()
        while len(self._alive()) < MIN_NODES:
            self._note(f"{self._start_agent()} is started, because there are fewer than the minimum")

    def _check_success(self) -> None:
        for node in self._nodes:
            if not node.is_running and not node.was_killed:
                self.broken.append(f"{node.name} exited unexpectedly with code {node.process.poll()}")
        agents_alive = self._alive()
        if not self._hub.wait_for(lambda: self._is_complete(len(agents_alive)), self._timeout_s):
            alive = "; ".join(map(str, self._hub.alive())) or "none"
            self.broken.append(f"after {self._timeout_s:g} s the generation was not complete; alive: {alive}")
        self._note("all workers are requested to succeed")
        self._hub.finish()
        end_s = self._timeout_s / 2
        until = time.monotonic() + end_s
        for node in agents_alive:
            if not node.ended_within(until - time.monotonic()):
                self.broken.append(f"{node.name} still runs {end_s:g} s after its workers succeeded")
            elif node.process.returncode != 0 and not self._was_too_late(node):
                self.broken.append(f"{node.name} exited with code {node.process.returncode}")
        outcome = self._watcher.wait_for_verdict(_SETTLED_S)
        if outcome != "succeeded":
            self.broken.append(f"the recorded verdict is {outcome or 'missing'}; expected: succeeded")

    def _was_too_late(self, node: Node) -> bool:
        """Return whether it was never a member and was rejected because the run was over."""
        never_worked = all(life.agent != node.name for life in self._hub.lives)
        return never_worked and "is over: all" in node.output

    def _is_complete(self, agents: int) -> bool:
        alive = self._hub.alive()
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
            self._hub.close()
            self._runner.leaves_within_s = _LEAVES_S
            try:
                self._runner.close()
            except AssertionError as error:
                self.broken.append(f"processes outlived their agents: {error}")
        self.history.workers = self._hub.lives
        self.history.records = self._watcher.records
        self.broken += broken(self.history)
        if self._watcher.begun > 1:
            self.broken.append("etcd has lost data")
        self.counts["generations"] = max((life.generation for life in self._hub.lives), default=0)
        self.counts["leaders"] = sum(bool(addr) for _, addr in self._watcher.leaders)
        self.counts["seconds"] = round(ended_s)

    # --- output -------------------------------------------------------------------------------------------------------

    @property
    def history_text(self) -> str:
        names = {node.addr: node.name for node in self._nodes}
        rows = list(self._notes)
        for life in self._hub.lives:
            rows.append((life.began_at - self._since, f"started  {life}"))
            rows.append((life.alive_at - self._since, f"alive    {life}"))
            if life.gone_at:
                rows.append((life.gone_at - self._since, f"exited   {life}"))
        for each in self._watcher.records:
            rows.append((each.at - self._since, f"RECORD   {_describe(each.record)} by {names.get(each.by, each.by)}"))
        for at, addr in self._watcher.leaders:
            rows.append((at - self._since, f"LEADER   {names.get(addr, addr) or 'none'}"))
        lines = [f"{at:7.2f}  {text}" for at, text in sorted(rows)]
        return "\n".join([str(self.plan), "", *lines, "", *(node.console for node in self._nodes)])


def _describe(record: RunRecord | None) -> str:
    if record is None:
        return "deleted"
    members = ", ".join(f"{each.rank}={each.label}" for each in record.members)
    verdict = record.verdict.outcome.value if record.verdict is not None else "no verdict"
    return (
        f"generation {record.generation} ({members}), settled {record.settled}, restarts {record.restarts_used}, "
        f"{verdict}"
    )
