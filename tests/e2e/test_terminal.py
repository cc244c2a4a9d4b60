"""The terminal: the live line, colours and keys, and plain lines in files."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time

import pyte
import pytest

from kit.jobs import TENAX, Runner, Screen, Terminal, is_alive

ESCAPE = "\x1b"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
FAILS_ONCE = """
    import sys
    from worker_kit import *
    ready()
    print("hello from", RANK, flush=True)
    note("printed")
    if RANK == 1 and ATTEMPT == 0:
        wait_for("printed", rank=0)
        sys.exit(3)
    wait_for("go", rank=0)
"""
FAILS = "import sys; sys.exit('on purpose')"
IGNORES_SIGNALS = "from worker_kit import *; ignore('SIGTERM', 'SIGINT', 'SIGHUP'); ready(); stay()"
SLEEPS = "from worker_kit import *; ready(); stay()"


# --- the live line ----------------------------------------------------------------------------------------------------


def test_the_live_line_shows_phase_generation_workers_and_restarts(runner: Runner) -> None:
    terminal = runner.terminal(
        "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-id", "job7", runner.script(FAILS_ONCE)
    )
    terminal.until("tenax job7: generation 1 running, 2 of 2 workers, 1 of 1 restarts left")
    runner.pids(2, attempt=1)
    terminal.until("tenax job7: generation 2 running, 2 of 2 workers, 0 of 1 restarts left")
    runner.leave_note("go", attempt=1)
    assert terminal.wait() == 0
    assert "tenax: the run succeeded" in terminal.seen


def test_the_live_line_counts_the_time_and_the_seconds_before_sigkill(runner: Runner) -> None:
    script = runner.script(IGNORES_SIGNALS)
    terminal = runner.terminal("--rdzv-id", "job7", script)
    runner.pids(1)
    terminal.until("tenax job7: generation 1 running, 1 of 1 workers, 0:01")
    terminal.type(b"\x03")
    terminal.until("waiting for local rank 0, SIGKILL in 29 s")
    terminal.type(b"\x03")
    assert terminal.wait() == 130


def test_the_seconds_before_sigkill_are_shown_however_many_workers_are_left(runner: Runner) -> None:
    terminal = runner.terminal(
        *("--nproc-per-node", "4", "--max-restarts", "3", "--rdzv-id", "5d40e34c"), runner.script(IGNORES_SIGNALS)
    )
    runner.pids(4)
    terminal.type(b"\x03")
    terminal.until("tenax 5d40e34c: generation 1 stopping, waiting for local ranks 0 to 3, SIGKILL in 29 s")
    terminal.type(b"\x03")
    assert terminal.wait() == 130


def test_the_live_line_shows_the_step_and_its_duration(runner: Runner) -> None:
    script = runner.script(
        """
        import worker_kit as kit
        from tenax import progress
        progress.step(1233)
        progress.step(1234)
        with progress.phase("checkpoint"):
            kit.note("ready")
            kit.wait_for("go")
        """
    )
    terminal = runner.terminal("--rdzv-id", "job7", script)
    runner.note("ready")
    terminal.until("tenax job7: generation 1 running, 1 of 1 workers, step 1,234 (")
    terminal.until(" ms), checkpoint, 0:")
    runner.leave_note("go")
    assert terminal.wait() == 0


def test_stdout_and_stderr_of_a_worker_keep_their_order(runner: Runner) -> None:
    """Both go to the terminal. A failure is still explained by what stderr shows."""
    script = runner.script(
        """
        import os
        for number in range(200):
            os.write(1, f"out {number}\\n".encode())
            os.write(2, f"err {number}\\n".encode())
        os.environ.pop("TORCHELASTIC_ERROR_FILE")
        os.execvp("python3", ["python3", "-c", "raise ValueError('on purpose')"])
        """
    )
    terminal = runner.terminal(script, env={"NO_COLOR": "1"})
    assert terminal.wait() == 1
    shown = re.findall(r"(out|err) (\d+)\r\n", terminal.seen)
    assert shown == [(name, str(number)) for number in range(200) for name in ("out", "err")]
    assert "ValueError: on purpose" in terminal.seen.partition("First cause")[2]


BARS = """
    import os, sys
    from rich.progress import BarColumn, Progress, TextColumn
    from tqdm import tqdm
    if os.environ.get("RANK") == "1":
        sys.exit()
    print("size", *os.get_terminal_size(), sys.stdout.isatty(), sys.stderr.isatty())
    for _ in tqdm(range(40), desc="tqdm", bar_format="{l_bar}{bar}|{n_fmt}", mininterval=0, file=sys.stderr):
        pass
    with Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}")) as progress:
        tasks = [progress.add_task(f"[red]rich {number}", total=20) for number in range(2)]
        for step in range(20):
            for task in tasks:
                progress.advance(task)
            if step == 10:
                progress.console.print("half of it")
    answer = input("continue? ")
    print(f"answered {answer}")
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_bars_and_prompts_look_as_without_a_launcher(runner: Runner, workers: int) -> None:
    """One worker, or the only one whose output is shown. Compared on the screen of a terminal."""
    script = runner.script(BARS)
    flags = ("--nproc-per-node", str(workers), "--local-ranks-filter", "0", "--redirects", "1:3")
    screens = []
    for terminal in (
        Terminal([sys.executable, script], runner, columns=240),
        runner.terminal(*(flags if workers > 1 else ()), script, columns=240, env={"NO_COLOR": ""}),
    ):
        terminal.until("continue? ")
        terminal.type(b"yes\n")
        assert terminal.wait() == 0, terminal.seen
        screen = pyte.Screen(240, 30)
        pyte.Stream(screen).feed(terminal.seen)
        screens.append([row.rstrip() for row in screen.display if row.strip() and not row.startswith("tenax: ")])
    alone, launched = screens
    assert alone[0] == "size 240 30 True True"
    assert launched == alone


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["colours", "NO_COLOR"])
def test_lines_about_a_failure_are_red_and_success_is_green(runner: Runner, environment: dict[str, str]) -> None:
    arguments = ("--nproc-per-node", "2", "--max-restarts", "1", runner.script(FAILS_ONCE))
    terminal = runner.terminal(*arguments, env=environment)
    runner.pids(2, attempt=1)
    runner.leave_note("go", attempt=1)
    assert terminal.wait() == 0
    red, green, end = ("", "", "") if environment else (f"{ESCAPE}[31m", f"{ESCAPE}[32m", f"{ESCAPE}[0m")
    failed = re.escape(red) + r"tenax: rank 1 \(pid \d+\) exited with code 3; [^\x1b]*" + re.escape(end)
    assert re.search(failed, terminal.seen)
    assert f"{green}tenax: the run succeeded: all 2 workers succeeded{end}" in terminal.seen
    assert bool(COLOUR.search(terminal.seen)) is not bool(environment)


