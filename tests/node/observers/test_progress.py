"""tenax.progress: from the worker's call through the progress file to the goodput."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import runner  # noqa: F401 - a fixture
from kit.jobs import TENAX, Runner, needs_root, until
from tenax._core.agent import AgentState, Phase
from tenax._core.agent_state import LocalGeneration
from tenax._core.events import ProgressSeen
from tenax._core.messages import WorkerProgress
from tenax._core.model import AgentSettings, Assignment, WorkerPhase, WorkerRecord
from tenax._io.loop import Loop
from tenax._node.live_steps import LiveSteps
from tenax._node.worker_logs import read_progress
from tenax.progress import LAYOUT, MAGIC

IMPORT = "from tenax import progress\n"


def run_worker(folder: Path, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run this code as a worker with its error file in that folder."""
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"), **environ}
    return subprocess.run([sys.executable, "-c", IMPORT + code], env=env, capture_output=True, text=True, timeout=30)


def test_steps_and_their_times_are_recorded(tmp_path: Path) -> None:
    done = run_worker(tmp_path, "import time; a = time.monotonic()\nfor n in range(5, 9): progress.step(n)\nprint(a)")
    found = read_progress(str(tmp_path / "progress"), 3)
    assert found is not None
    assert (found.local_rank, found.first_step, found.last_step, found.phase) == (3, 5, 8, "")
    assert float(done.stdout) <= found.first_at <= found.last_at


def test_a_phase_is_shown_until_it_ends(tmp_path: Path) -> None:
    inner = f"import shutil; shutil.copy({str(tmp_path / 'progress')!r}, {str(tmp_path / 'then')!r})"
    done = run_worker(tmp_path, f"progress.step(1)\nwith progress.phase('checkpoint'):\n    {inner}\n")
    assert done.returncode == 0, done.stderr
    then, now = read_progress(str(tmp_path / "then"), 0), read_progress(str(tmp_path / "progress"), 0)
    assert then is not None
    assert now is not None
    assert (then.phase, now.phase) == ("checkpoint", "")


def test_outside_of_a_worker_nothing_is_written(tmp_path: Path) -> None:
    done = run_worker(tmp_path, "progress.step(1)\nwith progress.phase('x'): pass", TORCHELASTIC_ERROR_FILE="")
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (0, "", [])


def test_steps_of_a_forked_child_are_ignored(tmp_path: Path) -> None:
    code = "import os\nprogress.step(1)\nif os.fork() == 0:\n    progress.step(77)\n    os._exit(0)\nos.wait()"
    assert run_worker(tmp_path, code).returncode == 0
    found = read_progress(str(tmp_path / "progress"), 0)
    assert found is not None
    assert found.last_step == 1


def test_a_missing_folder_is_reported_once_and_does_not_fail_the_worker(tmp_path: Path) -> None:
    done = run_worker(tmp_path / "gone", "for n in range(9): progress.step(n)\nwith progress.phase('x'): pass")
    assert done.returncode == 0
    assert done.stderr.count("could not report the progress of this worker") == 1


@pytest.mark.parametrize("content", [b"", b"short", b"x" * LAYOUT.size, b"tenaxpr1" + b"\0" * (LAYOUT.size - 8)])
def test_invalid_and_missing_files_are_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "progress").write_bytes(content)
    assert read_progress(str(tmp_path / "progress"), 0) is None
    assert read_progress(str(tmp_path / "missing"), 0) is None


@needs_root
def test_a_full_disk_neither_fails_nor_kills_a_worker(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path)], check=True)
    try:
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "full").write_bytes(b"x" * (1 << 20))
        done = run_worker(tmp_path, "for n in range(9): progress.step(n)")
        assert (done.returncode, done.stderr.count("could not report")) == (0, 1), done.stderr
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


FALLS_BACK = """
    import sys, time, worker_kit as kit
    from tenax import progress
    first = 4 if kit.ATTEMPT else 0
    for number in range(first, first + 10):
        time.sleep(0.01)  # a step
        progress.step(number)
    sys.exit(3 if kit.ATTEMPT == 0 and kit.RANK == 1 else 0)
"""


def goodput_of(folder: Path) -> dict[str, Any]:
    """Return the goodput of the verdict in the coordinator's journal."""
    (journal,) = folder.glob("*/coordinator.jsonl")
    for line in journal.read_text().splitlines():
        for sent in json.loads(line).get("sent", []):
            if sent["event"]["event"] == "RunEnded":
                goodput: dict[str, Any] = sent["event"]["verdict"]["goodput"]
    return goodput


def test_repeated_steps_count_as_lost_time(runner: Runner) -> None:  # noqa: F811 - the fixture
    """Steps 4 to 9 run twice: the final line and the verdict show 6 lost steps."""
    done = runner.run(*("--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", "logs"), runner.script(FALLS_BACK))
    assert done.code == 0, done
    assert re.search(r", lost \d+ % \(6 steps repeated\)", done.err)
    goodput = goodput_of(runner.home / "logs")
    assert goodput["lost_steps"] == 6
    assert 0.04 < goodput["spent"]["lost_s"] < 10


