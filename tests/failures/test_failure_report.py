"""The report: the cause comes first, stopped workers are not failures, and the text is safe to print."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenax._core.ledger import Goodput, Spent
from tenax._core.model import Evidence, Failure, Outcome, Stopped, Verdict
from tenax._failures.report import Report, WallClock, headline, render, summary, to_dict, to_json

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\nRuntimeError: boom'


def failure(rank: int = 3, exit_code: int = 1, seen_at: float = 10.0, reason: str = "", **evidence: object) -> Failure:
    return Failure(2, rank % 4, rank, 4700 + rank, exit_code, seen_at, reason, Evidence(**evidence))


BOOM = failure(
    error_type="RuntimeError",
    message="RuntimeError: boom",
    traceback=TRACEBACK,
    log_file="/logs/run_x/attempt_2/3/stderr.log",
    error_file="/logs/run_x/attempt_2/3/error.json",
)


def report(verdict: Verdict, **fields: object) -> Report:
    defaults = {
        "entrypoint": "train.py",
        "host": "gpu-07",
        "run_id": "run",
        "role": "default",
        "max_restarts": 3,
        "log_dir": "/logs/run_x",
        "journal": "/logs/run_x/journal.jsonl",
    }
    return Report(verdict=verdict, **{**defaults, **fields})


def failed(*failures: Failure, **fields: object) -> Verdict:
    return Verdict(
        Outcome.FAILED, "all 3 restarts are used", failures=failures, **{"restarts_used": 3, "generation": 4, **fields}
    )


def test_the_whole_report() -> None:
    """First cause, other failures in short, stopped workers, outcome, where to look."""
    others = (
        failure(1, -11, 10.25),
        failure(0, 1, 10.5, error_type="ConnectionError", message="ConnectionError: peer gone"),
        failure(2, 1, 10.6, error_type="ConnectionError", message="ConnectionError: peer gone"),
    )
    stopped = tuple(Stopped(rank, rank, 4800 + rank, -15) for rank in (4, 5, 6, 7, 9))
    text = render(report(failed(BOOM, *others, stopped=stopped, earlier=(BOOM, failure(0, 2)), restarts_used=2)))
    assert (
        text
        == """\
================================================================================
train.py failed: rank 3 on gpu-07 raised RuntimeError: boom
--------------------------------------------------------------------------------
First cause
  cause      The script raised an uncaught exception: RuntimeError.
  next       Read the traceback below, last line first.
  rank       3 (local rank 3) on gpu-07, pid 4703
  ended      exited with code 1
  error      RuntimeError: boom
  stderr log /logs/run_x/attempt_2/3/stderr.log
  error file /logs/run_x/attempt_2/3/error.json

  Traceback (most recent call last):
    File "train.py", line 7, in <module>
  RuntimeError: boom

Also failed
  rank 1, 250 ms later: was killed by SIGSEGV (invalid memory access)
  ranks 0, 2, 500 ms later: raised ConnectionError: peer gone

Stopped by tenax, not failed: ranks 4-7, 9

Outcome
  Gave up after 2 of 3 restarts: all 3 restarts are used.
  Earlier failures, each followed by a restart:
    rank 3 (local rank 3, pid 4703) raised RuntimeError: boom
    rank 0 (local rank 0, pid 4700) exited with code 2

  run        run, role default
  logs       /logs/run_x
  journal    /logs/run_x/journal.jsonl
  replay     tenax replay /logs/run_x/journal.jsonl
