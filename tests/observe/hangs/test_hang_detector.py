"""The hang detector of one node (``_core/hang.py``): hours of jobs that do not hang, and hangs of both kinds."""

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
    Thread,
)

from .workloads import ASLEEP, COMPUTING, HEARTBEAT, SPINNING, WORKING, Activity, FakeWorker, Workload

SOAK_SEEDS, SOAK_HOURS = int(os.environ.get("HANGS_SOAK_SEEDS", "5")), 12.0


def test_no_alarm_in_a_soak_of_jobs_that_do_not_hang(capsys: pytest.CaptureFixture[str]) -> None:
    """H1 to H3: starts, checkpoints, evaluations, stalls, compilers, rare lines, slow ranks, devices.

    ``HANGS_SOAK_SEEDS=60`` makes it longer.
    """
    hours = 0.0
    for seed in range(SOAK_SEEDS):
        job = Workload(seed)
        for assessment in job.live(SOAK_HOURS):
            assert not assessment.is_quiet, f"seed {seed}, after {job.now:.0f} s: {assessment}"
        hours += job.now / 3600
    with capsys.disabled():
        print(f"\nhangs: {hours:.0f} simulated hours of {SOAK_SEEDS} jobs without a false alarm")


@pytest.mark.parametrize("is_spinning", [False, True], ids=["asleep", "spinning"])
def test_every_hang_is_detected(is_spinning: bool) -> None:
    """In every job of the soak, once its rhythm is known, within the limit of that rhythm (H3)."""
    for seed in range(20):
        job = Workload(seed)
        job.is_alone &= not is_spinning  # a single worker may compute
        job.begin()
        for _ in job.train(2 * 3600):
            pass
        learned = job.detector.learned
        longest_s = max(PATIENCE * max(learned.longest_gap_s, learned.longest_step_s), 300.0)
        longest_s = max(longest_s, START_PATIENCE * learned.longest_start_s)
        took_s = job.hang(is_spinning)
        assert 280 - job.step_s <= took_s < SPIN_PATIENCE * longest_s + 30, f"seed {seed} took {took_s:.0f} s"


def test_the_length_of_a_false_alarm_is_learned() -> None:
    """H4: after activity resumes, the next hang is reported, but only after twice as long."""
    job = Workload(3)
    job.workers = [FakeWorker(0, reports_steps=False)]
    job.step_s = 1.0
    job.begin()
    for _ in job.train(3600):
        pass
    first_s = job.hang(is_spinning=False)
    assert not job.sample([WORKING]).is_quiet
    assert not job.sample([WORKING]).is_quiet
    assert 2 * first_s <= job.hang(is_spinning=False) < 2.1 * first_s


def make_detector(**options: float) -> HangDetector:
    detector = HangDetector(options.get("after_s", 60.0), 5.0)
    detector.begin(int(options.get("world", 2)), 0.0)
    return detector


def run(detector: HangDetector, worker: FakeWorker, activities: list[Activity], now: float) -> tuple[bool, float]:
    is_quiet = False
    for activity in activities:
        now += 5.0
        is_quiet = detector.look([worker.sample(activity, 5.0, now)], now).is_quiet
    return is_quiet, now


def test_a_start_is_never_a_hang() -> None:
    """H1: whatever it does, before a rhythm is known."""
    for still in (ASLEEP, SPINNING):
        detector, worker = make_detector(), FakeWorker(0, reports_steps=False)
        is_quiet, _ = run(detector, worker, [WORKING] * 5 + [still] * 5000, 0.0)
        assert not is_quiet


def test_a_phase_is_never_a_hang() -> None:
    """H2: for hours, after a rhythm of steps."""
    detector, worker = make_detector(), FakeWorker(0, reports_steps=True)
    step = msgspec.structs.replace(WORKING, steps=3)
    is_quiet, _ = run(detector, worker, [step] * 50 + [Activity(phase="evaluation")] * 5000, 0.0)
    assert not is_quiet


def test_missing_steps_count_less_during_io() -> None:
    """H2: an evaluation without a phase is called a hang six times later; a checkpoint to disk never."""
    step, reading = msgspec.structs.replace(WORKING, steps=3), WORKING
    early, late = int(60 / 5) + 2, int(DOUBT_PATIENCE * 60 / 5) + 2
    for count, expected in ((early, False), (late, True)):
        is_quiet, _ = run(make_detector(), FakeWorker(0, reports_steps=True), [step] * 50 + [reading] * count, 0.0)
        assert is_quiet is expected
    writing = Activity(calls=5, bytes=9_000_000, disk=9_000_000)
    assert not run(make_detector(), FakeWorker(0, reports_steps=True), [step] * 50 + [writing] * 5000, 0.0)[0]
    assert run(make_detector(), FakeWorker(0, reports_steps=True), [step] * 50 + [SPINNING] * early, 0.0)[0]


POLLING = Activity(runs=100.0, share=0.01)


