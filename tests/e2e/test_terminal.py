"""The terminal: what a person sees while a job runs, what a file gets instead, and what keys do."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time

import pytest

from kit.jobs import TENAX, Bench, Screen, is_alive

ESCAPE = "\x1b"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
FAILS_ONCE = """
    import sys
    from worker_kit import *
    ready()
    print("hello from", RANK, flush=True)
    if RANK == 1 and ATTEMPT == 0:
        sys.exit(3)
    wait_for("go", rank=0)
"""
FAILS = "import sys; sys.exit('on purpose')"
DEAF = "from worker_kit import *; ignore('SIGTERM', 'SIGINT', 'SIGHUP'); ready(); stay()"
SLEEPS = "from worker_kit import *; ready(); stay()"


# --- the live line ----------------------------------------------------------------------------------------------------


def test_the_live_line_follows_the_run(bench: Bench) -> None:
    """At the bottom: the phase, the generation, how many workers, how many restarts are left."""
    terminal = bench.terminal(
        "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-id", "job7", bench.script(FAILS_ONCE)
    )
    terminal.until("tenax job7: generation 1 running, 2 of 2 workers, 1 of 1 restarts left")
    bench.pids(2, attempt=1)
    terminal.until("tenax job7: generation 2 running, 2 of 2 workers, 0 of 1 restarts left")
    bench.tell("go", attempt=1)
    assert terminal.wait() == 0
    assert "tenax: the run succeeded" in terminal.seen


def test_the_live_line_says_who_is_waited_for(bench: Bench) -> None:
    """While the job ends, it names the workers that have not."""
    script = bench.script("from worker_kit import *\nif RANK: ignore('SIGINT')\nready(); stay()")
    terminal = bench.terminal("--nproc-per-node", "2", "--rdzv-id", "job7", script)
    bench.pids(2)
    terminal.type(b"\x03")
    terminal.until("tenax job7: generation 1 ending, waiting for local rank 1")
    terminal.type(b"\x03")
    assert terminal.wait() == 130


def test_the_live_line_is_erased_before_anything_else_is_written(bench: Bench) -> None:
    """Played on a screen, no line of output is mixed with it and none of it is left at the end."""
    terminal = bench.terminal(
        "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-id", "job7", bench.script(FAILS_ONCE)
    )
    bench.pids(2, attempt=1)
    bench.tell("go", attempt=1)
    assert terminal.wait() == 0
    screen = [row.rpartition("\r" + ESCAPE + "[K")[2] for row in terminal.seen.split("\r\n")]
    assert not [row for row in screen if row.startswith("tenax job7:")], screen
    assert sorted(row for row in screen if row.startswith("hello")) == ["hello from 0"] * 2 + ["hello from 1"] * 2
    assert all(re.match("tenax: |hello from [01]$|$", row) for row in screen), screen


def test_a_narrow_terminal(bench: Bench) -> None:
    """The live line is cut to one row, so that erasing it erases all of it."""
    terminal = bench.terminal(bench.script(SLEEPS), columns=24)
    terminal.until("generat")
    terminal.process.terminate()
    terminal.wait()
    for row in re.split(r"\r\n|\r" + re.escape(ESCAPE + "[K"), terminal.seen):
        if re.match("tenax [0-9a-f]{8}:", row):
            assert len(row) < 24


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_on_a_real_screen(bench: Bench) -> None:
    """As drawn by tmux: output above, one live line below, and at the end only what was said."""
    bench.script(FAILS_ONCE)
    command = (
        f"{' '.join(TENAX)} run --nproc-per-node 2 --max-restarts 1 --rdzv-id job7 train.py; echo code $?; exec cat"
    )
    screen = Screen(bench, ["sh", "-c", command], columns=90)
    try:
        rows = screen.until("generation 2 running, 2 of 2 workers")
        assert rows[-1] == "tenax job7: generation 2 running, 2 of 2 workers, 0 of 1 restarts left"
        assert sum("tenax job7:" in row for row in rows) == 1, "one live line, the last row"
        bench.pids(2, attempt=1)
        bench.tell("go", attempt=1)
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


def test_colour_on_a_terminal(bench: Bench) -> None:
    """The report's headline is coloured, and says the same without."""
    terminal = bench.terminal(bench.script(FAILS))
    assert terminal.wait() == 1
    assert COLOUR.search(terminal.seen)
    assert "train.py failed: rank 0 on" in COLOUR.sub("", terminal.seen)