================================================================================
"""
    )


@pytest.mark.parametrize(
    ("cause", "first_line"),
    [
        (BOOM, "train.py failed: rank 3 on gpu-07 raised RuntimeError: boom"),
        (failure(exit_code=7), "train.py failed: rank 3 on gpu-07 exited with code 7"),
        (
            failure(exit_code=7, error_type="X", message="X: y"),
            "train.py failed: rank 3 on gpu-07 exited with code 7: X: y",
        ),
        (failure(exit_code=-9), "train.py failed: rank 3 on gpu-07 was killed by SIGKILL"),
        (
            failure(exit_code=-9, out_of_memory="killed by the kernel: out of memory (cgroup /x, oom_kill 0 → 1)"),
            "train.py failed: rank 3 on gpu-07 was killed by the kernel: out of memory (cgroup /x, oom_kill 0 → 1)",
        ),
        (
            failure(exit_code=-11, error_type="Fatal Python error", message="Fatal Python error: Segmentation fault"),
            "train.py failed: rank 3 on gpu-07 was killed by SIGSEGV (invalid memory access):"
            " Fatal Python error: Segmentation fault",
        ),
        (
            failure(exit_code=127, reason="could not be started: no such file: trian.py"),
            "train.py failed: rank 3 on gpu-07 could not be started: no such file: trian.py",
        ),
    ],
)
def test_the_headline_states_what_happened(cause: Failure, first_line: str) -> None:
    """It is the same in the text and in the JSON."""
    verdict = failed(cause)
    assert headline(report(verdict)) == first_line
    assert " ".join(render(report(verdict)).split("\n---")[0].split()).endswith(first_line)
    assert to_dict(report(verdict))["summary"] == first_line


def test_a_failure_without_an_exception_shows_the_last_lines_of_stderr() -> None:
    """An empty stderr is reported as such."""
    text = render(report(failed(failure(exit_code=-9, last_lines=("step 1", "step 2")))))
    assert "  Last 2 lines of its stderr:\n    step 1\n    step 2\n" in text
    assert "  ended      killed by SIGKILL\n" in text
    assert "It wrote nothing to stderr." in render(report(failed(failure(exit_code=-9))))


def test_stopped_workers_are_not_failures() -> None:
    """They are listed in one line, without exit code or signal."""
    text = render(report(failed(BOOM, stopped=(Stopped(0, 0, 1, -15), Stopped(1, 1, 2, -9)))))
    lines = [line for line in text.split("\n") if "topped" in line]
    assert lines == ["Stopped by tenax, not failed: ranks 0, 1"]
    assert "SIGTERM" not in text
    assert "SIGKILL" not in text


def test_a_long_traceback_keeps_its_start_and_end() -> None:
    """The middle is omitted, with a reference to the full text."""
    long = "\n".join(f"line {n}" for n in range(1000))
    text = render(report(failed(failure(traceback=long, log_file="/l/stderr.log"))))
    assert "line 7\n  [... 940 lines omitted; full text in /l/stderr.log ...]\n  line 948\n" in text
    assert "  line 999\n" in text


def test_many_different_failures_are_counted() -> None:
    """The report stays short even if every worker fails in a different way."""
    others = [failure(rank, rank, seen_at=9.0) for rank in range(10, 40)]
    text = render(report(failed(BOOM, *others)))
    assert "  rank 10: exited with code 10\n" in text
    assert "  and 22 more in the journal\n" in text
    many = tuple(failure(0, code) for code in range(1, 21))
    text = render(report(failed(BOOM, earlier=many, restarts_used=20)))
    assert "    (12 older ones in the journal)\n    rank 0 (local rank 0, pid 4700) exited with code 13\n" in text
    text = render(report(failed(BOOM, earlier=many, restarts_used=500)))
    assert "    (492 older ones in the journal)\n" in text, "includes those that the coordinator no longer has"


# --- several nodes ----------------------------------------------------------------------------------------------------


def on(host: str, *failures: Failure) -> tuple[Failure, ...]:
    return tuple(msgspec.structs.replace(each, host=host) for each in failures)


def test_the_report_of_a_failure_on_another_host() -> None:
    """Every node prints it: failures and their files are shown with the host where they happened."""
    others = (
        *on("gpu-08", failure(1, -11, 10.25)),
        *on("gpu-07", failure(4, 7, 10.5)),
        *on("gpu-09", failure(8, 7, 11)),
    )
    verdict = failed(
        *on("gpu-08", BOOM),
        *others,
        stopped=tuple(Stopped(rank % 4, rank, 4800 + rank, -15) for rank in (0, 2, 3, 5, 6, 7, 9)),
        earlier=(*on("gpu-07", failure(5, 2)), *on("gpu-09", BOOM)),
        restarts_used=2,
        membership_changes=2,
        drains=1,
    )
    text = render(report(verdict))
    assert (
        text
        == """\
