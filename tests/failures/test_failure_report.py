"""The one report: leads with the cause, blames nobody we stopped, and is safe to print."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenax._core.ledger import Goodput, Spent
from tenax._core.model import Evidence, Failure, Outcome, Stopped, Verdict
from tenax._failures.report import Report, headline, render, summary, to_dict, to_json
from tenax._failures.wall_clock import WallClock

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


def report(verdict: Verdict, **facts: object) -> Report:
    known = {
        "entrypoint": "train.py",
        "host": "gpu-07",
        "run_id": "run",
        "role": "default",
        "max_restarts": 3,
        "log_dir": "/logs/run_x",
        "journal": "/logs/run_x/journal.jsonl",
    }
    return Report(verdict=verdict, **{**known, **facts})


def failed(*failures: Failure, **fields: object) -> Verdict:
    return Verdict(
        Outcome.FAILED, "all 3 restarts are used", failures, **{"restarts_used": 3, "generation": 4, **fields}
    )


def test_the_whole_report_as_a_person_reads_it() -> None:
    """Cause first, then the others in short, whom we stopped, what was done, where to look."""
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
  cause      The script raised an exception that nobody caught: RuntimeError.
  next       Read the traceback below from its end.
  rank       3 (local rank 3) on gpu-07, pid 4703
  ended      exited with code 1
  error      RuntimeError: boom
  stderr log /logs/run_x/attempt_2/3/stderr.log
  error file /logs/run_x/attempt_2/3/error.json

  Traceback (most recent call last):
    File "train.py", line 7, in <module>
  RuntimeError: boom

Also failed, before we stopped them
  rank 1, 250 ms later: was killed by SIGSEGV (invalid memory access)
  ranks 0, 2, 500 ms later: raised ConnectionError: peer gone

Stopped by us, not failed: ranks 4-7, 9

What was done
  Restarted 2 of 3 times, then gave up: all 3 restarts are used.
  Earlier failures, each followed by a restart:
    rank 3 (local rank 3, pid 4703) raised RuntimeError: boom
    rank 0 (local rank 0, pid 4700) exited with code 2

  run        run, role default
  logs       /logs/run_x
  journal    /logs/run_x/journal.jsonl
  the story  tenax replay /logs/run_x/journal.jsonl
================================================================================
"""
    )


