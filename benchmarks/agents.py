"""Agents: start of a job of several agents, and recovery from the loss of a worker, an agent, the endpoint's agent or a
host, or after one more agent joins.

Three agents with two instant workers each, `--nnodes=2:4`, `last_call_timeout=1`, all on loopback; both launchers get
the same flags. With another number of agents that number is fixed (`--nnodes=8`), so that there is no last call.
A time ends with the first instruction of the last worker of the next whole group:

- a start: all agents are started at once; counted from before the first command;
- a worker is killed: the harness SIGKILLs a worker of an agent that does not serve the endpoint;
- an agent is killed: SIGKILL only of an agent that does not serve the endpoint;
- the endpoint's agent is killed: the same for the agent that serves it;
- one more agent: counted from the start of its process, and, for tenax, from its join, the time of its first message in
  the coordinator's journal (both clocks are the kernel's);
- a host is cut off: three hosts made of network namespaces, default settings except the last call, and a host that does
  not serve the endpoint and gets no signal; counted from just before the cut.

Workers only wait, as in a long step: none fails because of a lost peer. What torchrun does not do within a timeout did
not happen; it is tried less often, since it mostly runs into the timeout.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import hosts, procfs
from benchmarks.events import Event
from benchmarks.harness import Launcher, LaunchFailed, Settings
from benchmarks.hosts import Hosts
from benchmarks.job import Job, Missing
from benchmarks.report import OURS, Row, compared, limited, seconds
from benchmarks.samples import Samples

AGENTS = 3
NNODES = "2:4"
BOUND_S = 20.0
DEATHS = 5  # of workers, in one launch
STARTS = (2, 4)  # agents that start at once
FIXED = (2, 8)  # agents of which one loses a worker, besides AGENTS

JOINED = "one more agent joins 3: its join → new generation on all nodes"
STARTED = "one more agent joins 3: its process started → new generation on all nodes"
AGENT = "agent SIGKILL, one of 3 → survivors' new workers run"
ENDPOINT = "SIGKILL of the agent that serves the endpoint, one of 3 → survivors' new workers run"
CUT = "host cut off silently, one of 3 → survivors' new workers run"


def start(agents: int) -> str:
    """Return the name of the measure of a start."""
    return f"{agents} agents started at once: command → every worker's first instruction"


def worker(agents: int) -> str:
    """Return the name of the measure of a worker's death: until all workers run again."""
    return f"worker SIGKILL on one of {agents} agents → next generation on all nodes"


def worker_signalled(agents: int) -> str:
    """Return the name of the measure until the other workers get SIGTERM."""
    return f"worker SIGKILL on one of {agents} agents → the last worker of the others has its SIGTERM"


WORKER_SIGNALLED = worker_signalled(AGENTS)
WORKER = worker(AGENTS)


@dataclass(frozen=True)
class Scenario:
    """One disturbance of a job, how often it is tried, and whether a smoke run includes torchrun."""

    take: Callable[[Launcher, Samples], None]
    ours: int
    theirs: int
    quick: bool = False

    def is_due(self, who: str, repetition: int, quick: bool) -> bool:
        """Return whether this launcher takes part in this repetition."""
        if who == OURS:
            return repetition < self.ours
        return repetition < self.theirs and (self.quick or not quick)


def measure(settings: Settings, samples: Samples) -> None:
    """Take all samples. A smoke run includes torchrun only where it does not run into a timeout."""
    deaths, starts, fixed = (1, STARTS[:1], FIXED[:1]) if settings.quick else (DEATHS, STARTS, FIXED)
    scenarios = [
        *(Scenario(partial(_start, agents=size), ours=5, theirs=2, quick=True) for size in starts),
        *(Scenario(partial(_worker_dies, deaths=min(3, deaths), agents=size), ours=2, theirs=1) for size in fixed),
        Scenario(partial(_worker_dies, deaths=deaths), ours=2, theirs=1, quick=True),
        Scenario(_agent_joins, ours=6, theirs=2),
        Scenario(_agent_dies, ours=6, theirs=2),
        Scenario(_endpoint_dies, ours=6, theirs=2, quick=True),
    ]
    if not hosts.why_not():
        scenarios.append(Scenario(_host_cut_off, ours=3, theirs=1))
    for repetition in range(settings.repetitions(max(scenario.ours for scenario in scenarios))):
        for scenario in scenarios:
            for launcher in settings.launchers:
                if scenario.is_due(launcher.name, repetition, settings.quick):
                    settings.settle(samples)
                    scenario.take(launcher, samples)


def _start(launcher: Launcher, samples: Samples, agents: int = STARTS[0]) -> None:
    with Job(launcher, str(agents)) as job:
        try:
            group = job.form_at_once(agents)
        except LaunchFailed as failure:
            samples.miss(launcher.name, start(agents), str(failure))
            return
        samples.add(launcher.name, start(agents), (group[-1].at_ns - job.agents[0].started_ns) / 1e9)


def _formed(job: Job, samples: Samples, what: str, agents: int = AGENTS) -> bool:
    try:
        job.form(agents)
    except LaunchFailed as failure:
        samples.fail(job.name, f"{what}: {failure}")
        return False
    time.sleep(0.5)  # so that work left over from the start is not measured
    return True