================================================================================
train.py failed: rank 3 on gpu-08 raised RuntimeError: boom
--------------------------------------------------------------------------------
First cause
  cause      The script raised an uncaught exception: RuntimeError.
  next       Read the traceback below, last line first.
  rank       3 (local rank 3) on gpu-08, pid 4703
  ended      exited with code 1
  error      RuntimeError: boom
  stderr log /logs/run_x/attempt_2/3/stderr.log (on gpu-08)
  error file /logs/run_x/attempt_2/3/error.json (on gpu-08)

  Traceback (most recent call last):
    File "train.py", line 7, in <module>
  RuntimeError: boom

Also failed
  rank 1, 250 ms later: was killed by SIGSEGV (invalid memory access)
  ranks 4, 8 on 2 hosts, 500 ms later: exited with code 7

Stopped by tenax, not failed: ranks 0, 2, 3, 5-7, 9

Outcome
  Gave up after 2 of 3 restarts: all 3 restarts are used.
  Uncharged restarts: 2 because nodes joined or were lost, 1 because a node was
  drained.
  Earlier failures, each followed by a restart:
    rank 5 (local rank 1, pid 4705) exited with code 2
    rank 3 (local rank 3, pid 4703) on gpu-09 raised RuntimeError: boom

  run        run, role default
  logs       /logs/run_x
  journal    /logs/run_x/journal.jsonl
  replay     tenax replay /logs/run_x/journal.jsonl
================================================================================
"""
    )


def test_every_node_prints_the_same_cause() -> None:
    """Headline and first cause do not depend on the printing host."""
    verdict = failed(*on("gpu-08", failure(message="boom", error_type="X", last_lines=("a",))))
    reports = [render(report(verdict, host=host)) for host in ("gpu-07", "gpu-08", "gpu-09")]
    assert len(set(reports)) == 1


def test_one_other_host_is_named() -> None:
    """Later failures show their host if it is not the first one's."""
    text = render(report(failed(*on("a", BOOM), *on("b", failure(5, 4), failure(6, 4)), *on("a", failure(1, 9)))))
    assert "  ranks 5, 6 on b: exited with code 4\n" in text
    assert "  rank 1: exited with code 9\n" in text


def test_a_long_traceback_of_another_host_refers_to_the_full_text() -> None:
    long = "\n".join(f"line {n}" for n in range(1000))
    text = render(report(failed(*on("gpu-08", failure(traceback=long, log_file="/l/stderr.log")))))
    assert "full text in /l/stderr.log (on gpu-08) ...]" in text
    text = render(report(failed(*on("gpu-08", failure(traceback=long)))))
    assert "full text in /logs/run_x/journal.jsonl ...]" in text, "the journal of this host has it too"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([5], "rank 5"),
        ([5, 0, 1, 2, 3], "ranks 0-3, 5"),
        ([0, 1], "ranks 0, 1"),
        (range(10_000), "ranks 0-9999"),
        (range(0, 100, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,"
         " 44, 46 and 26 more"),
    ],
)  # fmt: skip
def test_many_stopped_workers_are_listed_as_ranges(ranks: list[int], text: str) -> None:
    """Thousands of workers on hundreds of nodes fit into a few lines."""
    stopped = tuple(Stopped(0, rank, 1, -15) for rank in ranks)
    assert f"Stopped by tenax, not failed: {text} Outcome" in " ".join(
        render(report(failed(BOOM, stopped=stopped))).split()
    )