def test_the_live_line_names_workers_that_have_not_exited(runner: Runner) -> None:
    script = runner.script("from worker_kit import *\nif RANK: ignore('SIGINT')\nready(); stay()")
    terminal = runner.terminal("--nproc-per-node", "2", "--rdzv-id", "job7", script)
    runner.pids(2)
    terminal.type(b"\x03")
    terminal.until("tenax job7: generation 1 stopping, waiting for local rank 1")
    terminal.type(b"\x03")
    assert terminal.wait() == 130


def test_the_live_line_is_erased_before_other_output(runner: Runner) -> None:
    """No line is mixed with it, and it is gone at the end."""
    terminal = runner.terminal(
        "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-id", "job7", runner.script(FAILS_ONCE)
    )
    runner.pids(2, attempt=1)
    runner.leave_note("go", attempt=1)
    assert terminal.wait() == 0
    screen = [COLOUR.sub("", row.rpartition("\r" + ESCAPE + "[K")[2]) for row in terminal.seen.split("\r\n")]
    assert not [row for row in screen if row.startswith("tenax job7:")], screen
    assert sorted(row for row in screen if row.startswith("hello")) == ["hello from 0"] * 2 + ["hello from 1"] * 2
    assert all(re.match("tenax: |hello from [01]$|$", row) for row in screen), screen


def test_the_live_line_is_truncated_to_one_row(runner: Runner) -> None:
    """So that it can be erased completely."""
    terminal = runner.terminal(runner.script(SLEEPS), columns=24)
    terminal.until("generat")
    terminal.process.terminate()
    terminal.wait()
    for row in re.split(r"\r\n|\r" + re.escape(ESCAPE + "[K"), terminal.seen):
        if re.match("tenax [0-9a-f]{8}:", row):
            assert len(row) < 24


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_a_real_screen_shows_output_above_one_live_line(runner: Runner) -> None:
    """As drawn by tmux; at the end the live line is gone."""
    runner.script(FAILS_ONCE)
    command = (
        f"{' '.join(TENAX)} run --nproc-per-node 2 --max-restarts 1 --rdzv-id job7 train.py; echo code $?; exec cat"
    )
    screen = Screen(runner, ["sh", "-c", command], columns=240)
    try:
        rows = screen.until("generation 2 running, 2 of 2 workers")
        live = r"tenax job7: generation 2 running, 2 of 2 workers, 0 of 1 restarts left, \d:\d\d"
        assert re.fullmatch(live, rows[-1])
        assert sum("tenax job7:" in row for row in rows) == 1, "one live line, the last row"
        runner.pids(2, attempt=1)
        runner.leave_note("go", attempt=1)
        rows = screen.until("code 0")
        assert not [row for row in rows if "tenax job7:" in row], rows
        assert rows.count("hello from 0") == 2
        end = rows.index("tenax: the run succeeded: all 2 workers succeeded")
        cost = "".join(rows[end + 1 : -1])  # wrapped at the edge of the screen
        assert re.fullmatch(r"tenax: \d+ % of .* was training; .*", cost), rows
        assert rows[-1] == "code 0"
    finally:
        screen.close()


# --- colour -----------------------------------------------------------------------------------------------------------


