"""The journal: every step in order, bounded, never fails a run; read back, or rejected with a message."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit.processes import leaving_nothing
from tenax._core import commands, events, messages
from tenax._core.messages import WorkerProgress
from tenax._core.model import AgentSettings, Assignment, Evidence, Failure, Outcome, Stopped, Verdict
from tenax._node.journal import Footer, Header, Journal, JournalUnreadable, Step, read_journal

SETTINGS = AgentSettings(run_id="run", role="trainer", local_world_size=2, max_restarts=1)
ASSIGNMENT = Assignment(1, world_size=2)
FAILURE = Failure(1, 0, 8, 4711, 3, 12.5, evidence=Evidence(message="ValueError: boom", raised_at=12.25), host="b")
READY = commands.SendMessage(messages.NodeReady(1))


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    with leaving_nothing():
        yield str(tmp_path / "journal.jsonl")


def opened(path: str, limit_bytes: int = 1 << 20, complain: Callable[[str], None] = lambda _: None) -> Journal:
    journal = Journal(path, limit_bytes, complain)
    journal.begin(SETTINGS, "train.py", 10.0)
    return journal


def note(journal: Journal, text: str, at: float = 11.0) -> None:
    journal.step(at, events.JoinRefused(text), [])


def written(journal: Journal, steps: list[Step]) -> None:
    for step in steps:
        journal.step(step.at, step.event, list(step.commands))


def notes(steps: list[Step]) -> list[str]:
    return [step.event.reason for step in steps if isinstance(step.event, events.JoinRefused)]


def test_what_was_written_is_read_back(path: str) -> None:
    """Header, steps with their commands, and footer: equal values, in order."""
    journal = opened(path)
    steps = [
        Step(10.5, events.RunRequested(), [commands.SendMessage(messages.NodeReady(0))]),
        Step(11.0, events.GenerationFormed(ASSIGNMENT), [commands.StartWorkers(ASSIGNMENT)]),
        Step(12.0, events.FailureExamined(1, 0, Evidence(message="ValueError: ü\n\0", last_lines=("a", "b")))),
        Step(13.0, events.NodeCleared(1), [commands.SendMessage(messages.NodeStopped(1, 13.0, (FAILURE,))), READY]),
    ]
    written(journal, steps)
    journal.close(14.0)
    header, read, footer = read_journal(path)
    assert (header.format, header.settings, header.entrypoint, header.at) == (3, SETTINGS, "train.py", 10)
    assert header.host == os.uname().nodename
    assert read == steps
    assert footer == Footer(14.0)


def test_every_kind_of_event_is_read_back(path: str) -> None:
    """Ended generations, notices, verdicts, fences."""
    journal = opened(path)
    verdict = Verdict(
        Outcome.FAILED,
        "no luck",
        failures=(FAILURE,),
        stopped=(Stopped(1, 9, 77, -15),),
        restarts_used=2,
        generation=5,
        earlier=(FAILURE,),
        membership_changes=1,
        drains=3,
    )
    steps = [
        Step(11.0, events.Waiting("1 of 2 nodes ready")),
        Step(
            12.0,
            events.LeaveNoticed(5, "b", "maintenance", 30.0),
            [commands.ForwardNotice(5, "b", "maintenance", 30.0)],
        ),
        Step(12.1, events.NoticeReceived("spot", None), [commands.SendMessage(messages.NodeWillLeave(5, "spot"))]),
        Step(12.2, events.SignalReceived(15), [commands.SendMessage(messages.NodeDraining(5, 30.0, "asked"))]),
        Step(12.3, events.WorkerExited(5, 0, 3), [commands.SendMessage(messages.FailureSeen(5, FAILURE, 12.3))]),
        Step(
            13.0, events.GenerationEnded(5, "rank 9 on b failed"), [commands.SignalWorkers(5, 15, "rank 9 on b failed")]
        ),
        Step(14.0, events.Fenced(5, "cut off"), [commands.KillNode(5, "cut off")]),
        Step(
            15.0,
            events.NodeCleared(5),
            [commands.SendMessage(messages.NodeSucceeded(5)), commands.SendMessage(messages.NodeLeft("done"))],
        ),
        Step(16.0, events.RunEnded(verdict, 900.0), [commands.Finish(verdict)]),
    ]
    written(journal, steps)
    journal.close(17.0)
    _, read, footer = read_journal(path)
    assert (read, footer) == (steps, Footer(17.0))


def test_the_journal_of_a_killed_agent_has_no_footer(path: str) -> None:
    """Its steps are read, and the footer is None."""
    journal = opened(path)
    note(journal, "one")
    header, steps, footer = read_journal(path)
    assert isinstance(header, Header)
    assert notes(steps) == ["one"]
    assert footer is None
    journal.close(20.0)


def test_its_size_is_bounded(path: str) -> None:
    """Past the limit only the footer is written, with the number of missing steps."""
    warnings: list[str] = []
    journal = opened(path, limit_bytes=2000, complain=warnings.append)
    for number in range(100):
        note(journal, "long" * 20 if number % 2 else str(number))
    journal.close(20.0)
    assert os.path.getsize(path) <= 2000 + 1024
    _, steps, footer = read_journal(path)
    assert notes(steps) == ["long" * 20 if number % 2 else str(number) for number in range(len(steps))]
    assert footer is not None
    assert footer.steps_not_written == 100 - len(steps) > 0
    assert warnings == [f"the journal {path} ends here: it has reached its size limit; the job is not affected"]


def test_only_the_latest_progress_is_written_before_the_next_step(path: str) -> None:
    """Each progress event replaces the one before, so a month of progress is one line."""
    journal = opened(path)
    note(journal, "one")
    before = os.path.getsize(path)
    for number in range(1000):
        progress = (WorkerProgress(0, 0, number, 11.0, 11.0 + number),)
        journal.step(
            12.0 + number,
            events.ProgressSeen(1, progress),
            [commands.SendMessage(messages.NodeProgress(1, 12.0, progress))],
        )
    assert os.path.getsize(path) == before
    note(journal, "two", at=2000.0)
    journal.close(2001.0)
    _, steps, footer = read_journal(path)
    assert footer == Footer(2001.0)
    assert [(step.at, type(step.event)) for step in steps] == [
        *[(11.0, events.JoinRefused), (1011.0, events.ProgressSeen), (2000.0, events.JoinRefused)]
    ]
    assert steps[1].event.workers[0].last_step == 999
    assert steps[1].commands == [commands.SendMessage(messages.NodeProgress(1, 12.0, steps[1].event.workers))]


def test_a_journal_without_room_for_its_header_is_rejected_when_read(path: str) -> None:
    journal = opened(path, limit_bytes=10)
    note(journal, "one")
    journal.close(20.0)
    with pytest.raises(JournalUnreadable, match="does not begin with a header"):
        read_journal(path)


def test_a_full_disk_costs_only_steps(path: str) -> None:
    """A failed write leaves no partial line; the footer counts the lost steps once there is room again."""
    warnings: list[str] = []
    journal = opened(path, complain=warnings.append)
    note(journal, "kept")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python has it at its start
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path) + 20, before[1]))
    try:
        note(journal, "lost" * 20)
        note(journal, "")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    note(journal, "after a hole")
    journal.close(20.0)
    _, steps, footer = read_journal(path)
    assert notes(steps) == ["kept"]
    assert footer == Footer(20.0, steps_not_written=3)
    assert warnings == [f"the journal {path} ends here: the disk is full; the job is not affected"], "once"


def test_an_unwritable_path_costs_only_the_journal(tmp_path: Path) -> None:
    """The run continues without a journal, and the path is empty."""
    with leaving_nothing():
        warnings: list[str] = []
        journal = opened(str(tmp_path / "missing" / "journal.jsonl"), complain=warnings.append)
        note(journal, "one")
        journal.close(20.0)
        assert journal.path == ""
        (sentence,) = warnings
        assert sentence.startswith("could not open the journal: No such file or directory")
        nowhere = Journal()
        note(nowhere, "one")
        nowhere.close(20.0)


def test_text_that_is_not_unicode_is_written_escaped(path: str) -> None:
    """File names and error files may contain surrogates, which JSON cannot encode."""
    journal = Journal(path)
    odd = AgentSettings(run_id="r\udcff", role="trainer", local_world_size=1, max_restarts=0)
    journal.begin(odd, "train\udcff.py", 10.0)
    note(journal, "\ud800 boom")
    journal.step(12.0, events.FailureExamined(1, 0, Evidence(last_lines=("\udc80",))), [commands.KillNode(1, "\udc80")])
    journal.close(20.0)
    header, steps, footer = read_journal(path)
    assert header.entrypoint == "train\\udcff.py"
    assert header.settings.run_id == "r\\udcff"
    assert notes(steps) == ["\\ud800 boom"]
    assert footer == Footer(20.0)


def test_a_torn_last_line_is_ignored(path: str) -> None:
    """The agent was killed while writing; the lines before are valid."""
    journal = opened(path)
    note(journal, "one")
    note(journal, "two")
    journal.close(20.0)
    data = Path(path).read_bytes()
    header, one, _, _ = data.splitlines(keepends=True)
    for end in range(len(header) + len(one), len(data)):
        Path(path).write_bytes(data[:end])
        _, steps, footer = read_journal(path)
        assert notes(steps) in (["one"], ["one", "two"])
        assert footer is None


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty; expected the journal.jsonl of a run"),
        (b"\n", "line 1 of .* is not a line of a tenax journal"),
        (b"just some text\n", "line 1 of .* is not a line of a tenax journal"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "line 1 of .* is not a line of a tenax journal"),
        (b"no newline at all", "does not begin with a header"),
        (b'{"line": "header"}\n', "line 1 of .* is not a line of a tenax journal"),
        (b'{"line":"end","at":1}\n', "does not begin with a header"),
        (b'{"line":"step","at":1,"event":{"event":"RunRequested"}}\n', "does not begin with a header"),
        (b"[1, 2]\n", "line 1 of .* is not a line"),
    ],
)
def test_a_foreign_file_is_rejected_with_a_message(path: str, content: bytes, sentence: str) -> None:
    """The message names the file and the line."""
    Path(path).write_bytes(content)
    with pytest.raises(JournalUnreadable, match=sentence):
        read_journal(path)


def test_a_damaged_line_is_named(path: str) -> None:
    """The message has the line number and the error."""
    journal = opened(path)
    note(journal, "one")
    journal.close(20.0)
    lines = Path(path).read_bytes().split(b"\n")
    Path(path).write_bytes(b"\n".join([lines[0], lines[1].replace(b"JoinRefused", b"JoinRefsued"), *lines[2:]]))
    with pytest.raises(JournalUnreadable, match=r"line 2 of .*JoinRefsued"):
        read_journal(path)


def test_two_runs_in_one_file_are_rejected(path: str) -> None:
    """A second header begins another run."""
    for _ in range(2):
        opened(path).close(20.0)
    with pytest.raises(JournalUnreadable, match=r"line 3 of .* begins another run"):
        read_journal(path)


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_an_unreadable_file_is_reported_with_the_reason(tmp_path: Path, name: str) -> None:
    """The system's reason is in the message."""
    with pytest.raises(JournalUnreadable, match=r"cannot be read: (No such file|Is a directory)"):
        read_journal(str(tmp_path / name))


def test_a_newer_format_is_distinguished_from_damage(path: str) -> None:
    """The message names the version of tenax that reads it."""
    newer = b'{"line":"header","format":9,"tenax":"9.1","settings":{"something":"new"}}\n{"line":"surprise"}\n'
    Path(path).write_bytes(newer)
    with pytest.raises(JournalUnreadable, match=r"has format 9, this tenax reads format 3; use tenax 9\.1"):
        read_journal(path)


def test_an_older_format_is_rejected_with_a_message(path: str) -> None:
    """Format 1 knew a policy and its decisions: another agent's journal."""
    older = (
        b'{"line":"header","format":2,"tenax":"0.1.0","settings":{"run_id":"run","role":"r","local_world_size":1,'
        b'"max_restarts":0},"entrypoint":"t","host":"h","policy":"BudgetPolicy","wall_time":1.0,"at":1.0}\n'
        b'{"line":"step","at":1.0,"event":{"event":"RunRequested"},"commands":[{"command":"Join","generation":1}]}\n'
    )
    Path(path).write_bytes(older)
    with pytest.raises(JournalUnreadable, match=r"has format 2, this tenax reads format 3; use tenax 0\.1\.0"):
        read_journal(path)