@pytest.mark.parametrize("variable", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_where_it_is_not_wanted(bench: Bench, variable: dict[str, str]) -> None:
    """NO_COLOR and TERM=dumb are respected."""
    terminal = bench.terminal(bench.script(FAILS), env=variable)
    assert terminal.wait() == 1
    assert not COLOUR.search(terminal.seen)


def test_a_dumb_terminal_gets_no_escape_code_at_all(bench: Bench) -> None:
    """TERM=dumb cannot erase a line: there is no live line either."""
    terminal = bench.terminal(bench.script(FAILS), env={"TERM": "dumb"})
    assert terminal.wait() == 1
    assert ESCAPE not in terminal.seen


def test_a_file_gets_plain_lines(bench: Bench) -> None:
    """No escape code, no carriage return, no live line; each fact once."""
    job = bench.start("--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-id", "job7", bench.script(FAILS_ONCE))
    bench.pids(2, attempt=1)
    bench.tell("go", attempt=1)
    done = job.wait()
    assert done.code == 0
    assert ESCAPE not in done.err + done.out
    assert "\r" not in done.err + done.out
    assert "tenax job7:" not in done.err
    assert all(line.startswith("tenax: ") for line in done.err.splitlines()), done
    assert len(done.err.splitlines()) == len(set(done.err.splitlines()))


# --- keys -------------------------------------------------------------------------------------------------------------


def test_ctrl_c(bench: Bench) -> None:
    """One Ctrl-C: workers are interrupted once, by us; code 130; the report comes last."""
    script = bench.script(
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
    terminal = bench.terminal("--nproc-per-node", "2", script)
    bench.pids(2)
    terminal.type(b"\x03")
    for rank in range(2):
        bench.note("interrupted", rank)
        bench.tell("go", rank)
    assert terminal.wait() == 130
    assert not bench.noted("twice", 0)
    assert "train.py was cancelled by SIGINT" in terminal.seen
    assert terminal.seen.rstrip().endswith("=" * 80)
    assert "Ctrl-C again kills them now" in terminal.seen


def test_ctrl_c_twice(bench: Bench) -> None:
    """Workers that ignore everything: the second Ctrl-C is final."""
    terminal = bench.terminal("--nproc-per-node", "2", bench.script(DEAF))
    pids = bench.pids(2)
    terminal.type(b"\x03")
    terminal.until("received SIGINT")
    began = time.monotonic()
    terminal.type(b"\x03")
    assert terminal.wait() == 130
    assert time.monotonic() - began < 5
    assert not any(map(is_alive, pids))


def test_a_closed_window(bench: Bench) -> None:
    """The terminal goes away: the kernel says SIGHUP, and the job ends as on any signal."""
    terminal = bench.terminal("--nproc-per-node", "2", "--shutdown-timeout", "1", bench.script(DEAF))
    pids = bench.pids(2)
    terminal.hang_up()
    assert terminal.wait() == 128 + signal.SIGHUP
    assert not any(map(is_alive, pids))


def test_ctrl_z_and_fg(bench: Bench) -> None:
    """The launcher can be suspended and goes on; meanwhile workers keep working and printing."""
    script = bench.script(
        "from worker_kit import *; ready(); wait_for('go'); print('still here', flush=True); note('printed')"
    )
    terminal = bench.terminal(script)
    bench.pids(1)
    os.kill(terminal.process.pid, signal.SIGSTOP)
    bench.tell("go")
    bench.note("printed")
    terminal.until("still here")
    os.kill(terminal.process.pid, signal.SIGCONT)
    assert terminal.wait() == 0


def test_a_person_with_a_debugger(bench: Bench) -> None:
    """A script that asks, and one that stops in pdb, can be answered; prompts without a line's end are shown."""
    script = bench.script("name = input('name? ')\nprint('hello', name)\nbreakpoint()\nprint('end')\n")
    terminal = bench.terminal(script)
    terminal.until("name? ")
    terminal.type(b"ada\n")
    terminal.until("hello ada")
    terminal.until("(Pdb) ")
    terminal.type(b"c\n")
    assert terminal.wait() == 0
    assert "end" in terminal.seen


def test_a_progress_bar(bench: Bench) -> None:
    """Text that ends with a carriage return is shown at once and can be overwritten."""
    script = bench.script(
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
    terminal = bench.terminal(script)
    for percent in (10, 50, 99):
        bench.note(f"at{percent}")
        terminal.until(f"step {percent}%")
        bench.tell(f"seen{percent}")
    assert terminal.wait() == 0
