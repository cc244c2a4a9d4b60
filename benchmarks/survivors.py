"""Survivors: a data-parallel loop with gloo (`survivor_worker.py`); SIGKILL of a worker → next completed step of all.

The script is the same for all. Under torchrun, and under tenax without survivors, all workers start again and restore
the checkpoint; tenax's are warm. With survivors one worker is replaced. The harness kills a worker of any rank and
waits until every rank has completed a step in the next group; a survivor that lost a step, or a process that did not
survive, is a failure. A job of three agents with two workers each and a spare loses one agent. What `tenax.elastic`
adds to a step without failures is measured in the worker, as CPU time.

    python -m benchmarks.survivors cuda [REPETITIONS]    the same with CUDA state on one GPU, printed as a table
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence

from benchmarks import harness, procfs
from benchmarks.events import Event, whole_group
from benchmarks.harness import Launch, Launcher, LaunchFailed, Settings
from benchmarks.job import PER_AGENT, Job, Missing
from benchmarks.report import BASELINE, OURS, Row, compared, limited, seconds, table
from benchmarks.running import HERE, NO_NAME_SERVER, Running
from benchmarks.samples import Samples

SIZE = 8
SCRIPT = HERE / "survivor_worker.py"
RESTED_S = 1.0
BOUND_S = 120.0
DEATHS = 4
AGENTS = 3
# torchrun 2.13 serves one store for all restarts, in which gloo finds the addresses of dead workers. So rank 0 does.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
NEXT_STEP = f"{SIZE} workers, DDP with gloo: worker SIGKILL → next step of all"
RESTART = ", tenax without survivors"
PREPARED = ", standbys with a CUDA context"
PREPARE = "--standby-setup=tenax.elastic:prepare_cuda"
PREPARED_S = 6.0  # until all standbys have one
NODES = f"{AGENTS} × {PER_AGENT} workers and a spare: agent SIGKILL → next step of all"
COST = "what `tenax.elastic` adds to a step without failures, CPU time"


class SurvivorLaunch(Launch):
    """One launcher with the training loop."""

    def __init__(self, launcher: Launcher, workers: int, device: str, mode: str, options: Sequence[str] = ()) -> None:
        super().__init__(launcher, workers, [], options=options)
        program = self._command.index("--no-python")
        self._command[program : program + 2] = [str(SCRIPT)]
        self._command += [device, str(self.folder / "checkpoint"), mode]
        if launcher.name == BASELINE:
            self._command[:0] = ["env", OWN_STORE]


class SurvivorJob(Job):
    """Several agents with the training loop."""

    def start(self, *, before: Sequence[str] = (), options: Sequence[str] = (), conf: Sequence[str] = ()) -> Running:
        number = len(self.agents)
        command = [*before, *self._launcher.command, *self._flags, f"--rdzv-conf={','.join((*self._conf, *conf))}"]
        command += [f"--log-dir={self.logs(number)}", *options, str(SCRIPT), str(self.events.path), "cpu"]
        command += [str(self.folder / "checkpoint"), "elastic"]
        agent = Running(command, self.folder, name=f"agent{number}", variables=NO_NAME_SERVER)
        self.agents.append(agent)
        return agent


def measure(settings: Settings, samples: Samples) -> None:
    """Take all samples."""
    size = 2 if settings.quick else SIZE
    for _, launcher in settings.interleaved(2):
        if launcher.name not in (BASELINE, OURS):
            continue
        settings.settle(samples)
        if launcher.name == BASELINE:
            _take(launcher, size, "cpu", "elastic", ("", RESTART), 1, samples)
        else:
            deaths = 1 if settings.quick else DEATHS
            _take(launcher, size, "cpu", "cost", ("",), deaths, samples)
            if not settings.quick:
                _take(launcher, size, "cpu", "restart", (RESTART,), 2, samples)
                _lose_agent(launcher, samples)


def _take(
    launcher: Launcher,
    size: int,
    device: str,
    mode: str,
    endings: Sequence[str],
    deaths: int,
    samples: Samples,
    *flags: str,
) -> None:
    options = [f"--max-restarts={deaths}", *flags]
    with SurvivorLaunch(launcher, size, device, mode, options) as launch:
        try:
            group = _group(launch, size, launch.started_ns, launches=1)
            for death in range(deaths):
                rested_s = PREPARED_S if PREPARE in flags else RESTED_S
                time.sleep(rested_s + random.random() * 0.2)  # spread over torchrun's monitor intervals
                killed_ns = time.monotonic_ns()
                dead = random.choice(group).process
                procfs.end([dead])
                before, group = group, _group(launch, size, killed_ns, launches=death + 2)
                for ending in endings:
                    samples.add(launcher.name, NEXT_STEP + ending, (group[-1].at_ns - killed_ns) / 1e9)
                if launcher.name == OURS and mode != "restart":
                    _check(launch, before, group, dead)
            for event in launch.named("cost"):
                samples.add(OURS, COST, event.node / 1e9)
        except LaunchFailed as failure:
            samples.fail(launcher.name, f"survivors ({mode}): {failure}")


def _check(launch: Launch, before: Sequence[Event], after: Sequence[Event], dead: procfs.Process) -> None:
    survivors = {event.process for event in before} - {dead}
    replaced = survivors - {event.process for event in after}
    if replaced:
        raise launch.failure(f"{len(replaced)} of {len(survivors)} workers did not survive")
    lost = sum(event.node for event in launch.named("lost"))
    if lost:
        raise launch.failure(f"{lost} steps were lost")


def _group(launch: Launch, size: int, since_ns: int, launches: int) -> list[Event]:
    """Wait for the first completed step of every rank since then; earliest first."""
    launch.wait_for({"start": launches * size}, BOUND_S)
    group = whole_group(launch.events(), since_ns, size)
    if not group:
        raise launch.failure(f"{launches} groups of {size} workers were expected")
    return group


def _lose_agent(launcher: Launcher, samples: Samples) -> None:
    """Kill one of three agents, not the one that serves; the spare's workers take its place."""
    with SurvivorJob(launcher, str(AGENTS)) as job:
        try:
            group = job.form(AGENTS)
            _wait_for_standbys(job.start())  # the spare
            time.sleep(RESTED_S)
            victims = job.agents[1].below()
            killed_ns = time.monotonic_ns()
            job.agents[1].kill()
            after = job.group_after(killed_ns, AGENTS, BOUND_S)
            samples.add(launcher.name, NODES, (after[-1].at_ns - killed_ns) / 1e9)
            replaced = {event.process for event in group} - victims - {event.process for event in after}
            if replaced:
                raise job.failure(f"{len(replaced)} workers of other nodes did not survive", job.agents[0])
        except (LaunchFailed, Missing) as failure:
            samples.fail(launcher.name, f"survivors, agent SIGKILL: {failure}")