@pytest.mark.parametrize("still", [HEARTBEAT, POLLING], ids=["a thread logs", "a thread polls"])
def test_threads_that_log_or_poll_are_not_progress(still: Activity) -> None:
    """H3: each thread is judged by itself, so many of them are not more than one."""
    early = int(60 / 5) + 2
    for count, expected in ((early - 4, False), (early, True)):
        assert (
            run(make_detector(), FakeWorker(0, reports_steps=False), [WORKING] * 50 + [still] * count, 0.0)[0]
            is expected
        )


def test_a_thread_that_logs_is_progress_if_the_main_thread_runs_too() -> None:
    """H3: the network threads of a collective send little, but they wake up the main thread."""
    exchange = Activity(logged=1, bytes=40, runs=9.0)
    assert not run(make_detector(), FakeWorker(0, reports_steps=False), [WORKING] * 50 + [exchange] * 500, 0.0)[0]


@pytest.mark.parametrize("waits", [390, 100], ids=["delayed", "preempted too"])
def test_a_delayed_thread_that_polls_is_not_progress(waits: int) -> None:
    """H3: on a busy machine it waits for a CPU after every wake-up, so it is runnable half of the time."""
    counters = [
        ProcessCounters(
            calls=min(now, 50),
            main_calls=min(now, 50),
            threads={1: Thread(now * 0.01, now * 2.5, now * 400, now * waits)},
        )
        for now in range(100)
    ]
    detector = make_detector()
    looks = [detector.look([Sample(0, each)], now * 5.0).is_quiet for now, each in enumerate(counters)]
    assert looks[-1]


def test_a_few_pages_of_a_log_file_are_not_progress() -> None:
    """H3: a line at the end of a page changes two pages, also if the kernel has just written the first one to disk."""
    early = int(60 / 5) + 2
    lines = [Activity(logged=1, bytes=12, disk=4096 * pages) for pages in (0, 1, 9)]
    assert run(make_detector(), FakeWorker(0, reports_steps=False), [WORKING] * 50 + lines * early, 0.0)[0]


@pytest.mark.parametrize("sign", [Activity(runs=300.0), Activity(faults=200)], ids=["wakes", "faults"])
def test_a_quiet_period_does_not_end_with_slight_activity(sign: Activity) -> None:
    """H4: a job that hangs is not called active because a thread wakes up more often for a while."""
    detector, worker = make_detector(), FakeWorker(0, reports_steps=False)
    is_quiet, now = run(detector, worker, [WORKING] * 50 + [ASLEEP] * 20, 0.0)
    assert is_quiet
    assert run(detector, worker, [sign, ASLEEP] * 50, now)[0]


def test_the_end_of_a_quiet_period_names_the_activity() -> None:
    """H4: with the local rank."""
    for activity, what in (
        (WORKING, "reads or writes"),
        (Activity(share=0.5, runs=90.0), "computes"),
        (Activity(scopes=1), "entered or left a watchdog scope"),
    ):
        detector, worker = make_detector(), FakeWorker(3, reports_steps=False)
        _, now = run(detector, worker, [WORKING] * 50 + [ASLEEP] * 20, 0.0)
        assessment = detector.look([worker.sample(activity, 5.0, now + 5)], now + 5)
        assert (assessment.is_quiet, assessment.active_rank, assessment.activity) == (False, 3, what)


def test_a_late_sample_does_not_end_a_quiet_period() -> None:
    """H4: an agent that was stopped for an hour does not withdraw the report of a hang."""
    detector, worker = make_detector(), FakeWorker(0, reports_steps=False)
    _, now = run(detector, worker, [WORKING] * 50 + [ASLEEP] * 20, 0.0)
    now += 3600
    assert detector.look([worker.sample(ASLEEP, 3600, now)], now).is_quiet


@pytest.mark.parametrize("reports_steps", [False, True])
def test_inside_a_scope_the_patience_is_six_times_as_long(reports_steps: bool) -> None:
    """H3: a scope has its own timeout. After it was left, the normal patience applies."""
    step, enter = msgspec.structs.replace(WORKING, steps=3), Activity(calls=1, bytes=90, scopes=1, is_in_scope=True)
    early, late = int(60 / 5) + 2, int(DOUBT_PATIENCE * 60 / 5) + 2
    for activities, expected in (([enter] + [ASLEEP] * early, False), ([enter] + [ASLEEP] * late, True)):
        is_quiet, _ = run(make_detector(), FakeWorker(0, reports_steps), [step] * 50 + activities, 0.0)
        assert is_quiet is expected
    left = msgspec.structs.replace(enter, is_in_scope=False)
    assert run(make_detector(), FakeWorker(0, reports_steps), [step] * 50 + [enter, left] + [ASLEEP] * early, 0.0)[0]


def test_a_single_worker_may_compute_forever() -> None:
    """H3: it does not wait for others. One that sleeps is still detected."""
    activities = [WORKING] * 50
    assert not run(make_detector(world=1), FakeWorker(0, reports_steps=False), [*activities, *[SPINNING] * 5000], 0.0)[
        0
    ]
    assert run(make_detector(world=1), FakeWorker(0, reports_steps=False), [*activities, *[ASLEEP] * 20], 0.0)[0]
    steps = [msgspec.structs.replace(WORKING, steps=3)] * 50
    for computing in (SPINNING, COMPUTING):
        assert not run(make_detector(world=1), FakeWorker(0, reports_steps=True), [*steps, *[computing] * 5000], 0.0)[0]
    assert run(make_detector(world=1), FakeWorker(0, reports_steps=True), [*steps, *[HEARTBEAT] * 20], 0.0)[0]


