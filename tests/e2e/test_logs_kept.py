"""Logs: where every line goes, that it goes there once and whole, and that no device can hurt a worker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.jobs import TENAX, Bench, is_alive, needs_root, small_disk, until

OURS_ALONE = ("journal.", "coordinator.")  # files that torchrun has not
TORCHRUN = Path(sys.executable).parent / "torchrun"

SPEAKS = """
    import sys
    from worker_kit import RANK
    print(f"out {RANK}", flush=True)
    print(f"err {RANK}", file=sys.stderr)
"""


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- where lines go ---------------------------------------------------------------------------------------------------


def test_the_layout_of_a_log_folder(bench: Bench) -> None:
    """One folder per run, named after it; in it one per attempt and local rank, and the journal."""
    done = bench.run(
        "--nproc-per-node", "2", "--redirects", "3", "--rdzv-id", "job7", "--log-dir", "a/logs", bench.script(SPEAKS)
    )
    assert (done.code, done.out) == (0, ""), done
    run = bench.run_dir("a/logs")
    assert re.fullmatch("job7_[0-9a-f]{8}", run.name)
    files = ["attempt_0/0/stderr.log", "attempt_0/0/stdout.log", "attempt_0/1/stderr.log", "attempt_0/1/stdout.log"]
    times = [f"journal.times/attempt_0.{rank}.{stream}" for rank in (0, 1) for stream in ("stderr", "stdout")]
    assert tree(run) == [*files, "coordinator.jsonl", "journal.jsonl", *times]
    assert [(run / file).read_text() for file in files] == ["err 0\n", "out 0\n", "err 1\n", "out 1\n"]
    assert any(str(run.relative_to(bench.home)) in line for line in done.said), "the console says where they are"


def test_two_runs_share_a_log_folder(bench: Bench) -> None:
    """The same name twice: neither touches the other's files."""
    script = bench.script(SPEAKS)
    for _ in range(2):
        assert bench.run("--redirects", "3", "--rdzv-id", "job7", "--log-dir", "logs", script).code == 0
    assert len(list((bench.home / "logs").iterdir())) == 2


def test_an_earlier_attempts_files_stay(bench: Bench) -> None:
    """A restart erases nothing."""
    script = bench.script("from worker_kit import ATTEMPT; print('attempt', ATTEMPT); raise SystemExit(ATTEMPT < 2)")
    assert bench.run("--max-restarts", "2", "--redirects", "1", "--log-dir", "logs", script).code == 0
    run = bench.run_dir()
    for attempt in range(3):
        assert (run / f"attempt_{attempt}/0/stdout.log").read_text() == f"attempt {attempt}\n"


def test_maps_with_ranks_of_two_digits(bench: Bench) -> None:
    """Twelve workers: '--redirects 10:1,11:3 --tee 9:2' means exactly that."""
    done = bench.run(
        *("--nproc-per-node", "12", "--redirects", "10:1,11:3", "--tee", "9:2", "--log-dir", "logs"),
        bench.script(SPEAKS),
    )
    assert done.code == 0
    run = bench.run_dir()
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


def test_only_chosen_ranks_on_the_console(bench: Bench) -> None:
    """'--local-ranks-filter' hides the others from the console, not from their files."""
    done = bench.run(
        *("--nproc-per-node", "3", "--tee", "3", "--local-ranks-filter", "0,2", "--log-dir", "logs"),
        bench.script(SPEAKS),
    )
    assert sorted(done.out.splitlines()) == ["[default0]:out 0", "[default2]:out 2"]
    assert "err 1" not in done.err
    assert (bench.run_dir() / "attempt_0/1/stdout.log").read_text() == "out 1\n"


def test_only_chosen_ranks_without_any_redirection(bench: Bench) -> None:
    """Rank 0 alone on the console is what people want most: '--local-ranks-filter 0' is enough for it."""
    done = bench.run("--nproc-per-node", "3", "--local-ranks-filter", "0", bench.script(SPEAKS))
    assert (done.code, done.out) == (0, "out 0\n")
    assert "err 1" not in done.err