@pytest.mark.parametrize(
    ("changes", "drains", "text"),
    [
        (1, 0, "Uncharged restarts: 1 because nodes joined or were lost."),
        (3, 0, "Uncharged restarts: 3 because nodes joined or were lost."),
        (0, 1, "Uncharged restarts: 1 because a node was drained."),
        (0, 2, "Uncharged restarts: 2 because a node was drained."),
        (1, 1, "Uncharged restarts: 1 because nodes joined or were lost, 1 because a node was drained."),
    ],
)
def test_uncharged_restarts_are_counted(changes: int, drains: int, text: str) -> None:
    """So the number of generations can be explained."""
    rendered = render(report(failed(BOOM, membership_changes=changes, drains=drains)))
    assert text in " ".join(rendered.split())
    assert "Uncharged" not in render(report(failed(BOOM)))


def test_the_json_names_the_host_of_each_failure() -> None:
    """It also counts uncharged restarts; ``host`` is where the report was written."""
    verdict = failed(
        *on("gpu-08", BOOM), failure(1, -9), earlier=on("gpu-09", failure(5, 2)), membership_changes=2, drains=1
    )
    data = json.loads(to_json(report(verdict)))
    assert (data["host"], data["first_cause"]["host"], data["other_failures"][0]["host"]) == (
        "gpu-07",
        "gpu-08",
        "gpu-07",
    )
    assert (data["membership_changes"], data["drains"], data["generation"]) == (2, 1, 4)
    assert data["history"] == ["rank 5 (local rank 1, pid 4705) on gpu-09 exited with code 2"]
    assert data["summary"] == "train.py failed: rank 3 on gpu-08 raised RuntimeError: boom"


# --- other ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "first_line", "also"),
    [
        (
            Verdict(Outcome.CANCELLED, "the agent received SIGINT", signal=2),
            "train.py was cancelled by SIGINT",
            "0 of 3 restarts used. Ended: the agent received SIGINT.",
        ),
        (
            Verdict(Outcome.CANCELLED, "maintenance of rack 7", restarts_used=1, requests=2),
            "train.py was cancelled after 1 of 3 restarts: maintenance of rack 7",
            "1 of 3 restarts used. Uncharged restarts: 2 requested by an operator.",
        ),
        (
            Verdict(Outcome.ABANDONED, "not gone 10 s after SIGKILL", stuck_pids=(11, 12)),
            "train.py was abandoned: processes on gpu-07 survived SIGKILL: 11, 12",
            "Check /proc/PID/stack of 11 12",
        ),
        (
            Verdict(Outcome.BROKEN, "the keeper was lost: it was killed"),
            "train.py could not be run: the keeper was lost: it was killed",
            "0 of 3 restarts used.",
        ),
        (
            Verdict(Outcome.FAILED, "no restarts are allowed"),
            "train.py failed on gpu-07: no restarts are allowed",
            "Not restarted: no restarts are allowed.",
        ),
    ],
)
def test_other_outcomes_have_a_short_report(verdict: Verdict, first_line: str, also: str) -> None:
    """Cancelled, abandoned, broken: headline, outcome, where to look, and no empty sections."""
    text = render(report(verdict))
    assert first_line in " ".join(text.split())
    assert also in " ".join(text.split())
    assert "First cause" not in text
    assert text.count("\n") < 16


def test_a_success_is_one_line() -> None:
    """With the number of restarts, if any."""
    assert render(report(Verdict(Outcome.SUCCEEDED, "all done"))) == "train.py succeeded\n"
    verdict = Verdict(Outcome.SUCCEEDED, "all done", restarts_used=1)
    assert render(report(verdict)) == "train.py succeeded after 1 of 3 restarts\n"


def test_the_report_of_a_cancelled_run_shows_a_failed_worker() -> None:
    """Cancelling does not hide a failure, and the failure is not shown as the reason."""
    text = render(report(Verdict(Outcome.CANCELLED, "asked", failures=(BOOM,), signal=15)))
    assert "A worker had failed\n" in text
    assert "RuntimeError: boom" in text


