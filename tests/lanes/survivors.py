"""The command: random faults in a row on one job whose workers survive. Every step is applied exactly once.

./dev survivors                       20 faults, workers with torch and gloo
./dev survivors --faults 500          more
./dev survivors --framework none      workers without torch, through the workers' store: faster

Two agents on this host: one stays, the other joins, is drained, killed and stopped. Checked, for every report of every
worker: the weights and their history after each step are those of an undisturbed training, and no worker of a
generation acts after the next one has begun.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from kit.addresses import own_endpoint
from kit.jobs import TENAX
from lanes import print_line

from .survivor_chain import expected

_HERE = Path(__file__).parent
_WORKERS = 3  # of each node
_TIMEOUT_S = 120.0  # from a fault to the next step of all, on a busy machine
# Weights. What a worker does wrong shows when its generation ends, so another one is killed.
FAULTS = {
    "kill": 8,
    "raise": 3,
    "exit": 3,
    "stop": 3,
    "deaf": 2,
    "in C": 2,
    "loop": 2,
    "fork": 2,
    "join": 4,
    "drain": 3,
    "kill agent": 2,
    "freeze agent": 1,
}
_COMMANDS = ("raise", "exit", "deaf", "in C", "loop", "fork")
_FAILS_ALONE = ("raise", "exit")


class Worker:
    """One worker's connection, and its last report."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.rest = b""
        self.last: dict[str, Any] = {}
        self.obeyed = ""  # the last command that it has read