@pytest.mark.skipif(not TORCHRUN.exists(), reason="needs torchrun")
@pytest.mark.parametrize(
    "words",
    [
        ["--tee", "0:1,1:3,3:3", "--redirects", "0:2,2:3", "--local-ranks-filter", "0,1,2"],
        ["--redirects", "1", "--role", "actor", "--local-ranks-filter", "1,3", "--duplicate-stderr-filters", "err 1"],
    ],
    ids=["maps", "one for all"],
)
def test_every_line_goes_where_torchrun_sends_it(bench: Bench, words: list[str]) -> None:
    """The same words: the same files with the same lines, and the same lines on the console."""
    script = bench.script(SPEAKS)
    found = []
    for program, log_dir in (([str(TORCHRUN)], "theirs"), ([*TENAX, "run"], "ours")):
        command = ["--nproc-per-node", "4", *words, "--log-dir", log_dir, script]
        done = bench.run(*command, program=program, env={"OMP_NUM_THREADS": "1"}, timeout_s=60)
        assert done.code == 0, done
        run = bench.run_dir(log_dir)
        files = {name: (run / name).read_text() for name in tree(run) if not name.startswith(OURS_ALONE)}
        written = {name: text for name, text in files.items() if text or "filtered" not in name}
        errors = [line for line in done.err.splitlines() if re.search(r"err \d$", line)]
        found.append((written, sorted(done.out.splitlines()), sorted(errors)))
    assert found[1] == found[0]


def test_lines_with_a_word_are_copied(bench: Bench) -> None:
    """'--duplicate-stdout-filters': matching lines of all teed workers, with their names, in one file."""
    script = bench.script(
        """
        import sys
        from worker_kit import RANK
        for word in ("loss=1", "noise", "a,b"):
            print(RANK, word, flush=True)
        print("loss on stderr", file=sys.stderr)
        """
    )
    done = bench.run(
        *("--nproc-per-node", "2", "--tee", "3", "--duplicate-stdout-filters", "loss,a,,b", "--log-dir", "logs"), script
    )
    assert done.code == 0
    copies = (bench.run_dir() / "attempt_0/filtered_stdout.log").read_text().splitlines()
    assert sorted(copies) == [f"[default{rank}]:{rank} {word}" for rank in range(2) for word in ("a,b", "loss=1")]


def test_the_prefix_is_the_users_choice(bench: Bench) -> None:
    """TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, with torchrun's three names."""
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}/${local_rank}> "}
    done = bench.run("--role", "actor", "--tee", "1", bench.script(SPEAKS), env=template)
    assert done.out == "<actor 0/0> out 0\n"


def test_nothing_is_kept_when_nothing_is_wanted(bench: Bench) -> None:
    """'--log-dir /dev/null' leaves no file anywhere."""
    done = bench.run("--log-dir", "/dev/null", bench.script(SPEAKS))
    assert (done.code, done.out) == (0, "out 0\n"), done
    assert os.listdir(bench.home / "tmp") == []


# --- whole, once, in order --------------------------------------------------------------------------------------------


def test_every_line_once_whole_and_in_order(bench: Bench) -> None:
    """Four workers, 20,000 lines each on one stream: each line once, whole, each worker's in order; files too."""
    script = bench.script(
        "from worker_kit import *; flood(1, 20_000, lambda number: f'{number:05} ' + 'x' * (number % 97))"
    )
    done = bench.run("--nproc-per-node", "4", "--tee", "1", "--log-dir", "logs", script)
    assert done.code == 0
    lines = done.out.splitlines()
    expected = [f"{number:05} " + "x" * (number % 97) for number in range(20_000)]
    for rank in range(4):
        mark = f"[default{rank}]:"
        assert [line[len(mark) :] for line in lines if line.startswith(mark)] == expected
        assert (bench.run_dir() / f"attempt_0/{rank}/stdout.log").read_text().splitlines() == expected
    assert len(lines) == 80_000


def test_unfinished_and_unreadable_lines_are_kept(bench: Bench) -> None:
    """A last line without its end, bytes that are no text, NUL, carriage returns: all of it, in the file as it was."""
    script = bench.script(
        r"""
        import os
        os.write(1, b"bad \xff\xfe\x00 bytes\r\nprogress 1\rprogress 2\rprogress 3\n")
        os.write(1, b"no end")
        """
    )
    assert bench.run("--tee", "1", "--log-dir", "logs", script).code == 0
    written = b"bad \xff\xfe\x00 bytes\r\nprogress 1\rprogress 2\rprogress 3\nno end"
    assert (bench.run_dir() / "attempt_0/0/stdout.log").read_bytes() == written
    shown = (bench.home / "stdout.0").read_bytes()
    assert shown.startswith(b"[default0]:bad \xff\xfe\x00 bytes\r\n")
    assert shown.endswith(b"[default0]:no end\n")


