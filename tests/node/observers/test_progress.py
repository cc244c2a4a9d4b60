"""tenax.progress: what a script says of its steps, from the worker's call to the ledger."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import bench  # noqa: F401 - a fixture
from kit.jobs import TENAX, Bench, needs_root, until
from tenax._core.agent import AgentState, Phase
from tenax._core.events import ProgressSeen
from tenax._core.messages import WorkerProgress
from tenax._core.model import AgentSettings
from tenax._io.loop import Loop
from tenax._node.live_steps import LiveSteps
from tenax._node.progress_file import read_progress
from tenax.progress import LAYOUT, MAGIC

SAYS = "from tenax import progress\n"


def said(folder: Path, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run this in a process that has its error file in that folder."""
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"), **environ}
    return subprocess.run([sys.executable, "-c", SAYS + code], env=env, capture_output=True, text=True, timeout=30)


def test_steps_and_times(tmp_path: Path) -> None:
    done = said(tmp_path, "import time; a = time.monotonic()\nfor n in range(5, 9): progress.step(n)\nprint(a)")
    found = read_progress(str(tmp_path / "progress"), 3)
    assert found is not None
    assert (found.local_rank, found.first_step, found.last_step, found.phase) == (3, 5, 8, "")
    assert float(done.stdout) <= found.first_at <= found.last_at


def test_a_phase_is_shown_until_it_ends(tmp_path: Path) -> None:
    inner = f"import shutil; shutil.copy({str(tmp_path / 'progress')!r}, {str(tmp_path / 'then')!r})"
    done = said(tmp_path, f"progress.step(1)\nwith progress.phase('checkpoint'):\n    {inner}\n")
    assert done.returncode == 0, done.stderr
    then, now = read_progress(str(tmp_path / "then"), 0), read_progress(str(tmp_path / "progress"), 0)
    assert then is not None
    assert now is not None
    assert (then.phase, now.phase) == ("checkpoint", "")


def test_outside_of_tenax_it_does_nothing(tmp_path: Path) -> None:
    done = said(tmp_path, "progress.step(1)\nwith progress.phase('x'): pass", TORCHELASTIC_ERROR_FILE="")
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (0, "", [])


def test_a_child_of_the_worker_is_not_the_worker(tmp_path: Path) -> None:
    code = "import os\nprogress.step(1)\nif os.fork() == 0:\n    progress.step(77)\n    os._exit(0)\nos.wait()"
    assert said(tmp_path, code).returncode == 0
    found = read_progress(str(tmp_path / "progress"), 0)
    assert found is not None
    assert found.last_step == 1


def test_a_folder_that_is_gone_costs_the_progress_and_is_said_once(tmp_path: Path) -> None:
    done = said(tmp_path / "gone", "for n in range(9): progress.step(n)\nwith progress.phase('x'): pass")
    assert done.returncode == 0
    assert done.stderr.count("the progress of this worker cannot be told") == 1


@pytest.mark.parametrize("content", [b"", b"short", b"x" * LAYOUT.size, b"tenaxpr1" + b"\0" * (LAYOUT.size - 8)])
def test_what_is_not_ours_is_not_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "progress").write_bytes(content)
    assert read_progress(str(tmp_path / "progress"), 0) is None
    assert read_progress(str(tmp_path / "missing"), 0) is None


@needs_root
def test_a_full_disk_neither_fails_nor_kills_a_worker(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path)], check=True)
    try:
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "full").write_bytes(b"x" * (1 << 20))
        done = said(tmp_path, "for n in range(9): progress.step(n)")
        assert (done.returncode, done.stderr.count("cannot be told")) == (0, 1), done.stderr
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


def ledger_of(folder: Path) -> dict[str, Any]:
    """From the last line that the coordinator's journal has of the verdict."""
    (journal,) = folder.glob("*/coordinator.jsonl")
    for line in journal.read_text().splitlines():
        for say in json.loads(line).get("says", []):
            if say["event"]["event"] == "RunEnded":
                goodput: dict[str, Any] = say["event"]["verdict"]["goodput"]
    return goodput


def test_steps_that_are_done_again_are_lost_time(bench: Bench) -> None:  # noqa: F811 - the fixture
    """Steps 4 to 9 are done twice. That is told when the run ends, and is in the coordinator's verdict."""
    done = bench.run(*("--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", "logs"), bench.script(FALLS_BACK))
    assert done.code == 0, done
    assert re.search(r", lost \d+ % \(6 steps done again\)", done.err)
    goodput = ledger_of(bench.home / "logs")
    assert goodput["lost_steps"] == 6
    assert 0.04 < goodput["spent"]["lost_s"] < 10


@pytest.mark.parametrize("number", ["10**30", "-10**30", "10**5000", "2**53 + 1"])
def test_a_number_that_is_no_step_costs_the_progress_and_not_the_worker(tmp_path: Path, number: str) -> None:
    done = said(tmp_path, f"for _ in range(3): progress.step({number})\nprint('alive')")
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
    assert done.stderr.count("cannot be told") == 1
    assert read_progress(str(tmp_path / "progress"), 0) is None


@pytest.mark.parametrize(
    "said", [(1 << 62, 2, 0.0, 1.0), (1, -(1 << 62), 0.0, 1.0), (1, 2, float("nan"), 1.0), (1, 2, 0.0, float("inf"))]
)
def test_what_could_not_travel_is_not_read(tmp_path: Path, said: tuple[int, int, float, float]) -> None:
    """The file is the worker's, who may write anything; a frame with such a number would cost this node its link."""
    path = tmp_path / "progress"
    path.write_bytes(LAYOUT.pack(MAGIC, *said, 1, b""))
    assert read_progress(str(path), 0) is None


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "progress")
    assert read_progress(str(tmp_path / "progress"), 0) is None


