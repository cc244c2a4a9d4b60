"""The judgement of one node (``_core/hang.py``): hours of jobs that do not hang, and hangs of both kinds."""

from __future__ import annotations

import os

import msgspec
import pytest

from tenax._core.hang import (
    DOUBT_PATIENCE,
    PATIENCE,
    SPIN_PATIENCE,
    START_PATIENCE,
    HangDetector,
    ProcessCounters,
    Sample,
)

from .workloads import ASLEEP, COMPUTING, HEARTBEAT, SPINNING, WORKING, FakeWorker, Look, Workload

SOAK_SEEDS, SOAK_HOURS = int(os.environ.get("HANGS_SOAK_SEEDS", "10")), 12.0


def test_no_alarm_in_a_soak_of_jobs_that_do_not_hang(capsys: pytest.CaptureFixture[str]) -> None:
    """H1 to H3: starts, checkpoints, evaluations, stalls, compilers, rare lines, slow ranks, devices.

    ``HANGS_SOAK_SEEDS=60`` soaks for longer.
    """
    hours = 0.0
    for seed in range(SOAK_SEEDS):
        job = Workload(seed)
        for opinion in job.live(SOAK_HOURS):
            assert not opinion.is_quiet, f"seed {seed}, after {job.now:.0f} s: {opinion}"
        hours += job.now / 3600
    with capsys.disabled():
        print(f"\nhangs: {hours:.0f} simulated hours of {SOAK_SEEDS} jobs without a false alarm")


@pytest.mark.parametrize("is_spinning", [False, True], ids=["asleep", "spinning"])
def test_every_hang_is_found(is_spinning: bool) -> None:
    """In every job of the soak, once its rhythm is known, and no later than that rhythm allows (H3)."""
    for seed in range(40):
        job = Workload(seed)
        job.is_alone &= not is_spinning  # then it may compute
        job.begin()
        for _ in job.train(2 * 3600):
            pass
        learned = job.judge.learned
        longest_s = max(PATIENCE * max(learned.longest_gap_s, learned.longest_step_s), 300.0)
        longest_s = max(longest_s, START_PATIENCE * learned.longest_start_s)
        took_s = job.hang(is_spinning)
        assert 280 - job.step_s <= took_s < SPIN_PATIENCE * longest_s + 30, f"seed {seed} took {took_s:.0f} s"


def test_it_moves_again_and_that_length_is_no_news() -> None:
    """H4: what was called a hang and was none is called one only after ten times as long."""
    job = Workload(3)
    job.workers = [FakeWorker(0, says_steps=False)]
    job.step_s = 1.0
    job.begin()
    for _ in job.train(3600):
        pass
    first_s = job.hang(is_spinning=False)
    assert not job.look([WORKING]).is_quiet
    assert not job.look([WORKING]).is_quiet
    assert job.hang(is_spinning=False) > 9 * first_s


def _judge(**how: float) -> HangDetector:
    judge = HangDetector(how.get("after_s", 60.0), 5.0)
    judge.begin(int(how.get("world", 2)), 0.0)
    return judge


def _run(judge: HangDetector, worker: FakeWorker, looks: list[Look], now: float) -> tuple[bool, float]:
    is_quiet = False
    for look in looks:
        now += 5.0
        is_quiet = judge.look([worker.sample(look, 5.0, now)], now).is_quiet
    return is_quiet, now


def test_a_start_is_never_judged() -> None:
    """H1: whatever it does or does not do, before a rhythm was seen."""
    for still in (ASLEEP, SPINNING):
        judge, worker = _judge(), FakeWorker(0, says_steps=False)
        is_quiet, _ = _run(judge, worker, [WORKING] * 5 + [still] * 5000, 0.0)
        assert not is_quiet


def test_a_phase_is_never_a_hang() -> None:
    """H2: for hours, after a rhythm of steps."""
    judge, worker = _judge(), FakeWorker(0, says_steps=True)
    step = msgspec.structs.replace(WORKING, steps=3)
    is_quiet, _ = _run(judge, worker, [step] * 50 + [Look(phase="evaluation")] * 5000, 0.0)
    assert not is_quiet