def test_nothing_is_lost_when_a_worker_is_killed(bench: Bench) -> None:
    """A worker prints a lot and is killed at once: its last line is in its file, on the console, in the report."""
    script = bench.script(
        """
        import os, signal
        from worker_kit import *
        flood(2, 20_000, lambda number: f"line {number}")
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = bench.run("--tee", "2", "--log-dir", "logs", script)
    assert done.code == 137
    assert len(re.findall(r"^\[default0\]:line \d+$", done.err, re.MULTILINE)) == 20_000
    assert (bench.run_dir() / "attempt_0/0/stderr.log").read_text().endswith("line 19999\n")
    assert "line 19999" in done.report


def test_plain_output_is_shown_as_it_is(bench: Bench) -> None:
    """Without '--tee' nothing is added to a line, and stdout and stderr stay apart."""
    done = bench.run("--nproc-per-node", "2", bench.script(SPEAKS))
    assert sorted(done.out.splitlines()) == ["out 0", "out 1"]
    assert {"err 0", "err 1"} <= set(done.err.splitlines())


# --- devices that fail ------------------------------------------------------------------------------------------------

PRINTS_A_LOT = """
    from worker_kit import *
    flood(1, 300_000, lambda number: f"{number:06} " + "x" * 60)
    note("printed")
    raise SystemExit(3 if ATTEMPT == 0 else 0)
"""


def test_a_stuck_console_delays_neither_worker_nor_restart_nor_file(bench: Bench) -> None:
    """Nobody reads the pipe behind stdout: workers print 20 MB, fail, are restarted and finish.

    The files have every line, and what the console did not take is said.
    """
    reader, writer = os.pipe()
    try:
        job = bench.start(
            "--max-restarts", "1", "--tee", "1", "--log-dir", "logs", bench.script(PRINTS_A_LOT), stdout=writer
        )
        for attempt in range(2):
            bench.note("printed", attempt=attempt, timeout_s=10)
        done = job.wait()
    finally:
        os.close(writer)
        os.close(reader)
    assert done.code == 0, done
    assert "not shown" in done.err, done
    for attempt in range(2):
        lines = (bench.run_dir() / f"attempt_{attempt}/0/stdout.log").read_bytes().splitlines()
        assert [line[:6] for line in lines] == [b"%06d" % number for number in range(300_000)]


def test_a_console_that_is_stuck_everywhere_does_not_hold_the_end(bench: Bench) -> None:
    """stdout and stderr are the same unread pipe: the job still ends, within seconds, with the worker's code."""
    reader, writer = os.pipe()
    began = time.monotonic()
    try:
        code = bench.run("--nproc-per-node", "2", bench.script(PRINTS_A_LOT), stdout=writer, stderr=writer).code
    finally:
        os.close(writer)
        os.close(reader)
    assert code == 3
    assert time.monotonic() - began < 15


def test_a_reader_that_leaves(bench: Bench) -> None:
    """'tenax run … | head -1': the job goes on to its end."""
    bench.script("from worker_kit import *; flood(1, 50_000, str); note('printed')")
    shell = f"{' '.join(TENAX)} run --log-dir logs --tee 1 train.py 2>err | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=bench.home, env=bench.environ, capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "[default0]:0\n0\n", (bench.home / "err").read_text()
    assert len((bench.run_dir() / "attempt_0/0/stdout.log").read_text().splitlines()) == 50_000


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(bench: Bench, streams: str) -> None:
    """Started without stdout, stderr or both, as some service managers do: the job runs, files are kept."""
    script = bench.script(SPEAKS + "    assert open('/dev/null').fileno() > 2\n")
    command = f'exec "$@" {streams}'
    done = bench.run(
        *("--nproc-per-node", "2", "--tee", "3", "--log-dir", "logs"),
        script,
        program=["sh", "-c", command, "sh", *TENAX, "run"],
    )
    assert done.code == 0, done
    for rank in range(2):
        assert (bench.run_dir() / f"attempt_0/{rank}/stdout.log").read_text() == f"out {rank}\n"
        assert (bench.run_dir() / f"attempt_0/{rank}/stderr.log").read_text() == f"err {rank}\n"
    if "2>" not in streams:
        assert "the run succeeded" in done.err


def test_a_console_on_a_full_device(bench: Bench) -> None:
    """stdout is /dev/full: workers do not fail, and stderr says what was not shown and why."""
    with open("/dev/full", "wb") as full:
        done = bench.run("--nproc-per-node", "2", bench.script(SPEAKS), stdout=full)
    assert done.code == 0, done
    assert re.search(r"2 lines \(12 bytes\) were not shown: No space left on device", done.err), done


def test_everything_on_a_full_device(bench: Bench) -> None:
    """stdout and stderr are /dev/full: the exit code is all there is, and it is right."""
    with open("/dev/full", "wb") as full:
        assert bench.run(bench.script("raise SystemExit(6)"), stdout=full, stderr=full).code == 6


@needs_root
def test_a_full_disk_costs_lines_not_the_job(bench: Bench) -> None:
    """1 MiB for the logs, 2 MB of output: no worker fails, and the loss is said once and counted at the end."""
    script = bench.script("from worker_kit import *; flood(1, 20_000, lambda number: f'{number:06} ' + 'x' * 92)")
    with small_disk(bench.home / "disk", "1m") as disk:
        done = bench.run("--nproc-per-node", "2", "--redirects", "3", "--log-dir", str(disk), script)
        assert done.code == 0, done
        sizes = [path.stat().st_size for path in disk.rglob("stdout.log")]
    assert sum("No space left on device" in line for line in done.said) == 2, done
    (missing,) = re.findall(r"tenax: (\d+) bytes are missing in ", done.err)
    # What is in the files are whole blocks of output and, at most, one line that tells of the gap.
    assert 4_000_000 - sum(sizes) <= int(missing) <= 4_000_000 - sum(sizes) + 1000


@needs_root
def test_a_disk_that_was_full_from_the_start(bench: Bench) -> None:
    """Not even a folder can be made: the job runs without logs, and that is said."""
    with small_disk(bench.home / "disk", "64k") as disk:
        with (disk / "fill").open("wb") as fill:
            fill.write(b"x" * (64 << 10))
        done = bench.run("--redirects", "3", "--log-dir", str(disk / "logs"), bench.script("print('hello')"))
    assert done.code == 0, done
    assert "No space left on device" in done.err


def test_a_log_folder_that_vanishes(bench: Bench) -> None:
    """Somebody removes the log folder while the job runs and restarts: the job goes on."""
    script = bench.script(
        "from worker_kit import *; ready(); wait_for('go'); print('hello'); raise SystemExit(ATTEMPT == 0)"
    )
    job = bench.start("--max-restarts", "1", "--redirects", "3", "--log-dir", "logs", script)
    bench.pids(1)
    subprocess.run(["rm", "-r", str(bench.home / "logs")], check=True)
    bench.tell("go", attempt=0)
    bench.pids(1, attempt=1)
    bench.tell("go", attempt=1)
    done = job.wait()
    assert done.code == 0, done


def test_a_worker_that_closes_its_streams(bench: Bench) -> None:
    """A daemonising script closes everything: the job waits for the process, not for its pipes."""
    script = bench.script(
        "import os; from worker_kit import *; os.close(1); os.close(2); ready(); wait_for('go'); note('done')"
    )
    job = bench.start("--tee", "3", script)
    bench.pids(1)
    bench.tell("go")
    assert job.wait().code == 0
    assert bench.noted("done")


def test_output_of_descendants_is_kept_to_the_end(bench: Bench) -> None:
    """A child that outlives its worker for a moment prints into the same log until it is ended."""
    script = bench.script(
        """
        import os, signal
        from worker_kit import *
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, lambda *_: (print("last words of the child", flush=True), os._exit(0)))
            note("child")
            while True:
                signal.pause()
        wait_for("child")
        ready()
        stay()
        """
    )
    job = bench.start("--redirects", "3", "--log-dir", "logs", script)
    bench.pids(1)
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    log = bench.run_dir() / "attempt_0/0/stdout.log"
    until(lambda: "last words of the child" in log.read_text(), "the child's last words", timeout_s=1)


@pytest.mark.parametrize("words", [(), ("--tee", "3"), ("--tee", "3", "--redirects", "3")], ids=" ".join)
def test_the_end_is_announced_below_all_output(bench: Bench, words: tuple[str, ...]) -> None:
    """However late the log writer is: what workers wrote, also without a newline, stands above the last line."""
    script = bench.script("from worker_kit import *; ready(); wait_for('go', 0); print(f'rank {RANK} ends', end='')")
    job = bench.start("--nproc-per-node", "2", "--log-dir", "logs", *words, script, stderr=subprocess.STDOUT)
    pids = bench.pids(2)
    (log_writer,) = [pid for pid, command in bench.alive().items() if "tenax-logs" in command]
    os.kill(log_writer, signal.SIGSTOP)
    try:
        bench.tell("go")
        until(lambda: not any(map(is_alive, pids)), "the end of the workers")
        journal = bench.run_dir() / "journal.jsonl"
        until(lambda: "Finish" in journal.read_text(), lambda: f"the end of the run in {journal.read_text()}")
    finally:
        os.kill(log_writer, signal.SIGCONT)
    done = job.wait()
    lines = done.out.splitlines()
    assert lines[-1] == "tenax: the run succeeded: all 2 workers succeeded", done
    assert sum(line.endswith(("rank 0 ends", "rank 1 ends")) for line in lines) == 2, done