def test_the_report_is_coloured_on_a_terminal(runner: Runner) -> None:
    terminal = runner.terminal(runner.script(FAILS))
    assert terminal.wait() == 1
    assert COLOUR.search(terminal.seen)
    assert "train.py failed: rank 0 on" in COLOUR.sub("", terminal.seen)


@pytest.mark.parametrize("variable", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_color_and_dumb_terminals_disable_colour(runner: Runner, variable: dict[str, str]) -> None:
    terminal = runner.terminal(runner.script(FAILS), env=variable)
    assert terminal.wait() == 1
    assert not COLOUR.search(terminal.seen)


def test_a_dumb_terminal_gets_no_escape_code(runner: Runner) -> None:
    """And no live line, because it cannot be erased."""
    terminal = runner.terminal(runner.script(FAILS), env={"TERM": "dumb"})
    assert terminal.wait() == 1
    assert ESCAPE not in terminal.seen


def test_a_file_gets_plain_lines(runner: Runner) -> None:
    """No escape code, carriage return or live line, and no line twice."""
    job = runner.start("--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-id", "job7", runner.script(FAILS_ONCE))
    runner.pids(2, attempt=1)
    runner.leave_note("go", attempt=1)
    done = job.wait()
    assert done.code == 0
    assert ESCAPE not in done.err + done.out
    assert "\r" not in done.err + done.out
    assert "tenax job7:" not in done.err
    assert all(line.startswith("tenax: ") for line in done.err.splitlines()), done
    assert len(done.err.splitlines()) == len(set(done.err.splitlines()))


# --- keys -------------------------------------------------------------------------------------------------------------


def test_ctrl_c_interrupts_workers_once(runner: Runner) -> None:
    """By the agent; exit code 130, and the report comes last."""
    script = runner.script(
        """
        from worker_kit import *
        try:
            ready()
            stay()
        except KeyboardInterrupt:
            note("interrupted")
            try:
                wait_for("go")
            except KeyboardInterrupt:
                note("twice")
        """
    )
    terminal = runner.terminal("--nproc-per-node", "2", script)
    runner.pids(2)
    terminal.type(b"\x03")
    for rank in range(2):
        runner.note("interrupted", rank)
        runner.leave_note("go", rank)
    assert terminal.wait() == 130
    assert not runner.noted("twice", 0)
    assert "train.py was cancelled by SIGINT" in terminal.seen
    assert terminal.seen.rstrip().endswith("=" * 80)
    assert "Ctrl-C again kills them now" in terminal.seen


def test_a_second_ctrl_c_kills_workers(runner: Runner) -> None:
    terminal = runner.terminal("--nproc-per-node", "2", runner.script(IGNORES_SIGNALS))
    pids = runner.pids(2)
    terminal.type(b"\x03")
    terminal.until("received SIGINT")
    began = time.monotonic()
    terminal.type(b"\x03")
    assert terminal.wait() == 130
    assert time.monotonic() - began < 5
    assert not any(map(is_alive, pids))


def test_a_closed_terminal_stops_the_job(runner: Runner) -> None:
    """By SIGHUP."""
    terminal = runner.terminal("--nproc-per-node", "2", "--shutdown-timeout", "1", runner.script(IGNORES_SIGNALS))
    pids = runner.pids(2)
    terminal.hang_up()
    assert terminal.wait() == 128 + signal.SIGHUP
    assert not any(map(is_alive, pids))


def test_workers_continue_while_the_agent_is_suspended(runner: Runner) -> None:
    """Ctrl-Z and fg: they keep running and printing."""
    script = runner.script(
        "from worker_kit import *; ready(); wait_for('go'); print('still here', flush=True); note('printed')"
    )
    terminal = runner.terminal(script)
    runner.pids(1)
    os.kill(terminal.process.pid, signal.SIGSTOP)
    runner.leave_note("go")
    runner.note("printed")
    terminal.until("still here")
    os.kill(terminal.process.pid, signal.SIGCONT)
    assert terminal.wait() == 0


def test_input_and_pdb_work(runner: Runner) -> None:
    """Prompts without a newline are shown."""
    script = runner.script("name = input('name? ')\nprint('hello', name)\nbreakpoint()\nprint('end')\n")
    terminal = runner.terminal(script)
    terminal.until("name? ")
    terminal.type(b"ada\n")
    terminal.until("hello ada")
    terminal.until("(Pdb) ")
    terminal.type(b"c\n")
    assert terminal.wait() == 0
    assert "end" in terminal.seen


def test_a_progress_bar_is_shown_at_once(runner: Runner) -> None:
    """Text that ends with a carriage return can be overwritten."""
    script = runner.script(
        """
        import os
        from worker_kit import *
        for percent in (10, 50, 99):
            os.write(2, f"\\rstep {percent}%".encode())
            note(f"at{percent}")
            wait_for(f"seen{percent}")
        os.write(2, b"\\n")
        """
    )
    terminal = runner.terminal(script)
    for percent in (10, 50, 99):
        runner.note(f"at{percent}")
        terminal.until(f"step {percent}%")
        runner.leave_note(f"seen{percent}")
    assert terminal.wait() == 0