def _wait_for_standbys(agent: Running) -> None:
    """Wait until the workers of a spare are warm. Polling is fine here: nothing is measured."""
    deadline = time.monotonic() + BOUND_S
    while sum(_is_standby(process.pid) for process in agent.below()) < PER_AGENT:
        if agent.wait_until_gone(0.1) or time.monotonic() > deadline:
            raise LaunchFailed(f"the spare has no warm workers; last output: {agent.last_output()}")


def _is_standby(pid: int) -> bool:
    try:
        return b"tenax-standby" in (procfs.PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False  # gone


def microseconds(value: float) -> str:
    """Format a short duration."""
    return f"{value * 1e6:.1f} µs"


def rows(samples: Samples) -> list[Row]:
    """Return the rows that compare the launchers."""
    every = [
        (NEXT_STEP, compared(samples, NEXT_STEP, seconds, at_least=20)),
        (NEXT_STEP, limited(samples, NEXT_STEP, seconds, measure="the same, by the clock", below=0.5)),
        (NEXT_STEP + RESTART, compared(samples, NEXT_STEP + RESTART, seconds)),
        (NEXT_STEP + PREPARED, limited(samples, NEXT_STEP + PREPARED, seconds, below=0.5)),
        (NEXT_STEP + RESTART + PREPARED, limited(samples, NEXT_STEP + RESTART + PREPARED, seconds, below=1.4)),
        (NODES, limited(samples, NODES, seconds, below=1.0)),
        (COST, limited(samples, COST, microseconds, below=0.00005)),
    ]
    return [row for what, row in every if samples.has(OURS, what) or samples.has(BASELINE, what)]


def notes(samples: Samples) -> list[str]:  # noqa: ARG001 - the interface of a measurement
    """Return the notes on the rows."""
    return [
        "Survivors: the same training loop for both, with `tenax.elastic`, a pause of 20 ms after each step and a "
        "checkpoint every 10 steps. Under torchrun and without survivors all workers restore the checkpoint; with "
        "survivors no step was lost and every other process was kept, which is checked in each sample. torchrun ran "
        f"with `{OWN_STORE}`: in its own store, restarted gloo workers find the addresses of dead ones."
    ]


def main() -> None:
    """Measure with state on this machine's GPU, and print the table."""
    device, repetitions = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    samples = Samples()
    launchers = harness.find_launchers([BASELINE, OURS])
    for _ in range(repetitions):
        for launcher in launchers:
            if launcher.name == BASELINE:
                _take(launcher, SIZE, device, "elastic", ("", RESTART), 1, samples)
            else:
                _take(launcher, SIZE, device, "cost", ("",), DEATHS, samples)
                _take(launcher, SIZE, device, "restart", (RESTART,), 2, samples)
                if device == "cuda":
                    _take(launcher, SIZE, device, "elastic", (PREPARED,), DEATHS, samples, PREPARE)
                    _take(launcher, SIZE, device, "restart", (RESTART + PREPARED,), 2, samples, PREPARE)
    print(table(rows(samples)))
    for failure in samples.failures:
        print(failure)


if __name__ == "__main__":
    main()