SLOW_IMPORT = """
    import slow_to_import
    print("imported", flush=True)
    def train():
        import time
        time.sleep(0.3)
        import calendar
    train()
"""


@pytest.mark.parametrize("preload", ["none", "slow_to_import"])
def test_importing_counts_as_starting_warm_or_cold(runner: Runner, preload: str) -> None:  # noqa: F811 - the fixture
    """A module that takes 0.5 s, of which the interpreter sees an import before its end."""
    runner.script("import time\ntime.sleep(0.5)\nimport colorsys\n", "slow_to_import.py")
    done = runner.run("--preload", preload, "--log-dir", "logs", runner.script(SLOW_IMPORT))
    assert (done.code, done.out) == (0, "imported\n"), done
    spent = goodput_of(runner.home / "logs")["spent"]
    assert spent["starting_s"] > 0.5
    assert 0.3 <= spent["training_s"] < spent["starting_s"] + 10


@pytest.mark.parametrize("number", ["10**30", "-10**30", "10**5000", "2**53 + 1"])
def test_an_invalid_step_number_is_reported_once_and_does_not_fail_the_worker(tmp_path: Path, number: str) -> None:
    done = run_worker(tmp_path, f"for _ in range(3): progress.step({number})\nprint('alive')")
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
    assert done.stderr.count("could not report") == 1
    assert read_progress(str(tmp_path / "progress"), 0) is None


@pytest.mark.parametrize(
    "values", [(1 << 62, 2, 0.0, 1.0), (1, -(1 << 62), 0.0, 1.0), (1, 2, float("nan"), 1.0), (1, 2, 0.0, float("inf"))]
)
def test_values_out_of_bounds_are_ignored(tmp_path: Path, values: tuple[int, int, float, float]) -> None:
    """Workers may write anything there, and a peer closes the link on a frame with such a value."""
    path = tmp_path / "progress"
    path.write_bytes(LAYOUT.pack(MAGIC, *values, 1, b""))
    assert read_progress(str(path), 0) is None


def test_a_named_pipe_instead_of_the_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "progress")
    assert read_progress(str(tmp_path / "progress"), 0) is None


# --- while they run ---------------------------------------------------------------------------------------------------

REPORTS_AND_WAITS = """
    import sys, worker_kit as kit
    from tenax import progress
    progress.step(100 * kit.ATTEMPT + 7 + kit.RANK)
    kit.wait_for('go')
    sys.exit(3 if kit.ATTEMPT == 0 and kit.RANK == 1 else 0)
"""


@pytest.fixture
def sockets() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="sockets-", dir="/tmp") as folder:  # socket paths must be short
        yield folder


def test_the_status_of_a_plain_run_shows_steps(runner: Runner, sockets: str) -> None:  # noqa: F811
    """No flag is needed; after a restart the status shows the steps of the new workers."""
    script = runner.script(REPORTS_AND_WAITS)
    job = runner.start("--nproc-per-node", "2", "--max-restarts", "1", script, env={"TENAX_PRIVATE_DIR": sockets})

    def steps() -> list[int]:
        status = runner.start("status", "--json", program=TENAX, env={"TENAX_PRIVATE_DIR": sockets}).wait()
        return (
            [step for node in json.loads(status.out)["nodes"] for step in node.get("steps", ())] if status.out else []
        )

    for attempt, expected in ((0, [7, 8]), (1, [107, 108])):
        until(lambda expected=expected: steps() == expected, f"the steps {expected}")  # type: ignore[misc]
        for rank in (0, 1):
            runner.leave_note("go", rank, attempt)
    assert job.wait().code == 0