def test_colour_only_decorates() -> None:
    """With colours removed the text is the same."""
    coloured = render(report(failed(BOOM, failure(1))), colour=True)
    assert "\x1b[1;31mtrain.py failed" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render(report(failed(BOOM, failure(1))))


def test_the_frame_has_the_width_of_the_terminal_within_limits() -> None:
    """The width is limited to a readable range, and no word is broken."""
    for width, frame in ((20, 40), (60, 60), (500, 100)):
        lines = render(report(failed(BOOM)), width=width).split("\n")
        assert lines[0] == "=" * frame
        assert any("/logs/run_x/attempt_2/3/stderr.log" in line for line in lines)


def test_a_replay_command_can_be_pasted() -> None:
    """A path with spaces is quoted."""
    assert "tenax replay '/my logs/j'" in render(report(failed(BOOM), journal="/my logs/j"))


def test_unknown_paths_are_omitted() -> None:
    """Without a journal or logs the report does not refer to them."""
    text = render(Report(verdict=failed(BOOM), entrypoint="f", host="h"))
    assert "journal" not in text
    assert "replay" not in text


def test_one_failure_in_one_line() -> None:
    """The summary for the history; with the host, unless that is known."""
    assert summary(BOOM) == "rank 3 (local rank 3, pid 4703) raised RuntimeError: boom"
    (there,) = on("gpu-08", BOOM)
    assert summary(there) == "rank 3 (local rank 3, pid 4703) on gpu-08 raised RuntimeError: boom"
    assert summary(there, "gpu-08") == summary(BOOM)
    unstarted = Failure(1, 0, 0, 0, 127, 1.0, "could not be started: no such file")
    assert summary(unstarted) == "rank 0 (local rank 0) could not be started: no such file"
    assert "\n" not in summary(failure(reason="several\nlines"))


def test_the_json_has_the_same_content() -> None:
    """One object with the verdict, the exit code, the complete first cause, and the stopped workers."""
    data = json.loads(to_json(report(failed(BOOM, failure(1, -9), stopped=(Stopped(0, 0, 5, -15),)))))
    assert (data["version"], data["outcome"], data["exit_code"]) == (3, "failed", 1)
    assert data["summary"] == "train.py failed: rank 3 on gpu-07 raised RuntimeError: boom"
    cause = data["first_cause"]
    assert (cause["rank"], cause["local_rank"], cause["host"], cause["pid"]) == (3, 3, "gpu-07", 4703)
    assert (cause["error_type"], cause["traceback"], cause["signal"]) == ("RuntimeError", TRACEBACK, None)
    assert [other["signal"] for other in data["other_failures"]] == ["SIGKILL"]
    assert data["stopped"] == [{"rank": 0, "local_rank": 0, "pid": 5, "exit_code": -15, "stacks": ""}]
    assert (data["restarts_used"], data["max_restarts"], data["journal"]) == (3, 3, "/logs/run_x/journal.jsonl")


any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=40) | st.just("\x1b[2J\x07\u202e")


@given(any_text, any_text, any_text, st.integers(-70, 300), st.integers(0, 200), st.booleans())
def test_text_of_a_worker_is_escaped(a: str, b: str, c: str, code: int, width: int, colour: bool) -> None:
    """Whatever a worker wrote, the report can be encoded and contains no control characters."""
    worst = failure(exit_code=code, message=a, error_type=b, traceback=c, last_lines=(a, b), log_file=c, error_file=a)
    worst = msgspec.structs.replace(worst, reason=b)
    worst = msgspec.structs.replace(worst, host=a)
    verdict = failed(worst, msgspec.structs.replace(worst, host=b), earlier=(worst,))
    made = report(verdict, host=c, entrypoint=a, journal=b, log_dir=c, run_id=a, role=b)
    for value in (worst, msgspec.structs.replace(worst, reason="")):
        summary(value, b).encode()
    text = re.sub(r"\x1b\[(1|1;31|0)m", "", render(made, colour, width))
    text.encode()
    assert not any((ord(char) < 32 and char not in "\t\n") or 0x7F <= ord(char) < 0xA0 for char in text)
    assert json.loads(to_json(made))["exit_code"] > 0


