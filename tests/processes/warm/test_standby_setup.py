"""``--standby-setup``: each standby calls a function in advance, for the local rank whose worker it may replace."""

from __future__ import annotations

import json
import os
import signal
from textwrap import dedent
from typing import Any

import pytest

from kit.jobs import Runner, is_alive, until

from .family import MARKED_KIT, STAYING, Family, kill

SETUP = """
import json, os, subprocess, sys, pathlib

def set_up():
    keep.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(20))
    note()

def start_process():
    shell = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    keep.extend([shell.pid, int(shell.stdout.readline())])
    note()

def note():
    noted = {"env": dict(os.environ), "keep": keep, "has_marked_kit": "marked_kit" in sys.modules}
    draft = pathlib.Path(os.environ["NOTES"], f"draft.{os.getpid()}")
    draft.write_text(json.dumps(noted))
    draft.rename(draft.with_name(f"setup.{os.getpid()}"))

def fail():
    set_up()
    raise ValueError("no such device")

keep = []
"""


def _start(runner: Runner, function: str, script: str = STAYING) -> Family:
    runner.script(MARKED_KIT, "marked_kit.py")
    runner.script(SETUP, "setup_kit.py")
    runner.environ["NOTES"] = str(runner.home)
    flags = ["--nproc-per-node", "2", "--max-restarts", "3", "--preload", "marked_kit", "--shutdown-timeout", "5"]
    return Family(runner, runner.start(*flags, "--standby-setup", f"setup_kit:{function}", runner.script(script)))


def _setups(runner: Runner, standbys: set[int]) -> dict[int, Any]:
    """Wait until all of these are set up; return what the function saw, by pid."""
    paths = {pid: runner.home / f"setup.{pid}" for pid in standbys}
    until(lambda: all(path.exists() for path in paths.values()), "the standbys are set up")
    return {pid: json.loads(path.read_text()) for pid, path in paths.items()}


def _stop(family: Family) -> None:
    family.running.send(signal.SIGTERM)
    family.running.wait()


def test_each_standby_is_set_up_for_the_worker_that_it_replaces(runner: Runner) -> None:
    family = _start(runner, "set_up")
    first = runner.pids(2)
    seen = _setups(runner, family.until_standbys(2, without=set(first)))
    by_rank = {int(each["env"]["LOCAL_RANK"]): pid for pid, each in seen.items()}
    assert sorted(by_rank) == [0, 1]
    for each in seen.values():
        assert each["has_marked_kit"]
        assert "RANK" not in each["env"]  # it may differ in the next generation
        assert "TENAX_RECORD_UNCAUGHT" not in each["env"]
    kill(first[1])
    assert runner.pids(2, 1) == [by_rank[0], by_rank[1]]
    again = family.until_standbys(2, without=set(by_rank.values()))
    assert {int(each["env"]["LOCAL_RANK"]) for each in _setups(runner, again).values()} == {0, 1}
    _stop(family)


def test_what_the_function_opens_stays_open_in_the_worker(runner: Runner) -> None:
    """The descriptors of a worker have fixed numbers, which the function must not get."""
    family = _start(runner, "set_up")
    first = runner.pids(2)
    seen = _setups(runner, family.until_standbys(2, without=set(first)))
    kill(first[0])
    for pid in runner.pids(2, 1):
        kept = seen[pid]["keep"]
        opened = set(os.listdir(f"/proc/{pid}/fd"))
        assert {str(number) for number in kept} <= opened
        assert all(os.readlink(f"/proc/{pid}/fd/{number}") == os.devnull for number in kept)
        assert len(opened) < len(kept) + 20  # the numbers that were reserved meanwhile are free again
    _stop(family)


def test_processes_that_the_function_starts_live_as_long_as_their_standby(runner: Runner) -> None:
    """They are not taken for processes that a dead worker left behind."""
    leaving = f"import subprocess\nsubprocess.Popen(['sleep', '600'])\n{dedent(STAYING)}"
    family = _start(runner, "start_process", leaving)
    first = runner.pids(2)
    seen = _setups(runner, family.until_standbys(2, without=set(first)))
    kill(first[0])
    for pid in runner.pids(2, 1):
        assert all(is_alive(started) for started in seen[pid]["keep"])
    _stop(family)


def test_a_function_that_fails_is_reported_and_its_standby_is_used(runner: Runner) -> None:
    family = _start(runner, "fail")
    first = runner.pids(2)
    standbys = family.until_standbys(2, without=set(first))
    _setups(runner, standbys)
    kill(first[0])
    assert set(runner.pids(2, 1)) == standbys
    _stop(family)
    said = "tenax: while preloading: --standby-setup setup_kit:fail failed: ValueError: no such device\n"
    assert said in family.running.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--standby-setup", "kit"], "--standby-setup takes MODULE:FUNCTION, not 'kit'"),
        (["--standby-setup", "a:b", "--preload", "none"], "--standby-setup a:b needs standbys"),
        (["--standby-setup", "a:b", "--max-restarts", "0"], "there are none without --max-restarts"),
    ],
)
def test_what_cannot_be_is_rejected(runner: Runner, words: list[str], said: str) -> None:
    done = runner.run("--max-restarts", "1", *words, runner.script("pass"))
    assert done.code == 2
    assert said in done.err