@pytest.mark.parametrize(("every_s", "min_s", "max_s"), [(0.3, 5.0, 8.0), (1.0, 10.0, 14.0), (2.0, 20.0, 25.0)])
def test_gaps_between_steps_are_learned_from_their_own_times(every_s: float, min_s: float, max_s: float) -> None:
    """H3: not from the times of samples, which are farther apart. The limit is ten times the longest gap."""
    detector = HangDetector(5.0, 1.25)
    detector.begin(2, 0.0)
    now = 0.0
    while now < 60.0:
        now += 1.25
        step = int(now / every_s)
        assert not detector.look([Sample(0, None, step, step * every_s, 0, 0.0)], now).is_quiet
    last = now
    while not detector.look([Sample(0, None, step, step * every_s, 0, 0.0)], now).is_quiet:
        now += 1.25
    assert min_s <= now - last <= max_s


def test_a_long_gap_among_many_short_ones_is_learned() -> None:
    """H3: every fiftieth step takes two seconds, the others 0.1 s; samples are 1.25 s apart."""
    detector = HangDetector(5.0, 1.25)
    detector.begin(2, 0.0)
    now = 0.0
    while now < 300.0:
        now += 1.25
        cycles, rest = divmod(now, 7.0)
        step = int(cycles) * 50 + min(49, int(rest / 0.1))
        at = cycles * 7.0 + min(4.9, int(rest / 0.1) * 0.1)
        assert not detector.look([Sample(0, None, step, at, 0, 0.0)], now).is_quiet
    assert 2.0 <= detector.learned.longest_step_s <= 3.75


@pytest.mark.parametrize(
    "sign",
    [
        Activity(calls=1),
        Activity(bytes=90_000),
        Activity(disk=90_000),
        Activity(faults=500),
        Activity(share=0.5),
        Activity(runs=900.0),
        Activity(share=1.0, waits=90.0),
    ],
    ids=lambda activity: str({name: value for name, value in msgspec.structs.asdict(activity).items() if value})[1:-1],
)
def test_any_activity_is_not_a_hang(sign: Activity) -> None:
    """H3: one call, many bytes, page faults, part of a CPU, many wakeups, spinning with waits."""
    activities = [WORKING] * 50 + [*[ASLEEP] * 8, sign] * 100
    detector, worker = make_detector(), FakeWorker(0, reports_steps=False)
    now = 0.0
    for activity in activities:
        now += 5.0
        assert not detector.look([worker.sample(activity, 5.0, now)], now).is_quiet


def test_a_gap_between_samples_does_not_count() -> None:
    """H3: an agent that was stopped for an hour does not report a hang of an hour."""
    detector, worker = make_detector(), FakeWorker(0, reports_steps=True)
    _, now = run(detector, worker, [msgspec.structs.replace(WORKING, steps=1)] * 50, 0.0)
    now += 3600
    assert not detector.look([worker.sample(ASLEEP, 3600, now)], now).is_quiet
    assert not run(detector, worker, [ASLEEP] * 11, now)[0]
    assert run(detector, worker, [ASLEEP] * 3, now + 55)[0]


def test_activity_caused_by_a_stack_dump_does_not_count() -> None:
    """H4: the next activity does."""
    detector, worker = make_detector(), FakeWorker(0, reports_steps=False)
    is_quiet, now = run(detector, worker, [WORKING] * 50 + [ASLEEP] * 20, 0.0)
    assert is_quiet
    detector.rebase()
    is_quiet, now = run(detector, worker, [Activity(calls=20, bytes=900)], now)
    assert is_quiet
    assert not run(detector, worker, [Activity(calls=1)], now)[0]


def test_a_worker_without_counters_is_not_quiet() -> None:
    """H3: a worker of another user, a system without /proc. Its steps still count."""
    detector = make_detector()
    for number in range(1, 1000):
        assert not detector.look([Sample(0)], number * 5.0).is_quiet
    detector = make_detector()
    for number in range(1, 50):
        detector.look([Sample(0, None, number, number * 5.0)], number * 5.0)
    quiet = [detector.look([Sample(0, None, 49, 245.0)], 245.0 + number * 5.0).is_quiet for number in range(1, 20)]
    assert quiet == sorted(quiet)
    assert quiet[-1]


def test_without_thread_statistics_only_idle_or_full_cpus_are_quiet() -> None:
    """Part of a CPU is activity."""
    for used, expected in ((0.0, True), (1.0, True), (0.5, False)):
        detector, now = make_detector(), 0.0
        for number in range(1, 200):
            now += 5.0
            calls, cpu_s = min(number, 50), now * used
            counters = ProcessCounters(calls=calls, cpu_s=cpu_s, has_threads=False)
            assessment = detector.look([Sample(0, counters)], now)
        assert assessment.is_quiet is expected
