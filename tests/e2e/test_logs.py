"""Logs: where each line goes, once and complete, and that no device delays or fails a worker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.jobs import TENAX, Runner, is_alive, needs_root, small_disk, until

OURS_ALONE = ("journal.", "coordinator.")  # files that torchrun does not write
TORCHRUN = Path(sys.executable).parent / "torchrun"

PRINTS = """
    import sys
    from worker_kit import RANK
    print(f"out {RANK}", flush=True)
    print(f"err {RANK}", file=sys.stderr)
"""


def tree(folder: Path) -> list[str]:
    """Return the files, except those of workers that note how long they import, which takes long on a busy machine."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "progress"]
    return sorted(str(path.relative_to(folder)) for path in files)


# --- where lines go ---------------------------------------------------------------------------------------------------


def test_a_log_folder_has_one_folder_per_run_attempt_and_local_rank(runner: Runner) -> None:
    """And the journals."""
    done = runner.run(
        "--nproc-per-node", "2", "--redirects", "3", "--rdzv-id", "job7", "--log-dir", "a/logs", runner.script(PRINTS)
    )
    assert (done.code, done.out) == (0, ""), done
    run = runner.run_dir("a/logs")
    assert re.fullmatch("job7_[0-9a-f]{4}", run.name)
    files = ["attempt_0/0/stderr.log", "attempt_0/0/stdout.log", "attempt_0/1/stderr.log", "attempt_0/1/stdout.log"]
    times = [f"journal.times/attempt_0.{rank}.{stream}" for rank in (0, 1) for stream in ("stderr", "stdout")]
    assert tree(run) == [*files, "coordinator.jsonl", "journal.jsonl", *times]
    assert [(run / file).read_text() for file in files] == ["err 0\n", "out 0\n", "err 1\n", "out 1\n"]
    assert any(str(run.relative_to(runner.home)) in line for line in done.messages), "the console shows the folder"


def test_two_runs_with_the_same_id_have_separate_folders(runner: Runner) -> None:
    script = runner.script(PRINTS)
    for _ in range(2):
        assert runner.run("--redirects", "3", "--rdzv-id", "job7", "--log-dir", "logs", script).code == 0
    assert len(list((runner.home / "logs").iterdir())) == 2


def test_files_of_earlier_attempts_are_kept(runner: Runner) -> None:
    script = runner.script("from worker_kit import ATTEMPT; print('attempt', ATTEMPT); raise SystemExit(ATTEMPT < 2)")
    assert runner.run("--max-restarts", "2", "--redirects", "1", "--log-dir", "logs", script).code == 0
    run = runner.run_dir()
    for attempt in range(3):
        assert (run / f"attempt_{attempt}/0/stdout.log").read_text() == f"attempt {attempt}\n"


def test_redirects_and_tee_accept_ranks_of_two_digits(runner: Runner) -> None:
    done = runner.run(
        *("--nproc-per-node", "12", "--redirects", "10:1,11:3", "--tee", "9:2", "--log-dir", "logs"),
        runner.script(PRINTS),
    )
    assert done.code == 0
    run = runner.run_dir()
    assert tree(run) == [
        "attempt_0/10/stdout.log",
        "attempt_0/11/stderr.log",
        "attempt_0/11/stdout.log",
        "attempt_0/9/stderr.log",
        "coordinator.jsonl",
        "journal.jsonl",
        "journal.times/attempt_0.10.stdout",
        "journal.times/attempt_0.11.stderr",
        "journal.times/attempt_0.11.stdout",
        "journal.times/attempt_0.9.stderr",
    ]
    assert set(done.out.splitlines()) == {f"out {rank}" for rank in range(10)}
    errors = {line for line in done.err.splitlines() if "err" in line and not line.startswith("tenax:")}
    assert errors == {*(f"err {rank}" for rank in range(9)), "err 10", "[default9]:err 9"}


def test_the_local_ranks_filter_applies_to_the_console_not_to_files(runner: Runner) -> None:
    done = runner.run(
        *("--nproc-per-node", "3", "--tee", "3", "--local-ranks-filter", "0,2", "--log-dir", "logs"),
        runner.script(PRINTS),
    )
    assert sorted(done.out.splitlines()) == ["[default0]:out 0", "[default2]:out 2"]
    assert "err 1" not in done.err
    assert (runner.run_dir() / "attempt_0/1/stdout.log").read_text() == "out 1\n"


def test_the_local_ranks_filter_works_without_tee(runner: Runner) -> None:
    done = runner.run("--nproc-per-node", "3", "--local-ranks-filter", "0", runner.script(PRINTS))
    assert (done.code, done.out) == (0, "out 0\n")
    assert "err 1" not in done.err