def test_steps_that_are_missing_mean_less_while_bytes_flow() -> None:
    """H2: an evaluation of which nothing was said is called a hang six times later; a checkpoint on a disk never."""
    step, reading = msgspec.structs.replace(WORKING, steps=3), WORKING
    soon, late = int(60 / 5) + 2, int(DOUBT_PATIENCE * 60 / 5) + 2
    for looks, expected in ((soon, False), (late, True)):
        is_quiet, _ = _run(_judge(), FakeWorker(0, says_steps=True), [step] * 50 + [reading] * looks, 0.0)
        assert is_quiet is expected
    writing = Look(calls=5, bytes=9_000_000, disk=9_000_000)
    assert not _run(_judge(), FakeWorker(0, says_steps=True), [step] * 50 + [writing] * 5000, 0.0)[0]
    assert _run(_judge(), FakeWorker(0, says_steps=True), [step] * 50 + [SPINNING] * soon, 0.0)[0]


def test_scopes_that_came_for_long_and_are_missing_tell_of_a_hang() -> None:
    """H3: although a thread logs a heartbeat, which keeps it from looking still; but not while bytes flow."""
    late = int(DOUBT_PATIENCE * 60 / 5) + 2
    for looks, expected in (([HEARTBEAT] * (late - 4), False), ([HEARTBEAT] * late, True), ([WORKING] * 500, False)):
        is_quiet, _ = _run(_judge(), FakeWorker(0, says_steps=False), [BEATING] * 70 + looks, 0.0)
        assert is_quiet is expected


BEATING = msgspec.structs.replace(WORKING, scopes=2)


@pytest.mark.parametrize(
    "sign", [COMPUTING, Look(calls=1, share=0.3), Look(calls=1, faults=2000), Look(share=0.03, runs=900.0)]
)
def test_scopes_that_are_missing_say_nothing_while_somebody_computes(sign: Look) -> None:
    """H3: an evaluation need not use them, nor read anything. After it, the whole time must go by again."""
    late = int(DOUBT_PATIENCE * 60 / 5) + 2
    others = FakeWorker(1, says_steps=False)
    judge, worker, now = _judge(), FakeWorker(0, says_steps=False), 0.0
    looks = [(BEATING, BEATING)] * 70 + [(sign, HEARTBEAT)] * 2000 + [(HEARTBEAT, HEARTBEAT)] * (late - 4)
    for one, other in looks:
        now += 5.0
        opinion = judge.look([worker.sample(one, 5.0, now), others.sample(other, 5.0, now)], now)
        assert not opinion.is_quiet
    for _ in range(8):
        now += 5.0
        samples = [each.sample(HEARTBEAT, 5.0, now) for each in (worker, others)]
        opinion = judge.look(samples, now)
    assert opinion.is_quiet


def test_scopes_that_are_missing_say_nothing_of_a_job_of_one_worker() -> None:
    """H3: in a job of one, nobody is waited for."""
    for looks in ([COMPUTING] * 5000, [HEARTBEAT] * 5000):
        assert not _run(_judge(world=1), FakeWorker(0, says_steps=False), [BEATING] * 70 + looks, 0.0)[0]


def test_a_gap_between_scopes_is_learned_for_all_generations() -> None:
    """H4: scopes that come again end it, and another gap of that length is no news, also after a restart."""
    judge, gap = _judge(), [HEARTBEAT] * (int(DOUBT_PATIENCE * 60 / 5) + 2)
    is_quiet, now = _run(judge, FakeWorker(0, says_steps=False), [BEATING] * 70 + gap + [BEATING], 0.0)
    assert not is_quiet
    judge.begin(2, now)
    assert not _run(judge, FakeWorker(0, says_steps=False), [BEATING] * 70 + gap * 9, now)[0]