LATE = "did not leave the scope 'step' within 1 min"
STACKS = 'Current thread 0x7f (most recent call first):\n  File "train.py", line 3 in step\n\nThread 0x6f:\n  File "x"'


def test_a_worker_that_hung_is_shown_with_its_stacks() -> None:
    """The reason, how it ended, the stacks of its threads, then its last output."""
    cause = failure(exit_code=-9, reason=LATE, stacks=STACKS, last_lines=("step 41",))
    text = render(report(failed(cause)))
    assert "train.py failed: rank 3 on gpu-07 did not leave the scope 'step' within 1 min\n" in text
    assert (
        """
  ended      killed by SIGKILL: did not leave the scope 'step' within 1 min

  Stacks of its threads when it was late, innermost call first:
    Current thread 0x7f (most recent call first):
      File "train.py", line 3 in step

    Thread 0x6f:
      File "x"

  Last line of its stderr:
    step 41
"""
        in text
    )
    assert to_dict(report(failed(cause)))["first_cause"]["stacks"] == STACKS
    assert "It wrote nothing to stderr" not in render(report(failed(failure(reason=LATE, stacks=STACKS))))


def stack(*calls: str, thread: str = "0x7f01") -> str:
    return f"Current thread {thread} (most recent call first):\n" + "\n".join(f'  File "x", {call}' for call in calls)


def late(rank: int, stacks: str, seen_at: float = 10.0) -> Failure:
    return msgspec.structs.replace(failure(rank, -9, seen_at, LATE, stacks=stacks), was_late=True)


def test_the_stacks_of_the_other_workers_are_shown() -> None:
    """The worker that was late first may have waited for another. Equal stacks are shown once, rare ones first."""
    waiting = [stack("line 9 in all_reduce", thread=f"0x7f{rank:02}") for rank in range(8)]
    stopped = (
        *(Stopped(rank, rank, 4800 + rank, -15, waiting[rank], "gpu-07") for rank in (4, 5)),
        Stopped(6, 6, 4806, -15, stack("line 3 in load_data"), "gpu-08"),
        Stopped(7, 7, 4807, -15),
    )
    verdict = failed(late(0, waiting[0]), late(1, waiting[1], 10.2), late(2, stack("line 5 in save")), stopped=stopped)
    text = render(report(verdict))
    assert (
        """
Stacks of the other workers (rank 0 may have been waiting for one of them)
  rank 2, also late:
    Current thread 0x7f01 (most recent call first):
      File "x", line 5 in save
  rank 6 on gpu-08, not late:
    Current thread 0x7f01 (most recent call first):
      File "x", line 3 in load_data
  ranks 1, 4, 5: the same as rank 0
  All stacks are in stacks.txt, next to each error file, below /logs/run_x on each host.

"""
        in text
    )
    assert [each["stacks"] for each in to_dict(report(verdict))["stopped"]] == [each.stacks for each in stopped]


def test_many_different_stacks_are_truncated() -> None:
    """A few are shown with some lines each, including the end, where the main thread is; the others are counted."""
    deep = [f"line {number} in f{number}" for number in range(200)]
    stopped = tuple(Stopped(rank, rank, 1, -15, stack(f"line {rank} in x", *deep)) for rank in range(1, 16))
    text = render(report(failed(late(0, stack("line 1 in main")), stopped=stopped)))
    assert len(text.splitlines()) < 180
    assert text.count("line 199 in f199") == 4
    assert "  and 11 more in other calls\n" in text