class Clock:
    """A clock that advances slightly with each reading; tests may set it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1e-5
        return self.now


class Files:
    """Progress files with given content; counts the reads."""

    def __init__(self) -> None:
        self.reads = 0
        self.reports: tuple[WorkerProgress, ...] = ()
        self.outputs: dict[int, float] = {}
        self.trouble: Exception | None = None

    def progress(self) -> tuple[WorkerProgress, ...]:
        self.reads += 1
        if self.trouble is not None:
            raise self.trouble
        return self.reports

    def output_times(self, done: Callable[[dict[int, float]], None]) -> None:
        done(self.outputs)


class Polled:
    """``LiveSteps`` on a fake clock, with its posted events."""

    def __init__(self) -> None:
        self.clock, self.files = Clock(), Files()
        self.loop = Loop(self.clock)
        self.warnings: list[str] = []
        self.steps = LiveSteps(self.loop, self.files, self.warnings.append, is_enabled=True)

    def set_phase(self, phase: Phase, generation: int = 1, pids: tuple[int, ...] = ()) -> None:
        last = LocalGeneration(Assignment(generation))
        last.workers = {rank: WorkerRecord(rank, WorkerPhase.RUNNING, pid) for rank, pid in enumerate(pids)}
        self.steps.observe(AgentState(AgentSettings("run", "default", 1, 0), phase, last))

    def advance(self, seconds: float) -> list[ProgressSeen]:
        until_then = self.clock.now + seconds
        found = []
        while self.clock.now < until_then:
            self.clock.now += 0.1
            soon = self.clock.now + 1e-4
            while (event := self.loop.next_event(lambda soon=soon: soon)) is not None:  # type: ignore[misc]
                assert isinstance(event, ProgressSeen)
                found.append(event)
        return found


@pytest.fixture
def polled() -> Iterator[Polled]:
    made = Polled()
    yield made
    made.loop.close()


def steps_in(found: list[ProgressSeen]) -> list[tuple[int, int]]:
    """Return generation and last step of each report about one worker."""
    return [(each.generation, each.workers[0].last_step) for each in found]


def test_progress_is_polled_after_one_second_and_then_every_five(polled: Polled) -> None:
    """Again in the next generation. Unchanged progress is not posted again."""
    polled.set_phase(Phase.RUNNING)
    polled.files.reports = (WorkerProgress(0, 1, 5, 1.0, 2.0),)
    assert polled.advance(0.9) == []
    assert steps_in(polled.advance(0.2)) == [(1, polled.files.reports[0].last_step)]
    polled.set_phase(Phase.RUNNING)
    assert (polled.advance(20.0), polled.files.reads) == ([], 5)
    polled.files.reports = (WorkerProgress(0, 1, 6, 1.0, 3.0),)
    assert steps_in(polled.advance(5.1)) == [(1, polled.files.reports[0].last_step)]
    polled.set_phase(Phase.RUNNING, generation=2)
    assert steps_in(polled.advance(1.1)) == [(2, polled.files.reports[0].last_step)]


def test_polling_starts_with_a_request_and_ends_a_minute_later(polled: Polled) -> None:
    """The first poll is immediate, and polling continues in the next generation."""
    polled.steps = LiveSteps(polled.loop, polled.files, polled.warnings.append)
    polled.files.reports = (WorkerProgress(0, 1, 5, 1.0, 2.0),)
    polled.set_phase(Phase.RUNNING)
    assert (polled.advance(60.0), polled.files.reads) == ([], 0)
    calls: list[int] = []
    polled.steps.report(lambda: calls.append(1))
    assert steps_in(polled.advance(0.1)) == [(1, polled.files.reports[0].last_step)]
    assert calls == [1]
    polled.files.reports = (WorkerProgress(0, 1, 6, 1.0, 3.0),)
    assert steps_in(polled.advance(5.1)) == [(1, polled.files.reports[0].last_step)]
    polled.set_phase(Phase.JOINING)
    polled.set_phase(Phase.RUNNING, generation=2)
    assert steps_in(polled.advance(1.1)) == [(2, polled.files.reports[0].last_step)]
    polled.advance(60.0)
    reads = polled.files.reads
    polled.advance(60.0)
    assert polled.files.reads == reads, "nobody looks any more"


def test_output_step_times_and_cpus_are_reported(polled: Polled) -> None:
    """Of the time since the last poll; of a worker without steps, too."""
    used_s = {101: 0.5, 102: 2.0}
    polled.steps = LiveSteps(polled.loop, polled.files, polled.warnings.append, cpu_s=used_s.get)
    polled.set_phase(Phase.RUNNING, pids=(101, 102))
    polled.advance(1.0)
    polled.files.reports, polled.files.outputs = (WorkerProgress(0, 1, 11, 0.0, 1.0),), {1: 0.9}
    polled.steps.report(lambda: None)
    (first,) = polled.advance(0.1)
    assert [(each.step_s, each.output_at, each.cpus) for each in first.workers] == [
        (0.1, 0.0, pytest.approx(0.5, 0.1)),
        (0.0, 0.9, pytest.approx(2.0, 0.1)),
    ]
    polled.files.reports = (WorkerProgress(0, 1, 13, 0.0, 2.0),)
    used_s[102] = 2.5
    (second,) = polled.advance(5.1)
    assert [each.step_s for each in second.workers] == [0.5, 0.0]
    assert [each.cpus for each in second.workers] == [0.0, pytest.approx(0.1, 0.1)]


def test_progress_is_polled_only_while_workers_run(polled: Polled) -> None:
    """No timer is left otherwise."""
    polled.set_phase(Phase.RUNNING)
    polled.set_phase(Phase.STOPPING)
    polled.advance(20.0)
    assert polled.files.reads == 0


def test_an_error_of_the_source_is_reported_once_and_ends_polling(polled: Polled) -> None:
    polled.files.trouble = RuntimeError("of another version")
    polled.set_phase(Phase.RUNNING)
    polled.advance(20.0)
    polled.set_phase(Phase.RUNNING, generation=2)
    polled.advance(20.0)
    assert polled.warnings == ["worker progress is no longer reported: RuntimeError: of another version"]
    assert polled.files.reads == 1