def test_a_restart_for_missing_scopes_is_not_made_again_as_soon() -> None:
    """H4: what was ended cannot show that it would have gone on, so the next time six times as much is waited for."""
    judge, late = _judge(), int(DOUBT_PATIENCE * 60 / 5) + 2
    is_quiet, now = _run(judge, FakeWorker(0, says_steps=False), [BEATING] * 70 + [HEARTBEAT] * late, 0.0)
    assert is_quiet
    judge.begin(2, now)
    worker = FakeWorker(0, says_steps=False)
    is_quiet, now = _run(judge, worker, [BEATING] * 70 + [HEARTBEAT] * (5 * late), now)
    assert not is_quiet
    assert _run(judge, worker, [HEARTBEAT] * (2 * late), now)[0]


def test_scopes_of_a_start_say_nothing_of_what_follows() -> None:
    """H3: nobody need use them all the time. And not many at once make a rhythm, but a long time of them."""
    beating = msgspec.structs.replace(WORKING, scopes=9)
    for beats in (1, 30):
        looks = [beating] * beats + [Look(calls=1, bytes=40)] * 5000
        assert not _run(_judge(), FakeWorker(0, says_steps=False), looks, 0.0)[0]


@pytest.mark.parametrize("says_steps", [False, True])
def test_in_a_scope_everything_takes_six_times_as_long(says_steps: bool) -> None:
    """H3: it has a time of its own. A scope that was left, or has expired, has none."""
    step, enter = msgspec.structs.replace(WORKING, steps=3), Look(calls=1, bytes=90, scopes=1, is_in_scope=True)
    soon, late = int(60 / 5) + 2, int(DOUBT_PATIENCE * 60 / 5) + 2
    for looks, expected in (([enter] + [ASLEEP] * soon, False), ([enter] + [ASLEEP] * late, True)):
        is_quiet, _ = _run(_judge(), FakeWorker(0, says_steps), [step] * 50 + looks, 0.0)
        assert is_quiet is expected
    left = msgspec.structs.replace(enter, is_in_scope=False)
    assert _run(_judge(), FakeWorker(0, says_steps), [step] * 50 + [enter, left] + [ASLEEP] * soon, 0.0)[0]


def test_one_worker_alone_may_compute_for_ever() -> None:
    """H3: in a job of one, nobody is waited for. One that sleeps is still found."""
    looks = [WORKING] * 50
    assert not _run(_judge(world=1), FakeWorker(0, says_steps=False), [*looks, *[SPINNING] * 5000], 0.0)[0]
    assert _run(_judge(world=1), FakeWorker(0, says_steps=False), [*looks, *[ASLEEP] * 20], 0.0)[0]
    steps = [msgspec.structs.replace(WORKING, steps=3)] * 50
    for computing in (SPINNING, COMPUTING):
        assert not _run(_judge(world=1), FakeWorker(0, says_steps=True), [*steps, *[computing] * 5000], 0.0)[0]
    assert _run(_judge(world=1), FakeWorker(0, says_steps=True), [*steps, *[HEARTBEAT] * 20], 0.0)[0]


@pytest.mark.parametrize(("every_s", "least_s", "most_s"), [(0.3, 5.0, 8.0), (1.0, 10.0, 14.0), (2.0, 20.0, 25.0)])
def test_the_time_between_steps_is_their_own_and_not_that_between_looks(
    every_s: float, least_s: float, most_s: float
) -> None:
    """H3: many steps between two looks make a job impatient; ten times the longest gap is the law, and no more."""
    judge = HangDetector(5.0, 1.25)
    judge.begin(2, 0.0)
    now = 0.0
    while now < 60.0:
        now += 1.25
        step = int(now / every_s)
        assert not judge.look([Sample(0, None, step, step * every_s, 0, 0.0)], now).is_quiet
    last = now
    while not judge.look([Sample(0, None, step, step * every_s, 0, 0.0)], now).is_quiet:
        now += 1.25
    assert least_s <= now - last <= most_s