def _after(job: Job, samples: Samples, what: str, since_ns: int, agents: int) -> list[Event]:
    """Take the sample: from then until the whole next group runs. Return the group, or an empty one after a timeout."""
    try:
        group = job.group_after(since_ns, agents, BOUND_S)
    except Missing as missing:
        samples.miss(job.name, what, str(missing))
        return []
    samples.add(job.name, what, (group[-1].at_ns - since_ns) / 1e9)
    return group


def _worker_dies(launcher: Launcher, samples: Samples, deaths: int = 2, agents: int = AGENTS) -> None:
    with Job(launcher, NNODES if agents == AGENTS else str(agents)) as job:
        if not _formed(job, samples, f"a worker of {agents} agents is killed", agents):
            return
        for _ in range(deaths):
            time.sleep(random.random() * 0.2)  # spread over torchrun's monitor intervals
            victim = [event for event in job.events.named("start") if event.node == agents - 1][-1]
            killed_ns = time.monotonic_ns()
            procfs.end([victim.process])
            if not _after(job, samples, worker(agents), killed_ns, agents):
                return
            signalled = [
                event for event in job.events.named("term") if event.at_ns > killed_ns and event.node != victim.node
            ]
            if signalled:
                samples.add(launcher.name, worker_signalled(agents), (signalled[-1].at_ns - killed_ns) / 1e9)
            time.sleep(0.2)


def _agent_dies(launcher: Launcher, samples: Samples) -> None:
    _kill_agent(launcher, AGENTS - 1, AGENT, samples)


def _endpoint_dies(launcher: Launcher, samples: Samples) -> None:
    _kill_agent(launcher, 0, ENDPOINT, samples)


def _kill_agent(launcher: Launcher, number: int, what: str, samples: Samples) -> None:
    with Job(launcher, NNODES) as job:
        if _formed(job, samples, "an agent is killed"):
            killed_ns = time.monotonic_ns()
            job.agents[number].kill()
            _after(job, samples, what, killed_ns, AGENTS - 1)


def _agent_joins(launcher: Launcher, samples: Samples) -> None:
    with Job(launcher, NNODES) as job:
        if not _formed(job, samples, "one more agent joins"):
            return
        newcomer = job.start()
        group = _after(job, samples, STARTED, newcomer.started_ns, AGENTS + 1)
        if not group and launcher.name == OURS:
            samples.miss(launcher.name, JOINED, "see the next row")
        joins = [at_s for path in job.logs(0).rglob("coordinator.jsonl") for at_s in joined_at_s(_lines(path))]
        if group and len(joins) == AGENTS + 1:
            samples.add(launcher.name, JOINED, group[-1].at_ns / 1e9 - joins[-1])


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def joined_at_s(journal: Iterable[str]) -> list[float]:
    """Return when the coordinator received the first message of each node, from its journal."""
    first: dict[str, float] = {}
    for line in journal:
        step = json.loads(line)
        event = step.get("event", {})
        if event.get("event") == "Received" and event["message"]["message"] == "NodeJoined":
            first.setdefault(event["node_id"], step["at"])
    return sorted(first.values())


def _host_cut_off(launcher: Launcher, samples: Samples) -> None:
    with Hosts(AGENTS) as network, Job(launcher, NNODES, host=hosts.address(0)) as job:
        try:
            for number, host in enumerate(network.hosts):
                # torchrun does not recognise an address of a namespace as its own; tenax does not need this.
                role = f"is_host={int(number == 0)}"
                job.start(before=host.enter, options=[f"--local-addr={hosts.address(number)}"], conf=[role])
                if number == 0:
                    job.wait_until_served()
            job.formed()
        except LaunchFailed as failure:
            samples.fail(launcher.name, f"a host is cut off: {failure}")
            return
        time.sleep(0.5 + random.random())  # at a random time between two heartbeats
        cut_ns = time.monotonic_ns()
        network.cut_off(AGENTS - 1)
        _after(job, samples, CUT, cut_ns, AGENTS - 1)


def rows(samples: Samples) -> list[Row]:
    """Return the rows that compare the launchers."""
    failures = [what(agents) for agents in sorted((*FIXED, AGENTS)) for what in (worker_signalled, worker)]
    return [
        *(compared(samples, start(agents), seconds) for agents in STARTS),
        *(compared(samples, what, seconds) for what in failures),
        limited(samples, JOINED, seconds, below=1.0),
        compared(samples, STARTED, seconds),
        limited(samples, AGENT, seconds, below=1.0),
        compared(samples, ENDPOINT, seconds),
        limited(samples, CUT, seconds, below=6.0),
    ]


def notes(_: Samples) -> list[str]:
    """Return the notes on the rows."""
    lines = [
        f"Several agents: {AGENTS} of them run with `--nnodes={NNODES}` and a last call of 1 s, for which torchrun "
        "waits in every restart; any other number is fixed, without a last call.",
        "Several agents: the join of a torchrun node cannot be observed from outside, so only the row from the "
        "start of its process compares the two, and it includes the launcher's cold start. tenax's join is the new "
        "node's first message in the coordinator's journal.",
        "What did not happen with torchrun: after the loss of an agent or a host, the survivors and their workers "
        "keep waiting (in training a collective would fail at its own timeout, and only then cause the restart); "
        "without the endpoint's agent every agent stops its healthy workers and exits; with one more agent the "
        "workers are stopped and no new group starts (in a run observed to its end, all agents gave up after a "
        "store timeout of 60 s).",
    ]
    reason = hosts.why_not()
    if reason:
        lines.append(f"No host was cut off: {reason}.")
    return lines