class Hub:
    """Receives the reports of all workers in a thread, and checks each."""

    def __init__(self) -> None:
        self.name = f"tenax-survivors-{os.getpid()}"
        self.changed = threading.Condition()
        self.broken: list[str] = []
        self.workers: dict[int, Worker] = {}  # by descriptor
        self.steps: dict[int, dict[int, int]] = defaultdict(dict)  # generation -> rank -> last completed step
        self.pids: dict[int, dict[int, int]] = defaultdict(dict)  # generation -> rank -> pid
        self.world_sizes: dict[int, int] = {}
        self.times: dict[int, tuple[float, float]] = {}  # generation -> first and last report
        self.restored: set[int] = set()
        self.reports = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + self.name)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                with self.changed:
                    if key.fd == self._listener.fileno():
                        sock, _ = self._listener.accept()
                        self.workers[sock.fileno()] = Worker(sock)
                        self._selector.register(sock, selectors.EVENT_READ)
                    else:
                        self._read(self.workers[key.fd])
                    self.changed.notify_all()

    def _read(self, worker: Worker) -> None:
        try:
            data = worker.sock.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(worker.sock)
            del self.workers[worker.sock.fileno()]
            worker.sock.close()
            return
        *lines, worker.rest = (worker.rest + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            if "obeys" in report:
                worker.obeyed = report["obeys"]
            else:
                worker.last = report
                self._check(report)

    def _check(self, report: dict[str, Any]) -> None:
        self.reports += 1
        generation, step = report["generation"], report.get("step", report.get("begins"))
        if report["chain"] != expected(step)[0]:
            self.broken.append(f"after step {step} the history is wrong: {report}")
        if "begins" in report:
            self.pids[generation][report["rank"]] = report["pid"]
            self.world_sizes[generation] = report["world_size"]
            if report["restored"]:
                self.restored.add(generation)
        else:
            before = self.steps[generation].get(report["rank"])
            if before is not None and step != before + 1:
                self.broken.append(f"step {step} follows step {before}: {report}")
            self.steps[generation][report["rank"]] = step
        first, last = self.times.get(generation, (report["at"], report["at"]))
        self.times[generation] = min(first, report["at"]), max(last, report["at"])

    def latest(self) -> int:
        """Return the last generation in which every rank has completed a step; 0: none."""
        whole = [number for number, size in self.world_sizes.items() if len(self.steps[number]) == size]
        return max(whole, default=0)

    def wait(self, condition: Callable[[], bool], timeout_s: float = _TIMEOUT_S) -> bool:
        with self.changed:
            return self.changed.wait_for(condition, timeout_s)

    def active(self) -> list[Worker]:
        """Return the workers of the latest generation."""
        return [each for each in self.workers.values() if each.last.get("generation") == self.latest()]


class Job:
    """The two agents."""

    def __init__(self, home: Path, hub: Hub, framework: str) -> None:
        self._home = home
        self._hub = hub
        self._framework = framework
        self._endpoint = own_endpoint()
        self._logs: list[Path] = []
        self.first = self._start()
        self.second: subprocess.Popen[bytes] | None = None

    def _start(self) -> subprocess.Popen[bytes]:
        self._logs.append(self._home / f"agent-{len(self._logs)}.txt")
        command = [*TENAX, "run", "--nnodes", "1:2", "--nproc-per-node", str(_WORKERS), "--max-restarts", "1000000"]
        command += ["--rdzv-endpoint", self._endpoint, "--rdzv-id", "survivors", "--shutdown-timeout", "1"]
        command += ["--rdzv-conf", "last_call_timeout=0.5", "--log-dir", str(self._home / "logs")]
        if self._framework == "torch":
            command += ["--preload", "torch,torch._dynamo,torch.distributed.nn.functional"]
        command += [str(_HERE / "survivor_main.py"), self._framework, str(self._home / "checkpoint.json")]
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PET_", "TENAX_", "TORCH"))}
        env |= {"LANE_HUB": self._hub.name, "TMPDIR": str(self._home), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with self._logs[-1].open("wb") as output:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)

    def join(self) -> None:
        self.second = self._start()

    def consoles(self, lines: int = 60) -> str:
        return "\n".join(f"--- {log.name}\n" + "".join(log.read_text().splitlines(True)[-lines:]) for log in self._logs)

    def close(self) -> None:
        for agent in (self.first, self.second):
            if agent is not None and agent.poll() is None:
                agent.send_signal(signal.SIGCONT)
                agent.kill()
                agent.wait()


class Lane:
    """Injects one fault after the other, and waits until all workers have completed a step again."""

    def __init__(self, job: Job, hub: Hub, seed: int) -> None:
        self._job = job
        self._hub = hub
        self._random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.recovered_s: dict[str, list[float]] = defaultdict(list)
        self.kept = self.replaced = 0

    def fault(self) -> str:
        """Inject a fault. Return what is wrong, or an empty text."""
        self._wait_for_steps(self._random.randrange(1, 10))
        kinds = dict(FAULTS)
        for kind in ("drain", "kill agent", "freeze agent") if self._job.second is None else ("join",):
            del kinds[kind]
        kind = self._random.choices(list(kinds), list(kinds.values()))[0]
        with self._hub.changed:
            before = self._hub.latest()
            workers = self._random.sample(self._hub.active(), len(self._hub.active()))
        began = time.monotonic()
        size = self._inject(kind, workers)
        if not self._hub.wait(lambda: self._has_recovered(before, size) or bool(self._hub.broken)):
            return f"no step of all ranks within {_TIMEOUT_S:g} s after {kind}"
        self.recovered_s[kind].append(time.monotonic() - began)
        self.counts[kind] += 1
        with self._hub.changed:
            old, new = self._hub.pids[before], self._hub.pids[self._hub.latest()]
        kept = set(old.values()) & set(new.values())
        self.kept += len(kept)
        self.replaced += len(new) - len(kept)
        return self._hub.broken[0] if self._hub.broken else ""

    def _wait_for_steps(self, count: int) -> None:
        with self._hub.changed:
            steps = self._hub.steps[self._hub.latest()]
            goal = max(steps.values()) + count
        self._hub.wait(lambda: min(steps.values()) >= goal)

    def _has_recovered(self, before: int, size: int) -> bool:
        now = self._hub.latest()
        return now > before and (not size or self._hub.world_sizes[now] == size)

    def _inject(self, kind: str, workers: list[Worker]) -> int:
        """Return the world size that the next generation must have; 0: any."""
        second = self._job.second
        if kind == "join":
            self._job.join()
            return 2 * _WORKERS
        if second is not None and kind in ("drain", "kill agent", "freeze agent"):
            number = {"drain": signal.SIGTERM, "kill agent": signal.SIGKILL, "freeze agent": signal.SIGSTOP}[kind]
            second.send_signal(number)
            if kind == "freeze agent":
                self._hub.wait(lambda: self._hub.world_sizes.get(self._hub.latest()) == _WORKERS)
                second.send_signal(signal.SIGCONT)
                return 2 * _WORKERS
            second.wait()
            self._job.second = None
            return _WORKERS
        if kind == "stop":
            os.kill(workers[0].last["pid"], signal.SIGSTOP)
        elif kind in _COMMANDS:
            workers[0].obeyed = ""
            workers[0].sock.sendall(kind.encode() + b"\n")
            if not self._hub.wait(lambda: workers[0].obeyed == kind):
                self._hub.broken.append(f"a worker did not read the command {kind!r}")
        if kind not in _FAILS_ALONE:
            os.kill(workers[-1].last["pid"], signal.SIGKILL)
        return 0

    def finish(self) -> str:
        """Let the job end; return what is wrong."""
        with self._hub.changed:
            limit = max(self._hub.steps[self._hub.latest()].values()) + 200
            for worker in self._hub.active():
                worker.sock.sendall(b"%d\n" % limit)
        for agent in (self._job.first, self._job.second):
            if agent is not None and agent.wait(_TIMEOUT_S) != 0:
                return f"an agent exited with code {agent.returncode}"
        last = self._hub.steps[self._hub.latest()]
        if set(last.values()) != {limit}:
            return f"the ranks did not all end after step {limit}: {last}"
        times = sorted(self._hub.times.items())
        for (earlier, (_, last_report)), (later, (first_report, _)) in pairwise(times):
            if last_report > first_report:
                return f"a worker of generation {earlier} acted after generation {later} had begun"
        return self._hub.broken[0] if self._hub.broken else ""


def main(argv: list[str] | None = None) -> int:
    """Return 1 if anything is broken."""
    options = _parser().parse_args(argv)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    began = time.monotonic()
    hub = Hub()
    with tempfile.TemporaryDirectory(prefix="tenax-lane-", ignore_cleanup_errors=True) as home:
        job = Job(Path(home), hub, options.framework)
        lane = Lane(job, hub, seed)
        try:
            broken = "" if hub.wait(lambda: hub.latest() > 0) else "the job did not start"
            while not broken and lane.counts.total() < options.faults and time.monotonic() - began < options.seconds:
                broken = lane.fault()
            broken = broken or lane.finish()
            if broken or options.consoles:
                print_line(job.consoles(sys.maxsize if options.consoles else 60))
        finally:
            job.close()
    print_line(_summary(lane, hub, seed, time.monotonic() - began))
    if broken:
        print_line(f"BROKEN: {broken}")
    return 1 if broken else 0


def _summary(lane: Lane, hub: Hub, seed: int, seconds: float) -> str:
    rows = [
        f"{kind:>13}: {len(times)}, next step of all after {median(times):.2f} s (median), {max(times):.2f} s (longest)"
        for kind, times in sorted(lane.recovered_s.items())
    ]
    last = max(hub.steps[hub.latest()].values(), default=0)
    rows.append(
        f"{lane.counts.total()} faults (seed {seed}): {hub.latest()} generations, {last} steps, each applied exactly "
        f"once on every rank ({hub.reports} reports); {lane.kept} workers kept, {lane.replaced} started, "
        f"{max(0, len(hub.restored) - 1)} times restored from the checkpoint, in {seconds:.0f} s"
    )
    return "\n".join(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./dev survivors", description="Random faults on one job whose workers survive."
    )
    parser.add_argument("--faults", type=int, default=20, help="number of faults (default: 20)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="inject no more faults after this time")
    parser.add_argument("--framework", choices=("torch", "none"), default="torch", help="of the workers")
    parser.add_argument(
        "--consoles", action="store_true", help="print the output of the agents, also if nothing is broken"
    )
    parser.add_argument("--seed", type=int, help="repeats the faults, not their consequences")
    return parser


if __name__ == "__main__":
    sys.exit(main())
