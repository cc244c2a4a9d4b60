"""Worker logs: streams of each generation, evidence of failures and the agent's lines, with a real log writer."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes import gone, leaving_nothing, on_linux, until
from tenax._core import commands, events
from tenax._core.model import Evidence
from tenax._io.loop import Loop
from tenax._logs.specs import DefaultLogsSpecs, LogsSpecs, Std
from tenax._node.worker_logs import WorkerLogs

pytestmark = [on_linux, pytest.mark.process]


class Runner:
    """Logs on a real loop; workers are only their streams."""

    def __init__(self, specs: LogsSpecs) -> None:
        self.loop = Loop()
        self.logs = WorkerLogs(specs, role="trainer")
        self.logs.open()
        self.loop.watch(self.logs)
        self.generation = 0

    def prepare(self, workers: int = 1) -> list[tuple[int, int]]:
        """Return the streams of the next generation's workers."""
        self.generation += 1
        count = str(self.generation - 1)
        envs = {rank: {"TORCHELASTIC_RESTART_COUNT": count, "RANK": str(rank)} for rank in range(workers)}
        outputs = self.logs.prepare(self.generation, envs)
        return [(outputs[rank].stdout, outputs[rank].stderr) for rank in range(workers)]

    def examine(self, exit_code: int = 1, rank: int = 0, **fields: object) -> Evidence:
        now = self.loop.now()
        times = {"started_at": now - 1, "ended_at": now}
        given = {**times, **fields}
        command = commands.ExamineFailure(self.generation, rank, os.getpid(), exit_code, **given)  # type: ignore[arg-type]
        answers: list[Evidence] = []

        def done(evidence: Evidence) -> None:
            answers.append(evidence)
            self.loop.post(events.Tick())

        self.logs.examine(command, done)
        deadline = time.monotonic() + 20
        while not answers:
            assert self.loop.next_event(lambda: deadline) is not None, "no evidence came"
        return answers[0]

    def close(self, final_text: str = "") -> None:
        self.logs.close(final_text)
        self.loop.close()


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    with leaving_nothing():
        made = Runner(DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ALL))
        yield made
        made.close()


def write(stream: int, text: str) -> None:
    os.write(stream, text.encode())
    os.close(stream)


TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 7, in <module>
    main()
ValueError: boom
"""


def test_the_last_lines_are_evidence(runner: Runner) -> None:
    """The end of stderr, with its exception and the path of the complete file."""
    ((out, err),) = runner.prepare()
    os.close(out)
    write(err, "loading\n" + TRACEBACK)
    evidence = runner.examine()
    assert (evidence.error_type, evidence.message) == ("ValueError", "ValueError: boom")
    assert evidence.last_lines[-1] == "ValueError: boom"
    assert evidence.log_file == runner.logs.destination.stderrs[0]


def test_an_error_file_is_better_evidence(runner: Runner) -> None:
    """It is preferred to the output."""
    ((out, err),) = runner.prepare()
    os.close(out)
    write(err, "something else\n")
    assert not runner.logs.has_error_file(0)
    path = Path(runner.logs.destination.error_files[0])
    message = {"message": "KeyError: 'x'", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "12"}}
    path.write_text(json.dumps({"message": message}))
    assert runner.logs.has_error_file(0)
    evidence = runner.examine()
    assert (evidence.message, evidence.error_file) == ("KeyError: 'x'", str(path))


def test_a_stopped_worker_without_an_error_file_is_not_examined(runner: Runner) -> None:
    """The evidence is empty and available at once."""
    ((out, err),) = runner.prepare()
    write(out, "")
    write(err, "KeyboardInterrupt\n")
    assert runner.examine(was_stopped=True) == Evidence()


def test_a_stopped_worker_shows_the_stacks_that_it_wrote(runner: Runner) -> None:
    """Another worker may have waited for this one. Stacks of an earlier worker are ignored."""
    for out, err in runner.prepare():
        write(out, "")
        write(err, "")
    path = Path(runner.logs.destination.error_files[0]).parent / "stacks.txt"
    path.write_text("Current thread 0x1 (most recent call first):\n")
    shown = runner.examine(-15, was_stopped=True)
    assert shown == Evidence(stacks="Current thread 0x1 (most recent call first):")
    os.utime(path, (1.0, 1.0))
    assert runner.examine(-15, was_stopped=True) == Evidence()


def test_evidence_arrives_although_the_log_writer_died(runner: Runner) -> None:
    """A killed log writer is restarted with the same pipes and watched by the loop."""
    ((out, err),) = runner.prepare()
    os.close(out)
    writer = runner.logs._writer
    assert runner.examine().last_lines == ()
    first = writer.pid
    os.kill(first, signal.SIGKILL)
    assert gone([first])
    os.write(err, TRACEBACK.encode())
    assert runner.examine().message == "ValueError: boom"
    assert writer.pid != first
    write(err, "and on\n")
    assert runner.examine().last_lines[-1] == "and on"


def test_each_generation_has_its_own_files(runner: Runner) -> None:
    """The files of earlier generations are kept."""
    for text in ("first\n", "second\n"):
        for out, err in runner.prepare(workers=2):
            write(out, text)
            os.close(err)
        runner.examine()  # all that was written has been taken
    second = Path(runner.logs.destination.stdouts[1])
    assert second.parent.parent.name == "attempt_1"
    first = second.parent.parent.parent / "attempt_0" / "1" / "stdout.log"
    until(lambda: first.exists() and first.read_text() == "first\n", "the first one's file")
    until(lambda: second.exists() and second.read_text() == "second\n", "the second one's file")


def test_an_unwritable_disk_costs_only_the_log_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run continues, the output is shown on the console, and the reason is printed."""
    specs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=Std.ALL)
    (tmp_path / "logs").write_text("in the way")
    with leaving_nothing():
        runner = Runner(specs)
        ((out, err),) = runner.prepare()
        write(out, "to the console\n")
        write(err, "")
        runner.close("the last words")
    shown = capfd.readouterr()
    assert shown.out == "to the console\n"
    assert "tenax: could not create log files:" in shown.err
    assert shown.err.endswith("the last words\n")


def test_without_messages_only_the_workers_lines_are_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run started from Python prints no messages of the agent."""
    logs = WorkerLogs(DefaultLogsSpecs(log_dir=str(tmp_path)), role="trainer", show_messages=False)
    with leaving_nothing():
        logs.open()
        outputs = logs.prepare(1, {0: {}})
        logs.print_line("tenax: a line of the story")
        write(outputs[0].stdout, "a worker's line\n")
        write(outputs[0].stderr, "")
        logs.close()
    assert capfd.readouterr() == ("a worker's line\n", "")