@pytest.mark.skipif(not TORCHRUN.exists(), reason="needs torchrun")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--tee", "0:1,1:3,3:3", "--redirects", "0:2,2:3", "--local-ranks-filter", "0,1,2"],
        ["--redirects", "1", "--role", "actor", "--local-ranks-filter", "1,3", "--duplicate-stderr-filters", "err 1"],
    ],
    ids=["maps", "one for all"],
)
def test_files_and_console_lines_equal_those_of_torchrun(runner: Runner, arguments: list[str]) -> None:
    """With the same arguments."""
    script = runner.script(PRINTS)
    found = []
    for program, log_dir in (([str(TORCHRUN)], "theirs"), ([*TENAX, "run"], "ours")):
        command = ["--nproc-per-node", "4", *arguments, "--log-dir", log_dir, script]
        done = runner.run(*command, program=program, env={"OMP_NUM_THREADS": "1"}, timeout_s=60)
        assert done.code == 0, done
        run = runner.run_dir(log_dir)
        files = {name: (run / name).read_text() for name in tree(run) if not name.startswith(OURS_ALONE)}
        written = {name: text for name, text in files.items() if text or "filtered" not in name}
        errors = [line for line in done.err.splitlines() if re.search(r"err \d$", line)]
        found.append((written, sorted(done.out.splitlines()), sorted(errors)))
    assert found[1] == found[0]


def test_duplicate_filters_copy_matching_lines_of_all_workers(runner: Runner) -> None:
    """With prefixes, into one file."""
    script = runner.script(
        """
        import sys
        from worker_kit import RANK
        for word in ("loss=1", "noise", "a,b"):
            print(RANK, word, flush=True)
        print("loss on stderr", file=sys.stderr)
        """
    )
    done = runner.run(
        *("--nproc-per-node", "2", "--tee", "3", "--duplicate-stdout-filters", "loss,a,,b", "--log-dir", "logs"), script
    )
    assert done.code == 0
    copies = (runner.run_dir() / "attempt_0/filtered_stdout.log").read_text().splitlines()
    assert sorted(copies) == [f"[default{rank}]:{rank} {word}" for rank in range(2) for word in ("a,b", "loss=1")]


def test_the_prefix_template_is_used(runner: Runner) -> None:
    """With torchrun's three names."""
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}/${local_rank}> "}
    done = runner.run("--role", "actor", "--tee", "1", runner.script(PRINTS), env=template)
    assert done.out == "<actor 0/0> out 0\n"


def test_log_dir_dev_null_writes_no_file(runner: Runner) -> None:
    done = runner.run("--log-dir", "/dev/null", runner.script(PRINTS))
    assert (done.code, done.out) == (0, "out 0\n"), done
    assert os.listdir(runner.home / "tmp") == []


# --- complete, once, in order ----------------------------------------------------------------------------------------


def test_every_line_is_written_once_completely_and_in_order(runner: Runner) -> None:
    """Four workers with 20,000 lines each, on the console and in files."""
    script = runner.script(
        "from worker_kit import *; flood(1, 20_000, lambda number: f'{number:05} ' + 'x' * (number % 97))"
    )
    done = runner.run("--nproc-per-node", "4", "--tee", "1", "--log-dir", "logs", script)
    assert done.code == 0
    lines = done.out.splitlines()
    expected = [f"{number:05} " + "x" * (number % 97) for number in range(20_000)]
    for rank in range(4):
        mark = f"[default{rank}]:"
        assert [line[len(mark) :] for line in lines if line.startswith(mark)] == expected
        assert (runner.run_dir() / f"attempt_0/{rank}/stdout.log").read_text().splitlines() == expected
    assert len(lines) == 80_000


def test_incomplete_and_binary_lines_are_kept(runner: Runner) -> None:
    """A last line without newline, invalid UTF-8, NUL and carriage returns are unchanged in the file."""
    script = runner.script(
        r"""
        import os
        os.write(1, b"bad \xff\xfe\x00 bytes\r\nprogress 1\rprogress 2\rprogress 3\n")
        os.write(1, b"no end")
        """
    )
    assert runner.run("--tee", "1", "--log-dir", "logs", script).code == 0
    written = b"bad \xff\xfe\x00 bytes\r\nprogress 1\rprogress 2\rprogress 3\nno end"
    assert (runner.run_dir() / "attempt_0/0/stdout.log").read_bytes() == written
    shown = (runner.home / "stdout.0").read_bytes()
    assert shown.startswith(b"[default0]:bad \xff\xfe\x00 bytes\r\n")
    assert shown.endswith(b"[default0]:no end\n")