def test_a_long_gap_among_many_short_ones_is_learned() -> None:
    """H3: a step that takes two seconds, every fifty of 0.1 s, is seen by who looks every second."""
    judge = HangDetector(5.0, 1.25)
    judge.begin(2, 0.0)
    now = 0.0
    while now < 300.0:
        now += 1.25
        cycles, rest = divmod(now, 7.0)
        step = int(cycles) * 50 + min(49, int(rest / 0.1))
        at = cycles * 7.0 + min(4.9, int(rest / 0.1) * 0.1)
        assert not judge.look([Sample(0, None, step, at, 0, 0.0)], now).is_quiet
    assert 2.0 <= judge.learned.longest_step_s <= 3.75


@pytest.mark.parametrize(
    "sign",
    [
        Look(calls=1),
        Look(bytes=1),
        Look(disk=4096),
        Look(faults=500),
        Look(share=0.5),
        Look(runs=900.0),
        Look(share=1.0, waits=90.0),
    ],
    ids=lambda look: str({name: value for name, value in msgspec.structs.asdict(look).items() if value})[1:-1],
)
def test_any_sign_of_life_is_enough(sign: Look) -> None:
    """H3: one call, one byte, a page, a part of a processor, many wakes, a spin that waits: each is a doubt."""
    looks = [WORKING] * 50 + [*[ASLEEP] * 8, sign] * 100
    judge, worker = _judge(), FakeWorker(0, says_steps=False)
    now = 0.0
    for look in looks:
        now += 5.0
        assert not judge.look([worker.sample(look, 5.0, now)], now).is_quiet


def test_who_was_not_looking_knows_nothing() -> None:
    """H3: an agent that was stopped for an hour does not say that its workers were still for an hour."""
    judge, worker = _judge(), FakeWorker(0, says_steps=True)
    _, now = _run(judge, worker, [msgspec.structs.replace(WORKING, steps=1)] * 50, 0.0)
    now += 3600
    assert not judge.look([worker.sample(ASLEEP, 3600, now)], now).is_quiet
    assert not _run(judge, worker, [ASLEEP] * 11, now)[0]
    assert _run(judge, worker, [ASLEEP] * 3, now + 55)[0]


def test_what_we_did_to_them_is_not_their_doing() -> None:
    """H4: to write down stacks is a movement, and does not count; the next one does."""
    judge, worker = _judge(), FakeWorker(0, says_steps=False)
    is_quiet, now = _run(judge, worker, [WORKING] * 50 + [ASLEEP] * 20, 0.0)
    assert is_quiet
    judge.rebase()
    is_quiet, now = _run(judge, worker, [Look(calls=20, bytes=900)], now)
    assert is_quiet
    assert not _run(judge, worker, [Look(calls=1)], now)[0]


def test_who_cannot_be_looked_at_is_not_quiet() -> None:
    """H3: a worker of another user, a system without /proc. Its steps count all the same."""
    judge = _judge()
    for number in range(1, 1000):
        assert not judge.look([Sample(0)], number * 5.0).is_quiet
    judge = _judge()
    for number in range(1, 50):
        judge.look([Sample(0, None, number, number * 5.0)], number * 5.0)
    quiet = [judge.look([Sample(0, None, 49, 245.0)], 245.0 + number * 5.0).is_quiet for number in range(1, 20)]
    assert quiet == sorted(quiet)
    assert quiet[-1]


def test_a_system_that_tells_nothing_of_threads() -> None:
    """There only whole processors, or none, are still."""
    for used, expected in ((0.0, True), (1.0, True), (0.5, False)):
        judge, now = _judge(), 0.0
        for number in range(1, 200):
            now += 5.0
            calls, cpu_s = min(number, 50), now * used
            vitals = ProcessCounters(calls=calls, cpu_s=cpu_s, has_threads=False)
            opinion = judge.look([Sample(0, vitals)], now)
        assert opinion.is_quiet is expected