def test_without_stacks_there_is_no_section_about_the_others() -> None:
    text = render(report(failed(late(0, STACKS), failure(1, -9, 10.2), stopped=(Stopped(3, 3, 1, -15),))))
    assert "Stacks of the other workers" not in text


def test_a_long_error_and_a_long_end_are_wrapped() -> None:
    """Only paths may be longer than the report is wide."""
    words = " ".join(["word"] * 50)
    evidence = {"error_type": "ValueError", "message": f"ValueError: {words}"}
    for cause in (failure(exit_code=-9, reason=words), failure(**evidence)):
        text = render(report(failed(cause)))
        assert text.count("word") >= 50
        assert max(map(len, text.splitlines())) <= 80


def test_a_late_worker_that_exited_by_itself_is_shown_with_its_exit_code() -> None:
    """It handled SIGTERM: the exit code is its own, and does not show the reason."""
    cause = msgspec.structs.replace(failure(exit_code=0, reason=LATE), was_late=True)
    assert f"  ended      exited with code 0: {LATE}\n" in render(report(failed(cause)))


def test_stacks_are_bounded_and_harmless() -> None:
    """A hundred threads do not push the cause off the screen, and their names contain no control characters."""
    stacks = "\n".join(f'  File "x\x1b[31m", line {number} in f' for number in range(1_000))
    text = render(report(failed(failure(exit_code=-9, reason=LATE, stacks=stacks))))
    assert "\x1b" not in text
    assert len(text.splitlines()) < 100
    assert "940 lines omitted; full text in /logs/run_x/journal.jsonl" in text


def test_a_brief_failure_has_no_stacks() -> None:
    """They are long; the complete failure has them."""
    assert failure(stacks=STACKS).brief().evidence.stacks == ""


def test_the_next_step_is_not_cut_off() -> None:
    """tenax's own reasons end with the next step, so they are shown in full, once."""
    why = "no answer from head:29400, " + "although this node tried for a long time, " * 8 + "so check the network"
    text = " ".join(render(report(Verdict(Outcome.BROKEN, why))).split())
    assert text.count("so check the network") == 1


# --- the cause --------------------------------------------------------------------------------------------------------

FULL = "OSError: [Errno 28] No space left on device: '/data/x'"
RESET = "ConnectionResetError: [Errno 104] Connection reset"


def full(rank: int, seen_at: float = 10.0) -> Failure:
    return failure(rank, 1, seen_at, error_type="OSError", message=FULL, cause="disk_full", proof=FULL)


def lost(rank: int, seen_at: float = 10.1) -> Failure:
    known = {"cause": "peer_lost", "is_consequence": True, "proof": RESET}
    return failure(rank, 1, seen_at, error_type="ConnectionResetError", message=RESET, **known)


def test_the_report_has_cause_proof_next_step_and_victims() -> None:
    """The meaning of the cause, the next step, ranks with the same cause, and victims."""
    saved = msgspec.structs.replace(full(3), evidence=msgspec.structs.replace(full(3).evidence, message="X: not saved"))
    verdict = failed(saved, full(5), *(lost(rank) for rank in (0, 1, 2)), failure(7, -11, 10.2), generation=1)
    text = render(report(verdict))
    assert (
        """
First cause
  cause      The disk is full at /data/x.
  proof      OSError: [Errno 28] No space left on device: '/data/x'
  next       Free some space or write elsewhere; df -h and df -i on that host
             show what is full.
  also       rank 5 failed for the same reason
  rank       3 (local rank 3) on gpu-07, pid 4703
"""
        in text
    )
    assert (
        """
Failed as a consequence
  ranks 0-2, 100 ms later: lost the connection to a peer; raised
  ConnectionResetError: [Errno 104] Connection reset

Also failed
  rank 7, 200 ms later: was killed by SIGSEGV (invalid memory access)
"""
        in text
    )
    data = to_dict(report(verdict))
    assert (data["cause"], data["cause_is_known"], data["proof"]) == ("disk_full", True, FULL)
    assert data["cause_meaning"] == "The disk is full at /data/x."
    assert data["next_step"].startswith("Free some space")
    assert (data["same_cause"], data["victims"]) == ([5], [0, 1, 2])
    assert [each["cause"] for each in data["other_failures"]] == ["disk_full", *["peer_lost"] * 3, "segmentation_fault"]


