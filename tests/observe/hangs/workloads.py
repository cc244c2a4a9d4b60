"""Workers that do not exist: what the kernel would count of them, look after look, for hours of a clock that jumps.

A workload is a list of acts, drawn from dice. Each act says for every look what the threads of a worker did since the
last one. Nothing here knows how the judge thinks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from tenax._core.hang import Assessment, HangDetector, ProcessCounters, Sample, Scopes, Thread


class Look(msgspec.Struct, frozen=True):
    """What one worker did between two looks."""

    calls: int = 0
    bytes: int = 0
    disk: int = 0
    faults: int = 0
    share: float = 0.0  # of the time in which its main thread wanted a processor
    runs: float = 2.0  # a second, of its main thread
    waits: float = 0.0  # a second
    steps: int = 0
    phase: str = ""
    scopes: int = 0  # entered or left
    is_in_scope: bool = False


ASLEEP = Look()
SPINNING = Look(share=1.0, runs=200.0)
HEARTBEAT = Look(calls=1, bytes=40)  # of a thread beside one that waits
# All that is seen of an evaluation whose data are in memory: it computes, and prints a line now and then.
COMPUTING = Look(calls=1, bytes=40, faults=900, share=0.95, runs=300.0, waits=60.0)
WORKING = Look(calls=40, bytes=4_000_000, faults=900, share=0.6, runs=900.0, waits=500.0)


class FakeWorker:
    """One worker: its counters, and a thread beside the main one that looks around ten times a second."""

    def __init__(self, rank: int, says_steps: bool) -> None:
        self.rank = rank
        self.says_steps = says_steps
        self.calls = self.bytes = self.disk = self.faults = 0
        self.main = [0.0, 0.0, 0.0]
        self.beside = [0.0, 0.0]
        self.step, self.step_at, self.first_at = 0, 0.0, 0.0
        self.scopes: Scopes | None = None

    def sample(self, look: Look, elapsed_s: float, now: float) -> Sample:
        self.calls += look.calls
        self.bytes += look.bytes
        self.disk += look.disk
        self.faults += look.faults
        self.main[0] += look.share * elapsed_s
        self.main[1] += look.runs * elapsed_s
        self.main[2] += look.waits * elapsed_s
        self.beside[0] += 0.002 * elapsed_s
        self.beside[1] += 10 * elapsed_s
        if look.steps:
            self.first_at = self.first_at or now
            self.step += look.steps
            self.step_at = now
        if look.scopes:
            count, first_at = (self.scopes.beats, self.scopes.first_at) if self.scopes is not None else (0, now)
            self.scopes = Scopes(count + look.scopes, first_at, now, look.is_in_scope)
        wanted, runs, waits = self.main
        threads = {1: Thread(wanted, int(runs), int(waits)), 2: Thread(self.beside[0], int(self.beside[1]))}
        vitals = ProcessCounters(
            self.bytes, 0, self.calls, self.disk, self.faults, 1, False, threads, wanted + self.beside[0]
        )
        if not self.says_steps:
            return Sample(self.rank, vitals, scopes=self.scopes)
        step = self.step if self.step else None
        return Sample(self.rank, vitals, step, self.step_at, 1, self.first_at, look.phase, self.scopes)


class Workload:
    """A job on one node, drawn from dice: its start, its training, and what interrupts that."""

    def __init__(self, seed: int, hang_after_s: float = 300.0, interval_s: float = 5.0) -> None:
        self.dice = random.Random(seed)
        self.says_steps = self.dice.random() < 0.5
        self.interval_s, self.hang_after_s = interval_s, hang_after_s
        self.workers = [FakeWorker(rank, self.says_steps) for rank in range(self.dice.choice((1, 2, 2, 4)))]
        self.step_s = self.dice.choice((0.1, 1.0, 7.0, 25.0, 60.0))
        self.is_spinning_between = self.dice.random() < 0.5  # as a device is waited for
        # Around nothing, the start, every step, or checkpoints. Of its own dice: jobs are as they were without.
        self.scopes_around = random.Random(-seed).choice(("nothing", "start", "step", "checkpoint"))
        self.is_alone = len(self.workers) == 1 and seed % 2 == 0
        self.judge = HangDetector(hang_after_s, interval_s)
        self.now = 0.0
        self._until_step_s = self.step_s

    def begin(self) -> None:
        self.judge.begin(1 if self.is_alone else 2 * len(self.workers), self.now)

    def look(self, looks: list[Look]) -> Assessment:
        elapsed_s = self.interval_s * self.dice.uniform(0.98, 1.1)
        self.now += elapsed_s
        samples = [worker.sample(look, elapsed_s, self.now) for worker, look in zip(self.workers, looks, strict=True)]
        return self.judge.look(samples, self.now)

    def all(self, look: Look) -> list[Look]:
        return [look] * len(self.workers)

    def start(self) -> Iterator[Assessment]:
        """Imports, then silence: a download, a compiler elsewhere, a barrier of a thousand nodes."""
        scopes = 8 if self.scopes_around == "start" else 0
        for _ in range(self.dice.randint(1, 8)):
            yield self.look(self.all(msgspec.structs.replace(WORKING, scopes=scopes)))
        for _ in range(self.dice.choice((0, 10, 360))):
            yield self.look(self.all(self.dice.choice((ASLEEP, ASLEEP, SPINNING))))
        for _ in range(self.dice.choice((0, 20, 120))):
            yield self.look(self.all(Look(calls=3, bytes=9_000, faults=4_000, share=1.0, runs=300.0)))  # a compiler

    def train(self, seconds: float) -> Iterator[Assessment]:
        until = self.now + seconds
        while self.now < until:
            self._until_step_s -= self.interval_s
            steps = 0
            while self._until_step_s <= 0:
                self._until_step_s += self.step_s * self.dice.uniform(0.9, 1.2)
                steps += 1
            between = SPINNING if self.is_spinning_between else ASLEEP
            step = msgspec.structs.replace(WORKING, steps=steps, share=0.95 if self.is_spinning_between else 0.4)
            if self.scopes_around == "step":
                step = msgspec.structs.replace(step, scopes=2 * steps)
            yield self.look(self.all(step if steps else between))

    def interrupt(self) -> Iterator[Assessment]:
        """What happens in the life of a job, and is no hang."""
        dice, most = self.dice, 0.8 * self.hang_after_s
        act = dice.choice(("checkpoint", "evaluation", "stall", "logs", "phase", "slow rank", "compile"))
        looks = int(dice.uniform(0.1, 1.0) * most / self.interval_s)
        match act:
            case "checkpoint":  # for much longer than a hang: bytes go to a disk all the time
                is_in_scope, number = self.scopes_around == "checkpoint", dice.randint(10, 400)
                for left in reversed(range(number)):
                    scopes = 1 if is_in_scope and left in (0, number - 1) else 0
                    busy = Look(calls=9, bytes=90_000_000, disk=90_000_000, share=0.3, runs=500.0, scopes=scopes)
                    busy = msgspec.structs.replace(busy, is_in_scope=is_in_scope and left > 0)
                    yield self.look([busy, *self.all(ASLEEP)[1:]])
            case "evaluation":  # no steps, but bytes are read
                for _ in range(dice.randint(10, 240)):
                    yield self.look(self.all(msgspec.structs.replace(WORKING, steps=0)))
                if self.is_alone or not self.says_steps:  # no scopes either, and hardly a byte, for hours
                    computing = [COMPUTING, *self.all(dice.choice((HEARTBEAT, COMPUTING, ASLEEP)))[1:]]
                    for _ in range(dice.randint(10, 2400)):
                        yield self.look(computing)
            case "stall":
                for _ in range(looks):
                    yield self.look(self.all(ASLEEP))
            case "logs":  # nothing but a line now and then
                if not self.says_steps:
                    for number in range(dice.randint(10, 400)):
                        yield self.look(self.all(ASLEEP if number % 12 else Look(calls=1, bytes=80)))
            case "phase":
                if self.says_steps:
                    for _ in range(dice.randint(10, 700)):
                        phase = Look(phase="checkpoint", share=dice.choice((0.0, 1.0)))
                        yield self.look([phase, *self.all(ASLEEP)[1:]])
            case "slow rank":  # all wait for one that computes, or moves data over a network
                slow = dice.choice((Look(share=0.03, runs=900.0), Look(share=0.5, runs=90.0, faults=900)))
                for _ in range(looks if self.says_steps else dice.randint(10, 400)):
                    yield self.look([slow, *self.all(ASLEEP)[1:]])
            case "compile":
                for _ in range(dice.randint(10, 200)):
                    yield self.look(self.all(Look(calls=20, bytes=5_000_000, faults=9_000, share=1.0, runs=300.0)))

    def live(self, hours: float) -> Iterator[Assessment]:
        """Start, train, be interrupted; now and then a new generation."""
        until = self.now + 3600 * hours
        while self.now < until:
            self.workers = [FakeWorker(worker.rank, self.says_steps) for worker in self.workers]
            self.begin()
            yield from self.start()
            for _ in range(self.dice.randint(2, 12)):
                yield from self.train(self.dice.uniform(600, 4_000))
                yield from self.interrupt()

    def hang(self, is_spinning: bool) -> float:
        """From now on nothing happens, for ever. After how many seconds is that noticed?"""
        began = self.now
        looks = self.all(SPINNING if is_spinning else ASLEEP)
        if is_spinning and len(looks) > 1 and self.dice.random() < 0.5:
            looks[0] = ASLEEP
        while not self.look(looks).is_quiet:
            assert self.now - began < 48 * 3600, "it was never noticed"
        return self.now - began