@pytest.mark.parametrize(
    ("cause", "sentence"),
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
def test_the_first_sentence_says_what_happened(cause: Failure, sentence: str) -> None:
    """One sentence, the same in the text, in its title and in the JSON."""
    verdict = failed(cause)
    assert headline(report(verdict)) == sentence
    assert " ".join(render(report(verdict)).split("\n---")[0].split()).endswith(sentence)
    assert to_dict(report(verdict))["summary"] == sentence


def test_a_worker_that_only_died_shows_its_last_lines() -> None:
    """Without an exception there are the last lines of stderr; without those, that is said."""
    text = render(report(failed(failure(exit_code=-9, last_lines=("step 1", "step 2")))))
    assert "  The last 2 lines of its stderr:\n    step 1\n    step 2\n" in text
    assert "  ended      killed by SIGKILL\n" in text
    assert "It wrote nothing to stderr." in render(report(failed(failure(exit_code=-9))))


def test_workers_that_we_stopped_are_never_failures() -> None:
    """They are named in one line, with no exit code and no signal."""
    text = render(report(failed(BOOM, stopped=(Stopped(0, 0, 1, -15), Stopped(1, 1, 2, -9)))))
    lines = [line for line in text.split("\n") if "topped" in line]
    assert lines == ["Stopped by us, not failed: ranks 0, 1"]
    assert "SIGTERM" not in text
    assert "SIGKILL" not in text


def test_a_long_traceback_keeps_its_ends() -> None:
    """The middle is left out, and where the whole can be read is said."""
    long = "\n".join(f"line {n}" for n in range(1000))
    text = render(report(failed(failure(traceback=long, log_file="/l/stderr.log"))))
    assert "line 7\n  [... 940 lines left out; the whole is in /l/stderr.log ...]\n  line 948\n" in text
    assert "  line 999\n" in text


def test_many_kinds_of_other_failures_are_counted() -> None:
    """The report stays short when everything falls apart in its own way."""
    others = [failure(rank, rank, seen_at=9.0) for rank in range(10, 40)]
    text = render(report(failed(BOOM, *others)))
    assert "  rank 10: exited with code 10\n" in text
    assert "  and 22 more, in the journal\n" in text
    many = tuple(failure(0, code) for code in range(1, 21))
    text = render(report(failed(BOOM, earlier=many, restarts_used=20)))
    assert "    (12 older ones, in the journal)\n    rank 0 (local rank 0, pid 4700) exited with code 13\n" in text
    text = render(report(failed(BOOM, earlier=many, restarts_used=500)))
    assert "    (492 older ones, in the journal)\n" in text, "also those that the coordinator has forgotten"


# --- several nodes ----------------------------------------------------------------------------------------------------


def on(host: str, *failures: Failure) -> tuple[Failure, ...]:
    return tuple(msgspec.structs.replace(each, host=host) for each in failures)


def test_the_report_of_a_failure_on_another_host() -> None:
    """Every node prints it: what failed is named with its own host, and so are its files, wherever this is read."""
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
  cause      The script raised an exception that nobody caught: RuntimeError.
  next       Read the traceback below from its end.
  rank       3 (local rank 3) on gpu-08, pid 4703
  ended      exited with code 1
  error      RuntimeError: boom
  stderr log /logs/run_x/attempt_2/3/stderr.log (on gpu-08)
  error file /logs/run_x/attempt_2/3/error.json (on gpu-08)

  Traceback (most recent call last):
    File "train.py", line 7, in <module>
  RuntimeError: boom

Also failed, before we stopped them
  rank 1, 250 ms later: was killed by SIGSEGV (invalid memory access)
  ranks 4, 8 on 2 hosts, 500 ms later: exited with code 7

Stopped by us, not failed: ranks 0, 2, 3, 5-7, 9

What was done
  Restarted 2 of 3 times, then gave up: all 3 restarts are used.
  2 generations ended because nodes came or went, 1 because a node was asked to
  leave: not counted as restarts.
  Earlier failures, each followed by a restart:
    rank 5 (local rank 1, pid 4705) exited with code 2
    rank 3 (local rank 3, pid 4703) on gpu-09 raised RuntimeError: boom

  run        run, role default
  logs       /logs/run_x
  journal    /logs/run_x/journal.jsonl
  the story  tenax replay /logs/run_x/journal.jsonl
================================================================================
"""
    )


def test_every_node_tells_the_same_cause() -> None:
    """The first sentence and the first cause do not depend on who prints them."""
    verdict = failed(*on("gpu-08", failure(message="boom", error_type="X", last_lines=("a",))))
    reports = [render(report(verdict, host=host)) for host in ("gpu-07", "gpu-08", "gpu-09")]
    assert len(set(reports)) == 1


def test_one_other_host_is_named() -> None:
    """Of those that failed later: where, if not where the first one did."""
    text = render(report(failed(*on("a", BOOM), *on("b", failure(5, 4), failure(6, 4)), *on("a", failure(1, 9)))))
    assert "  ranks 5, 6 on b: exited with code 4\n" in text
    assert "  rank 1: exited with code 9\n" in text


def test_a_long_traceback_of_another_host_says_where_the_whole_is() -> None:
    long = "\n".join(f"line {n}" for n in range(1000))
    text = render(report(failed(*on("gpu-08", failure(traceback=long, log_file="/l/stderr.log")))))
    assert "the whole is in /l/stderr.log (on gpu-08) ...]" in text
    text = render(report(failed(*on("gpu-08", failure(traceback=long)))))
    assert "the whole is in /logs/run_x/journal.jsonl ...]" in text, "ours, which knows it too"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([5], "rank 5"),
        ([5, 0, 1, 2, 3], "ranks 0-3, 5"),
        ([0, 1], "ranks 0, 1"),
        (range(10_000), "ranks 0-9999"),
        (range(0, 100, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,"
         " 44, 46 and 26 more"),
    ],
)  # fmt: skip
def test_many_stopped_workers_are_told_in_ranges(ranks: list[int], words: str) -> None:
    """Thousands of workers over hundreds of nodes take one line, or few."""
    stopped = tuple(Stopped(0, rank, 1, -15) for rank in ranks)
    assert f"Stopped by us, not failed: {words} What was done" in " ".join(
        render(report(failed(BOOM, stopped=stopped))).split()
    )


@pytest.mark.parametrize(
    ("changes", "drains", "sentence"),
    [
        (1, 0, "1 generation ended because nodes came or went: not counted as a restart."),
        (3, 0, "3 generations ended because nodes came or went: not counted as restarts."),
        (0, 1, "1 generation ended because a node was drained: not counted as a restart."),
        (0, 2, "2 generations ended because a node was drained: not counted as restarts."),
        (
            1,
            1,
            "1 generation ended because nodes came or went, 1 because a node was drained: not counted as restarts.",
        ),
    ],
)
def test_what_was_free_of_charge_is_told(changes: int, drains: int, sentence: str) -> None:
    """Nodes that came, went or were asked to leave cost no restart, and a reader who counts generations is told so."""
    text = render(report(failed(BOOM, membership_changes=changes, drains=drains)))
    assert sentence in " ".join(text.split())
    assert "not counted" not in render(report(failed(BOOM)))


def test_the_json_names_the_host_of_each_failure() -> None:
    """And counts what was free of charge; the report's own host stays who wrote it."""
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
    ("verdict", "sentence", "also"),
    [
        (
            Verdict(Outcome.CANCELLED, "the agent received SIGINT", signal=2),
            "train.py was cancelled by SIGINT",
            "0 of 3 restarts used. Ended: the agent received SIGINT.",
        ),
        (
            Verdict(Outcome.CANCELLED, "maintenance of rack 7", restarts_used=1, requests=2),
            "train.py was cancelled after 1 of 3 restarts: maintenance of rack 7",
            "1 of 3 restarts used. 2 generations ended because an operator restarted the run: not counted as restarts.",
        ),
        (
            Verdict(Outcome.ABANDONED, "not gone 10 s after SIGKILL", stuck_pids=(11, 12)),
            "train.py was abandoned: on gpu-07 these processes survived SIGKILL: 11, 12",
            "Look at /proc/PID/stack of 11 12",
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
def test_other_ends_are_told_in_short(verdict: Verdict, sentence: str, also: str) -> None:
    """Cancelled, abandoned, broken: the sentence, what was done, where to look, and no empty headings."""
    text = render(report(verdict))
    assert sentence in " ".join(text.split())
    assert also in " ".join(text.split())
    assert "First cause" not in text
    assert text.count("\n") < 16


def test_a_success_is_one_line() -> None:
    """Nothing to explain, except what it cost."""
    assert render(report(Verdict(Outcome.SUCCEEDED, "all done"))) == "train.py succeeded\n"
    verdict = Verdict(Outcome.SUCCEEDED, "all done", restarts_used=1)
    assert render(report(verdict)) == "train.py succeeded after 1 of 3 restarts\n"


def test_a_worker_that_had_failed_is_told_when_the_run_was_cancelled() -> None:
    """A cancel does not hide a failure, nor call it the reason."""
    text = render(report(Verdict(Outcome.CANCELLED, "asked", (BOOM,), signal=15)))
    assert "A worker had failed\n" in text
    assert "RuntimeError: boom" in text


def test_colour_only_decorates() -> None:
    """With colours removed the text is the same."""
    coloured = render(report(failed(BOOM, failure(1))), colour=True)
    assert "\x1b[1;31mtrain.py failed" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render(report(failed(BOOM, failure(1))))


def test_the_frame_follows_the_terminal_within_reason() -> None:
    """Narrow and wide terminals get a frame they can read; no word is broken."""
    for width, frame in ((20, 40), (60, 60), (500, 100)):
        lines = render(report(failed(BOOM)), width=width).split("\n")
        assert lines[0] == "=" * frame
        assert any("/logs/run_x/attempt_2/3/stderr.log" in line for line in lines)


def test_a_replay_command_can_be_pasted() -> None:
    """A path with spaces is quoted."""
    assert "tenax replay '/my logs/j'" in render(report(failed(BOOM), journal="/my logs/j"))


def test_missing_facts_leave_no_trace() -> None:
    """Without a journal or logs the report does not point to nowhere."""
    text = render(Report(verdict=failed(BOOM), entrypoint="f", host="h"))
    assert "journal" not in text
    assert "replay" not in text


def test_one_failure_in_one_line() -> None:
    """What the history says of a failure that was restarted: with its host, unless that goes without saying."""
    assert summary(BOOM) == "rank 3 (local rank 3, pid 4703) raised RuntimeError: boom"
    (there,) = on("gpu-08", BOOM)
    assert summary(there) == "rank 3 (local rank 3, pid 4703) on gpu-08 raised RuntimeError: boom"
    assert summary(there, "gpu-08") == summary(BOOM)
    unstarted = Failure(1, 0, 0, 0, 127, 1.0, "could not be started: no such file")
    assert summary(unstarted) == "rank 0 (local rank 0) could not be started: no such file"
    assert "\n" not in summary(failure(reason="several\nlines"))


def test_the_json_says_the_same() -> None:
    """One object with the verdict, the exit code, the first cause in full, and whom we stopped."""
    data = json.loads(to_json(report(failed(BOOM, failure(1, -9), stopped=(Stopped(0, 0, 5, -15),)))))
    assert (data["version"], data["outcome"], data["exit_code"]) == (2, "failed", 1)
    assert data["summary"] == "train.py failed: rank 3 on gpu-07 raised RuntimeError: boom"
    cause = data["first_cause"]
    assert (cause["rank"], cause["local_rank"], cause["host"], cause["pid"]) == (3, 3, "gpu-07", 4703)
    assert (cause["error_type"], cause["traceback"], cause["signal"]) == ("RuntimeError", TRACEBACK, None)
    assert [other["signal"] for other in data["other_failures"]] == ["SIGKILL"]
    assert data["stopped_by_us"] == [{"rank": 0, "local_rank": 0, "pid": 5, "exit_code": -15, "stacks": ""}]
    assert (data["restarts_used"], data["max_restarts"], data["journal"]) == (3, 3, "/logs/run_x/journal.jsonl")


nasty = st.text(st.characters(codec=None, exclude_categories=()), max_size=40) | st.just("\x1b[2J\x07\u202e")


@given(nasty, nasty, nasty, st.integers(-70, 300), st.integers(0, 200), st.booleans())
def test_no_words_of_a_worker_reach_the_terminal_raw(
    a: str, b: str, c: str, code: int, width: int, colour: bool
) -> None:
    """Whatever a worker wrote, the report prints, encodes, and acts on no terminal."""
    evil = failure(exit_code=code, message=a, error_type=b, traceback=c, last_lines=(a, b), log_file=c, error_file=a)
    evil = msgspec.structs.replace(evil, reason=b)
    evil = msgspec.structs.replace(evil, host=a)
    verdict = failed(evil, msgspec.structs.replace(evil, host=b), earlier=(evil,))
    made = report(verdict, host=c, entrypoint=a, journal=b, log_dir=c, run_id=a, role=b)
    for value in (evil, msgspec.structs.replace(evil, reason="")):
        summary(value, b).encode()
    text = re.sub(r"\x1b\[(1|1;31|0)m", "", render(made, colour, width))
    text.encode()
    assert not any((ord(char) < 32 and char not in "\t\n") or 0x7F <= ord(char) < 0xA0 for char in text)
    assert json.loads(to_json(made))["exit_code"] > 0


LATE = "did not leave the scope 'step' within 60 s"
STACKS = 'Current thread 0x7f (most recent call first):\n  File "train.py", line 3 in step\n\nThread 0x6f:\n  File "x"'


def test_a_worker_that_hung_is_told_with_its_stacks() -> None:
    """What it did not do, how it was ended, where its threads were; what it printed last comes after that."""
    cause = failure(exit_code=-9, reason=LATE, stacks=STACKS, last_lines=("step 41",))
    text = render(report(failed(cause)))
    assert "train.py failed: rank 3 on gpu-07 did not leave the scope 'step' within 60 s\n" in text
    assert (
        """
  ended      killed by SIGKILL: it did not leave the scope 'step' within 60 s

  Where its threads were when it was late, the innermost call of each first:
    Current thread 0x7f (most recent call first):
      File "train.py", line 3 in step

    Thread 0x6f:
      File "x"

  The last line of its stderr:
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


def test_whoever_is_late_first_may_only_have_waited_for_another() -> None:
    """So it is said where the others were: those at one place once, the rare places first, and who was not late."""
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
Where the others were meanwhile (rank 0 may have waited for one of them)
  rank 2, late too:
    Current thread 0x7f01 (most recent call first):
      File "x", line 5 in save
  rank 6 on gpu-08, not late:
    Current thread 0x7f01 (most recent call first):
      File "x", line 3 in load_data
  ranks 1, 4, 5: where rank 0 was
  Each has it in stacks.txt, next to its error file, below /logs/run_x on its host.

"""
        in text
    )
    assert [each["stacks"] for each in to_dict(report(verdict))["stopped_by_us"]] == [each.stacks for each in stopped]


def test_many_places_are_bounded() -> None:
    """A few of them, some lines of each, and how many are left out; of each the end, where the main thread is."""
    deep = [f"line {number} in f{number}" for number in range(200)]
    stopped = tuple(Stopped(rank, rank, 1, -15, stack(f"line {rank} in x", *deep)) for rank in range(1, 16))
    text = render(report(failed(late(0, stack("line 1 in main")), stopped=stopped)))
    assert len(text.splitlines()) < 180
    assert text.count("line 199 in f199") == 4
    assert "  and 11 more at other places\n" in text


def test_without_stacks_nothing_is_said_of_the_others() -> None:
    text = render(report(failed(late(0, STACKS), failure(1, -9, 10.2), stopped=(Stopped(3, 3, 1, -15),))))
    assert "meanwhile" not in text


def test_a_late_worker_that_ended_in_order_is_told_with_how_it_ended() -> None:
    """SIGTERM and a handler: the exit code is its own, and says nothing of the reason."""
    cause = msgspec.structs.replace(failure(exit_code=0, reason=LATE), was_late=True)
    assert f"  ended      exited with code 0: it {LATE}\n" in render(report(failed(cause)))


def test_stacks_are_bounded_and_harmless() -> None:
    """A hundred threads do not push the cause off the screen, and what they are called changes no terminal."""
    stacks = "\n".join(f'  File "x\x1b[31m", line {number} in f' for number in range(1_000))
    text = render(report(failed(failure(exit_code=-9, reason=LATE, stacks=stacks))))
    assert "\x1b" not in text
    assert len(text.splitlines()) < 100
    assert "940 lines left out; the whole is in /logs/run_x/journal.jsonl" in text


def test_a_brief_failure_has_no_stacks() -> None:
    """They are long; one full story is enough."""
    assert failure(stacks=STACKS).brief().evidence.stacks == ""


def test_what_to_do_is_not_cut_off() -> None:
    """Our own sentences end with the advice; however long they are, they are shown whole, and once."""
    why = (
        "nobody answers at head:29400, " + "although this node has tried for a long time, " * 8 + "so check the network"
    )
    text = " ".join(render(report(Verdict(Outcome.BROKEN, why))).split())
    assert text.count("so check the network") == 1


# --- the verdict ------------------------------------------------------------------------------------------------------

FULL = "OSError: [Errno 28] No space left on device: '/data/x'"
RESET = "ConnectionResetError: [Errno 104] Connection reset"


def full(rank: int, seen_at: float = 10.0) -> Failure:
    return failure(rank, 1, seen_at, error_type="OSError", message=FULL, cause="disk_full", proof=FULL)


def lost(rank: int, seen_at: float = 10.1) -> Failure:
    known = {"cause": "peer_lost", "is_consequence": True, "proof": RESET}
    return failure(rank, 1, seen_at, error_type="ConnectionResetError", message=RESET, **known)


def test_the_verdict_says_cause_proof_next_step_and_victims() -> None:
    """The cause in a sentence, what to do, who failed of the same, and who failed because of it."""
    saved = msgspec.structs.replace(full(3), evidence=msgspec.structs.replace(full(3).evidence, message="X: not saved"))
    verdict = failed(saved, full(5), *(lost(rank) for rank in (0, 1, 2)), failure(7, -11, 10.2), generation=1)
    text = render(report(verdict))
    assert (
        """
First cause
  cause      The disk is full where /data/x is.
  proof      OSError: [Errno 28] No space left on device: '/data/x'
  next       Free space there or write elsewhere; df -h and df -i on that host
             show which one is full.
  also       rank 5: the same
  rank       3 (local rank 3) on gpu-07, pid 4703
"""
        in text
    )
    assert (
        """
Because of that
  ranks 0-2, 100 ms later: lost the connection to a peer; raised ConnectionResetError: [Errno 104] Connection reset

Also failed, before we stopped them
  rank 7, 200 ms later: was killed by SIGSEGV (invalid memory access)
"""
        in text
    )
    data = to_dict(report(verdict))
    assert (data["cause"], data["cause_is_known"], data["proof"]) == ("disk_full", True, FULL)
    assert data["cause_sentence"] == "The disk is full where /data/x is."
    assert data["next_step"].startswith("Free space there")
    assert (data["same_cause"], data["victims"]) == ([5], [0, 1, 2])
    assert [each["cause"] for each in data["other_failures"]] == ["disk_full", *["peer_lost"] * 3, "segmentation_fault"]


def test_where_all_only_lost_a_peer_nobody_is_blamed() -> None:
    """The cause is not among them; those that had not failed are named as what may be missing."""
    verdict = failed(lost(0), lost(1), stopped=(Stopped(2, 2, 1, -15),))
    words = " ".join(render(report(verdict)).split())
    assert "(a consequence: no worker names the cause)" in headline(report(verdict))
    assert "cause Not known: no worker names one of its own." in words
    assert "missing perhaps rank 2: had not failed when we stopped everything" in words
    assert "Also failed, before we stopped them rank 1" in words
    assert "Because of that" not in words
    assert to_dict(report(verdict))["cause_is_known"] is False


def test_a_rank_that_the_others_name_as_missing_is_told() -> None:
    late = "RuntimeError: [Rank 0]: Ranks 4, 6 failed to pass monitoredBarrier in 1000 ms"
    one = failure(0, message=late, cause="collective_timeout", is_consequence=True, proof=late)
    assert "  missing    ranks 4, 6, by what the others say\n" in render(report(failed(one, lost(1))))


def test_a_rank_that_ended_in_order_while_others_needed_it_is_told() -> None:
    assert "missing    perhaps rank 1: had ended without an error" in render(report(failed(lost(0), lost(2))))


def test_exceptions_of_scripts_are_the_same_only_if_they_say_the_same() -> None:
    same = failure(4, error_type="RuntimeError", message="RuntimeError: boom")
    other = failure(5, error_type="RuntimeError", message="RuntimeError: bang")
    data = to_dict(report(failed(BOOM, same, other)))
    assert (data["cause"], data["same_cause"], data["victims"]) == ("exception", [4], [])


def test_the_report_ends_with_what_the_time_was_spent_on() -> None:
    goodput = Goodput(Spent(training_s=90.0, waiting_s=10.0))
    text = render(report(failed(BOOM, goodput=goodput)))
    assert "\n  time       90 % of 1 min 40 s was training" in text
    success = render(report(Verdict(Outcome.SUCCEEDED, "all done", goodput=goodput)))
    assert success.startswith("train.py succeeded: 90 % of 1 min 40 s was training")
    assert success.count("\n") == 1


# --- since when -------------------------------------------------------------------------------------------------------

# 2026-11-16 08:02:07 UTC is second 1000 of the agent's clock.
CLOCK = WallClock(offset_s=1794816127.0 - 1000.0, zone_s=-12600, began_at=1000.0)


def test_the_report_says_when_it_happened() -> None:
    """The time of the clock with its date and zone, and how long after the start; the run has its beginning."""
    text = render(report(failed(failure(seen_at=1032.0), failure(1, seen_at=1040.0)), clock=CLOCK))
    assert "\n  when       04:32:39 (2026-11-16, -03:30), 32 s after the start\n" in text
    assert "\n  run        run, role default, began 04:32:07 (2026-11-16, -03:30)\n" in text


def test_an_exception_counts_from_when_it_was_raised() -> None:
    """However long its process took to die."""
    made = report(failed(failure(seen_at=1032.0, raised_at=1002.5)), clock=CLOCK)
    assert "  when       04:32:09 (2026-11-16, -03:30), 2.5 s after the start\n" in render(made)
    data = to_dict(made)
    assert (data["began_at"], data["failed_at"]) == (1794816127.0, 1794816129.5)


def test_without_a_clock_no_time_is_said() -> None:
    """Nor is one made up; a run in which nothing failed has only its beginning."""
    text, data = render(report(failed(BOOM))), to_dict(report(failed(BOOM)))
    assert "\n  when " not in text
    assert "began" not in text
    assert (data["began_at"], data["failed_at"]) == (None, None)
    unbegun = msgspec.structs.replace(CLOCK, began_at=None)
    text = render(report(failed(failure(seen_at=1032.0)), clock=unbegun))
    assert "\n  when       04:32:39 (2026-11-16, -03:30)\n" in text
    data = to_dict(report(Verdict(Outcome.CANCELLED, "asked", signal=2), clock=CLOCK))
    assert (data["began_at"], data["failed_at"]) == (1794816127.0, None)