# --- while they run ---------------------------------------------------------------------------------------------------

SAYS_AND_WAITS = """
    import sys, worker_kit as kit
    from tenax import progress
    progress.step(100 * kit.ATTEMPT + 7 + kit.RANK)
    kit.wait_for('go')
    sys.exit(3 if kit.ATTEMPT == 0 and kit.RANK == 1 else 0)
"""


@pytest.fixture
def doors() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="doors-", dir="/tmp") as folder:  # the name of a socket is short
        yield folder


def test_the_steps_of_a_plain_run_are_shown_while_it_runs(bench: Bench, doors: str) -> None:  # noqa: F811
    """Without any option: what workers have said is in the status, and after a restart what the new ones say."""
    script = bench.script(SAYS_AND_WAITS)
    job = bench.start("--nproc-per-node", "2", "--max-restarts", "1", script, env={"TENAX_PRIVATE_DIR": doors})

    def steps() -> list[int]:
        told = bench.start("status", "--json", program=TENAX, env={"TENAX_PRIVATE_DIR": doors}).wait()
        return [step for node in json.loads(told.out)["nodes"] for step in node.get("steps", ())] if told.out else []

    for attempt, said in ((0, [7, 8]), (1, [107, 108])):
        until(lambda said=said: steps() == said, f"the steps {said}")  # type: ignore[misc]
        for rank in (0, 1):
            bench.tell("go", rank, attempt)
    assert job.wait().code == 0


class Clock:
    """Goes on a little whenever it is looked at, and as far as it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1e-5
        return self.now


class Files:
    """What workers have written, and how often somebody has looked."""

    def __init__(self) -> None:
        self.looks = 0
        self.said: tuple[WorkerProgress, ...] = ()
        self.trouble: Exception | None = None

    def progress(self) -> tuple[WorkerProgress, ...]:
        self.looks += 1
        if self.trouble is not None:
            raise self.trouble
        return self.said


class Watched:
    """A node whose generation is ``running``, and what is posted of it."""

    def __init__(self) -> None:
        self.clock, self.files = Clock(), Files()
        self.loop = Loop(self.clock)
        self.complaints: list[str] = []
        self.steps = LiveSteps(self.loop, self.files, self.complaints.append, is_enabled=True)

    def is_in(self, phase: Phase, generation: int = 1) -> None:
        self.steps.observe(AgentState(AgentSettings("run", "default", 1, 0), phase, generation=generation))

    def pass_by(self, seconds: float) -> list[ProgressSeen]:
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
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.loop.close()


def test_files_are_looked_at_after_a_second_and_then_every_five(watched: Watched) -> None:
    """Also of the next generation. What has not changed is not told again."""
    watched.is_in(Phase.RUNNING)
    watched.files.said = (WorkerProgress(0, 1, 5, 1.0, 2.0),)
    assert watched.pass_by(0.9) == []
    assert watched.pass_by(0.2) == [ProgressSeen(1, watched.files.said)]
    watched.is_in(Phase.RUNNING)
    assert (watched.pass_by(20.0), watched.files.looks) == ([], 5)
    watched.files.said = (WorkerProgress(0, 1, 6, 1.0, 3.0),)
    assert watched.pass_by(5.1) == [ProgressSeen(1, watched.files.said)]
    watched.is_in(Phase.RUNNING, generation=2)
    assert watched.pass_by(1.1) == [ProgressSeen(2, watched.files.said)]


def test_nobody_is_looked_at_until_somebody_asks(watched: Watched) -> None:
    """Then at once, and from then on; also in the next generation."""
    watched.steps = LiveSteps(watched.loop, watched.files, watched.complaints.append)
    watched.files.said = (WorkerProgress(0, 1, 5, 1.0, 2.0),)
    watched.is_in(Phase.RUNNING)
    assert (watched.pass_by(60.0), watched.files.looks) == ([], 0)
    assert watched.steps.enable()
    assert watched.pass_by(0.1) == [ProgressSeen(1, watched.files.said)]
    assert not watched.steps.enable(), "it is known already"
    watched.files.said = (WorkerProgress(0, 1, 6, 1.0, 3.0),)
    assert watched.pass_by(5.1) == [ProgressSeen(1, watched.files.said)]
    watched.is_in(Phase.JOINING)
    watched.is_in(Phase.RUNNING, generation=2)
    assert watched.pass_by(1.1) == [ProgressSeen(2, watched.files.said)]


def test_nobody_is_looked_at_unless_workers_run(watched: Watched) -> None:
    """And nothing is left that a loop would wake up for."""
    watched.is_in(Phase.RUNNING)
    watched.is_in(Phase.STOPPING)
    watched.pass_by(20.0)
    assert watched.files.looks == 0


def test_files_that_cannot_be_read_are_complained_of_once(watched: Watched) -> None:
    """The run goes on without."""
    watched.files.trouble = RuntimeError("of another version")
    watched.is_in(Phase.RUNNING)
    watched.pass_by(20.0)
    watched.is_in(Phase.RUNNING, generation=2)
    watched.pass_by(20.0)
    assert watched.complaints == ["worker progress is no longer reported: RuntimeError: of another version"]
    assert watched.files.looks == 1
