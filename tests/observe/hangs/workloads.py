"""Simulated workers: the kernel's counters of jobs, sample after sample, for hours of simulated time.

A workload is a random sequence of activities. Each yields, for every sample, what the threads of a worker did since the
last one. It does not depend on the rules of the detector.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from tenax._core.hang import Assessment, HangDetector, ProcessCounters, Sample, Scopes, Thread


class Activity(msgspec.Struct, frozen=True):
    """What one worker did between two samples."""

    calls: int = 0  # of its main thread
    bytes: int = 0
    logged: int = 0  # calls of its second thread
    disk: int = 0
    faults: int = 0
    share: float = 0.0  # of the time, in which its main thread ran or was runnable
    runs: float = 0.5  # per second, of its main thread
    waits: float = 0.0  # per second
    steps: int = 0
    phase: str = ""
    scopes: int = 0  # entered or left
    is_in_scope: bool = False


ASLEEP = Activity()
SPINNING = Activity(share=1.0, runs=200.0)
HEARTBEAT = Activity(logged=1, bytes=40)  # of a second thread, while the main thread waits
# An evaluation with its data in memory: it computes, and prints a line now and then.
COMPUTING = Activity(calls=1, bytes=40, faults=900, share=0.95, runs=300.0, waits=60.0)
WORKING = Activity(calls=40, bytes=4_000_000, faults=900, share=0.6, runs=900.0, waits=500.0)


class FakeWorker:
    """One worker: its counters, with a second thread that wakes up ten times a second, and others that poll."""

    def __init__(self, rank: int, reports_steps: bool, pollers: int = 0) -> None:
        self.rank = rank
        self.reports_steps = reports_steps
        self.calls = self.logged = self.bytes = self.disk = self.faults = 0
        self.main = [0.0, 0.0, 0.0]
        self.second = [0.0, 0.0]
        self.polls = [0.0] * pollers
        self.step, self.step_at, self.first_at = 0, 0.0, 0.0
        self.scopes: Scopes | None = None

    def sample(self, activity: Activity, elapsed_s: float, now: float) -> Sample:
        self.calls += activity.calls
        self.logged += activity.logged
        self.bytes += activity.bytes
        self.disk += activity.disk
        self.faults += activity.faults
        self.main[0] += activity.share * elapsed_s
        self.main[1] += activity.runs * elapsed_s
        self.main[2] += activity.waits * elapsed_s
        self.second[0] += 0.002 * elapsed_s
        self.second[1] += 10 * elapsed_s
        if activity.steps:
            self.first_at = self.first_at or now
            self.step += activity.steps
            self.step_at = now
        if activity.scopes:
            count, first_at = (self.scopes.beats, self.scopes.first_at) if self.scopes is not None else (0, now)
            self.scopes = Scopes(count + activity.scopes, first_at, now, activity.is_in_scope)
        wanted, runs, waits = self.main
        threads = {
            1: Thread(wanted, wanted, int(runs), int(waits), is_main=True),
            2: Thread(self.second[0], self.second[0], int(self.second[1])),
        }
        for number in range(len(self.polls)):
            self.polls[number] += elapsed_s
            spent_s = 0.01 * self.polls[number]
            threads[3 + number] = Thread(spent_s, spent_s, int(100 * self.polls[number]))
        counters = ProcessCounters(
            read_bytes=self.bytes,
            calls=self.calls + self.logged,
            main_calls=self.calls,
            disk_bytes=self.disk,
            faults=self.faults,
            threads=threads,
            cpu_s=wanted + self.second[0],
        )
        if not self.reports_steps:
            return Sample(self.rank, counters, scopes=self.scopes)
        step = self.step if self.step else None
        return Sample(self.rank, counters, step, self.step_at, 1, self.first_at, activity.phase, self.scopes)


class Workload:
    """A random job on one node: its start, its training, and interruptions."""

    def __init__(self, seed: int, hang_after_s: float = 300.0, interval_s: float = 5.0) -> None:
        self.random = random.Random(seed)
        self.reports_steps = self.random.random() < 0.5
        self.interval_s, self.hang_after_s = interval_s, hang_after_s
        pollers = random.Random(seed + 0.5).choice((0, 1, 2, 9))  # as the loops of gloo's groups
        count = self.random.choice((1, 2, 2, 4))
        self.workers = [FakeWorker(rank, self.reports_steps, pollers) for rank in range(count)]
        self.step_s = self.random.choice((0.1, 1.0, 7.0, 25.0, 60.0))
        self.is_spinning_between = self.random.random() < 0.5  # as while waiting for a device
        # Around nothing, the start, every step, or checkpoints. A separate generator, so that the rest stays the same.
        self.scopes_around = random.Random(-seed).choice(("nothing", "start", "step", "checkpoint"))
        self.is_alone = len(self.workers) == 1 and seed % 2 == 0
        self.detector = HangDetector(hang_after_s, interval_s)
        self.now = 0.0
        self._until_step_s = self.step_s

    def begin(self) -> None:
        self.detector.begin(1 if self.is_alone else 2 * len(self.workers), self.now)

    def sample(self, activities: list[Activity]) -> Assessment:
        elapsed_s = self.interval_s * self.random.uniform(0.98, 1.1)
        self.now += elapsed_s
        samples = [
            worker.sample(activity, elapsed_s, self.now)
            for worker, activity in zip(self.workers, activities, strict=True)
        ]
        return self.detector.look(samples, self.now)

    def all(self, activity: Activity) -> list[Activity]:
        return [activity] * len(self.workers)

    def start(self) -> Iterator[Assessment]:
        """Imports, then no activity: a download, a compiler, a barrier of a thousand nodes."""
        scopes = 8 if self.scopes_around == "start" else 0
        for _ in range(self.random.randint(1, 8)):
            yield self.sample(self.all(msgspec.structs.replace(WORKING, scopes=scopes)))
        for _ in range(self.random.choice((0, 10, 360))):
            yield self.sample(self.all(self.random.choice((ASLEEP, ASLEEP, SPINNING))))
        for _ in range(self.random.choice((0, 20, 120))):
            yield self.sample(
                self.all(Activity(calls=3, bytes=9_000, faults=4_000, share=1.0, runs=300.0))
            )  # a compiler

    def train(self, seconds: float) -> Iterator[Assessment]:
        until = self.now + seconds
        while self.now < until:
            self._until_step_s -= self.interval_s
            steps = 0
            while self._until_step_s <= 0:
                self._until_step_s += self.step_s * self.random.uniform(0.9, 1.2)
                steps += 1
            between = SPINNING if self.is_spinning_between else ASLEEP
            step = msgspec.structs.replace(WORKING, steps=steps, share=0.95 if self.is_spinning_between else 0.4)
            if self.scopes_around == "step":
                step = msgspec.structs.replace(step, scopes=2 * steps)
            yield self.sample(self.all(step if steps else between))

    def interrupt(self) -> Iterator[Assessment]:
        """Yield an interruption that is not a hang."""
        chance, max_s = self.random, 0.8 * self.hang_after_s
        kind = chance.choice(("checkpoint", "evaluation", "stall", "logs", "phase", "slow rank", "compile", "exchange"))
        count = int(chance.uniform(0.1, 1.0) * max_s / self.interval_s)
        match kind:
            case "checkpoint":  # much longer than a hang, with continuous writes to disk
                is_in_scope, number = self.scopes_around == "checkpoint", chance.randint(10, 400)
                for left in reversed(range(number)):
                    scopes = 1 if is_in_scope and left in (0, number - 1) else 0
                    busy = Activity(calls=9, bytes=90_000_000, disk=90_000_000, share=0.3, runs=500.0, scopes=scopes)
                    busy = msgspec.structs.replace(busy, is_in_scope=is_in_scope and left > 0)
                    yield self.sample([busy, *self.all(ASLEEP)[1:]])
            case "evaluation":  # no steps, but reads
                for _ in range(chance.randint(10, 240)):
                    yield self.sample(self.all(msgspec.structs.replace(WORKING, steps=0)))
                if self.is_alone or not self.reports_steps:  # no scopes either, and hardly any I/O, for hours
                    computing = [COMPUTING, *self.all(chance.choice((HEARTBEAT, COMPUTING, ASLEEP)))[1:]]
                    for _ in range(chance.randint(10, 2400)):
                        yield self.sample(computing)
            case "stall":
                for _ in range(count):
                    yield self.sample(self.all(ASLEEP))
            case "logs":  # only a line now and then
                if not self.reports_steps:
                    for number in range(chance.randint(10, 400)):
                        yield self.sample(self.all(ASLEEP if number % 12 else Activity(calls=1, bytes=80)))
            case "exchange":  # a loop that computes almost nothing: network threads send little, the main thread waits
                if not self.reports_steps:
                    for _ in range(chance.randint(10, 400)):
                        yield self.sample(self.all(Activity(logged=9, bytes=900, share=0.02, runs=30.0)))
            case "phase":
                if self.reports_steps:
                    for _ in range(chance.randint(10, 700)):
                        phase = Activity(phase="checkpoint", share=chance.choice((0.0, 1.0)))
                        yield self.sample([phase, *self.all(ASLEEP)[1:]])
            case "slow rank":  # all wait for one that computes or sends data
                slow = chance.choice((Activity(share=0.03, runs=900.0), Activity(share=0.5, runs=90.0, faults=900)))
                for _ in range(count if self.reports_steps else chance.randint(10, 400)):
                    yield self.sample([slow, *self.all(ASLEEP)[1:]])
            case "compile":
                for _ in range(chance.randint(10, 200)):
                    yield self.sample(
                        self.all(Activity(calls=20, bytes=5_000_000, faults=9_000, share=1.0, runs=300.0))
                    )

    def live(self, hours: float) -> Iterator[Assessment]:
        """Start, train, interrupt; now and then a new generation."""
        until = self.now + 3600 * hours
        while self.now < until:
            self.workers = [FakeWorker(each.rank, self.reports_steps, len(each.polls)) for each in self.workers]
            self.begin()
            yield from self.start()
            for _ in range(self.random.randint(2, 12)):
                yield from self.train(self.random.uniform(600, 4_000))
                yield from self.interrupt()

    def hang(self, is_spinning: bool) -> float:
        """Stop all activity. Return after how many seconds the hang is detected."""
        began = self.now
        activities = self.all(SPINNING if is_spinning else ASLEEP)
        if is_spinning and len(activities) > 1 and self.random.random() < 0.5:
            activities[0] = ASLEEP
        while not self.sample(activities).is_quiet:
            assert self.now - began < 48 * 3600, "it was never detected"
        return self.now - began