def test_no_line_is_lost_when_a_worker_is_killed(runner: Runner) -> None:
    """Its last line is in its file, on the console and in the report."""
    script = runner.script(
        """
        import os, signal
        from worker_kit import *
        flood(2, 20_000, lambda number: f"line {number}")
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = runner.run("--tee", "2", "--log-dir", "logs", script)
    assert done.code == 137
    assert len(re.findall(r"^\[default0\]:line \d+$", done.err, re.MULTILINE)) == 20_000
    assert (runner.run_dir() / "attempt_0/0/stderr.log").read_text().endswith("line 19999\n")
    assert "line 19999" in done.report


def test_without_tee_output_is_unchanged(runner: Runner) -> None:
    """stdout and stderr stay separate."""
    done = runner.run("--nproc-per-node", "2", runner.script(PRINTS))
    assert sorted(done.out.splitlines()) == ["out 0", "out 1"]
    assert {"err 0", "err 1"} <= set(done.err.splitlines())


# --- devices that fail ------------------------------------------------------------------------------------------------

PRINTS_A_LOT = """
    from worker_kit import *
    flood(1, 300_000, lambda number: f"{number:06} " + "x" * 60)
    note("printed")
    raise SystemExit(3 if ATTEMPT == 0 else 0)
"""


def test_a_blocked_console_does_not_delay_workers_restarts_or_files(runner: Runner) -> None:
    """No process reads the pipe at stdout, while workers print 20 MB, fail, are restarted and finish.

    The files have every line, and a message counts the lines that were not shown.
    """
    reader, writer = os.pipe()
    try:
        job = runner.start(
            "--max-restarts", "1", "--tee", "1", "--log-dir", "logs", runner.script(PRINTS_A_LOT), stdout=writer
        )
        for attempt in range(2):
            runner.note("printed", attempt=attempt, timeout_s=10)
        done = job.wait()
    finally:
        os.close(writer)
        os.close(reader)
    assert done.code == 0, done
    assert "not shown" in done.err, done
    for attempt in range(2):
        lines = (runner.run_dir() / f"attempt_{attempt}/0/stdout.log").read_bytes().splitlines()
        assert [line[:6] for line in lines] == [b"%06d" % number for number in range(300_000)]


def test_a_job_ends_although_stdout_and_stderr_are_blocked(runner: Runner) -> None:
    reader, writer = os.pipe()
    began = time.monotonic()
    try:
        code = runner.run("--nproc-per-node", "2", runner.script(PRINTS_A_LOT), stdout=writer, stderr=writer).code
    finally:
        os.close(writer)
        os.close(reader)
    assert code == 3
    assert time.monotonic() - began < 15


def test_a_job_continues_when_the_reader_of_its_output_exits(runner: Runner) -> None:
    """``| head -1``"""
    runner.script("from worker_kit import *; flood(1, 50_000, str); note('printed')")
    shell = f"{' '.join(TENAX)} run --log-dir logs --tee 1 train.py 2>err | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=runner.home, env=runner.environ, capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "[default0]:0\n0\n", (runner.home / "err").read_text()
    assert len((runner.run_dir() / "attempt_0/0/stdout.log").read_text().splitlines()) == 50_000


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_job_runs_with_closed_standard_streams(runner: Runner, streams: str) -> None:
    """As some service managers start it; files are kept."""
    script = runner.script(PRINTS + "    assert open('/dev/null').fileno() > 2\n")
    command = f'exec "$@" {streams}'
    done = runner.run(
        *("--nproc-per-node", "2", "--tee", "3", "--log-dir", "logs"),
        script,
        program=["sh", "-c", command, "sh", *TENAX, "run"],
    )
    assert done.code == 0, done
    for rank in range(2):
        assert (runner.run_dir() / f"attempt_0/{rank}/stdout.log").read_text() == f"out {rank}\n"
        assert (runner.run_dir() / f"attempt_0/{rank}/stderr.log").read_text() == f"err {rank}\n"
    if "2>" not in streams:
        assert "the run succeeded" in done.err


def test_lines_that_cannot_be_shown_are_counted_on_stderr(runner: Runner) -> None:
    """stdout is /dev/full."""
    with open("/dev/full", "wb") as full:
        done = runner.run("--nproc-per-node", "2", runner.script(PRINTS), stdout=full)
    assert done.code == 0, done
    assert re.search(r"2 lines \(12 bytes\) were not shown: No space left on device", done.err), done


def test_the_exit_code_is_right_if_no_stream_can_be_written(runner: Runner) -> None:
    with open("/dev/full", "wb") as full:
        assert runner.run(runner.script("raise SystemExit(6)"), stdout=full, stderr=full).code == 6


@needs_root
def test_a_full_disk_does_not_fail_the_job(runner: Runner) -> None:
    """The loss is reported once, and counted at the end."""
    script = runner.script("from worker_kit import *; flood(1, 20_000, lambda number: f'{number:06} ' + 'x' * 92)")
    with small_disk(runner.home / "disk", "1m") as disk:
        done = runner.run("--nproc-per-node", "2", "--redirects", "3", "--log-dir", str(disk), script)
        assert done.code == 0, done
        sizes = [path.stat().st_size for path in disk.rglob("stdout.log")]
    assert sum("No space left on device" in line for line in done.messages) == 2, done
    (missing,) = re.findall(r"tenax: (\d+) bytes are missing in ", done.err)
    # The files contain whole blocks of output and at most one line about the gap.
    assert 4_000_000 - sum(sizes) <= int(missing) <= 4_000_000 - sum(sizes) + 1000


@needs_root
def test_a_job_runs_without_logs_if_no_folder_can_be_created(runner: Runner) -> None:
    with small_disk(runner.home / "disk", "64k") as disk:
        with (disk / "fill").open("wb") as fill:
            fill.write(b"x" * (64 << 10))
        done = runner.run("--redirects", "3", "--log-dir", str(disk / "logs"), runner.script("print('hello')"))
    assert done.code == 0, done
    assert "No space left on device" in done.err


def test_a_job_continues_when_its_log_folder_is_removed(runner: Runner) -> None:
    script = runner.script(
        "from worker_kit import *; ready(); wait_for('go'); print('hello'); raise SystemExit(ATTEMPT == 0)"
    )
    job = runner.start("--max-restarts", "1", "--redirects", "3", "--log-dir", "logs", script)
    runner.pids(1)
    subprocess.run(["rm", "-r", str(runner.home / "logs")], check=True)
    runner.leave_note("go", attempt=0)
    runner.pids(1, attempt=1)
    runner.leave_note("go", attempt=1)
    done = job.wait()
    assert done.code == 0, done


def test_a_worker_may_close_its_streams(runner: Runner) -> None:
    """The job waits for the process, not for its pipes."""
    script = runner.script(
        "import os; from worker_kit import *; os.close(1); os.close(2); ready(); wait_for('go'); note('done')"
    )
    job = runner.start("--tee", "3", script)
    runner.pids(1)
    runner.leave_note("go")
    assert job.wait().code == 0
    assert runner.noted("done")


def test_output_of_children_is_kept_until_they_are_stopped(runner: Runner) -> None:
    script = runner.script(
        """
        import os, signal
        from worker_kit import *
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, lambda *_: (print("last line of the child", flush=True), os._exit(0)))
            note("child")
            while True:
                signal.pause()
        wait_for("child")
        ready()
        stay()
        """
    )
    job = runner.start("--redirects", "3", "--log-dir", "logs", script)
    runner.pids(1)
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    log = runner.run_dir() / "attempt_0/0/stdout.log"
    until(lambda: "last line of the child" in log.read_text(), "the last line of the child", timeout_s=1)


@pytest.mark.parametrize("arguments", [(), ("--tee", "3"), ("--tee", "3", "--redirects", "3")], ids=" ".join)
def test_the_final_message_comes_after_all_output(runner: Runner, arguments: tuple[str, ...]) -> None:
    """Even if the log writer is late and the output has no newline."""
    script = runner.script("from worker_kit import *; ready(); wait_for('go', 0); print(f'rank {RANK} ends', end='')")
    job = runner.start("--nproc-per-node", "2", "--log-dir", "logs", *arguments, script, stderr=subprocess.STDOUT)
    pids = runner.pids(2)
    (log_writer,) = [pid for pid, command in runner.alive().items() if "tenax-logs" in command]
    os.kill(log_writer, signal.SIGSTOP)
    try:
        runner.leave_note("go")
        until(lambda: not any(map(is_alive, pids)), "the end of the workers")
        journal = runner.run_dir() / "journal.jsonl"
        until(lambda: "Finish" in journal.read_text(), lambda: f"the end of the run in {journal.read_text()}")
    finally:
        os.kill(log_writer, signal.SIGCONT)
    done = job.wait()
    lines = done.out.splitlines()
    assert lines[-1] == "tenax: the run succeeded: all 2 workers succeeded", done
    assert sum(line.endswith(("rank 0 ends", "rank 1 ends")) for line in lines) == 2, done