def test_the_cause_is_unknown_if_all_failed_workers_lost_a_peer() -> None:
    """The report names the workers that had not failed as possibly missing."""
    verdict = failed(lost(0), lost(1), stopped=(Stopped(2, 2, 1, -15),))
    text = " ".join(render(report(verdict)).split())
    assert "(a consequence; the cause is unknown)" in headline(report(verdict))
    assert "cause Unknown: every failed worker lost a peer or timed out waiting for one." in text
    assert "missing possibly rank 2: still running when tenax stopped the workers" in text
    assert "Also failed rank 1" in text
    assert "Failed as a consequence" not in text
    assert to_dict(report(verdict))["cause_is_known"] is False


def test_uncaught_exceptions_are_the_same_cause_only_with_the_same_message() -> None:
    same = failure(4, error_type="RuntimeError", message="RuntimeError: boom")
    other = failure(5, error_type="RuntimeError", message="RuntimeError: bang")
    data = to_dict(report(failed(BOOM, same, other)))
    assert (data["cause"], data["same_cause"], data["victims"]) == ("exception", [4], [])


def test_the_report_ends_with_the_goodput() -> None:
    goodput = Goodput(Spent(training_s=90.0, waiting_s=10.0))
    text = render(report(failed(BOOM, goodput=goodput)))
    assert "\n  time       90 % of 1 min 40 s was training" in text
    success = render(report(Verdict(Outcome.SUCCEEDED, "all done", goodput=goodput)))
    assert success.startswith("train.py succeeded: 90 % of 1 min 40 s was training")
    assert success.count("\n") == 1


# --- times ------------------------------------------------------------------------------------------------------------

# 2026-11-16 08:02:07 UTC is second 1000 of the agent's clock.
CLOCK = WallClock(offset_s=1794816127.0 - 1000.0, zone_s=-12600, began_at=1000.0)


def test_the_report_has_the_time_of_the_failure() -> None:
    """Local time with date and zone, and the time since the start; the run has its start time."""
    text = render(report(failed(failure(seen_at=1032.0), failure(1, seen_at=1040.0)), clock=CLOCK))
    assert "\n  when       04:32:39 (2026-11-16, -03:30), 32 s after the start\n" in text
    assert "\n  run        run, role default, began 04:32:07 (2026-11-16, -03:30)\n" in text


def test_an_exception_counts_from_when_it_was_raised() -> None:
    """However long its process took to exit."""
    made = report(failed(failure(seen_at=1032.0, raised_at=1002.5)), clock=CLOCK)
    assert "  when       04:32:09 (2026-11-16, -03:30), 2.5 s after the start\n" in render(made)
    data = to_dict(made)
    assert (data["began_at"], data["failed_at"]) == (1794816127.0, 1794816129.5)


def test_without_a_clock_there_are_no_times() -> None:
    """A run without failures has only its start time."""
    text, data = render(report(failed(BOOM))), to_dict(report(failed(BOOM)))
    assert "\n  when " not in text
    assert "began" not in text
    assert (data["began_at"], data["failed_at"]) == (None, None)
    unbegun = msgspec.structs.replace(CLOCK, began_at=None)
    text = render(report(failed(failure(seen_at=1032.0)), clock=unbegun))
    assert "\n  when       04:32:39 (2026-11-16, -03:30)\n" in text
    data = to_dict(report(Verdict(Outcome.CANCELLED, "asked", signal=2), clock=CLOCK))
    assert (data["began_at"], data["failed_at"]) == (1794816127.0, None)
