"""Lane: flowing, holding, stuck. The clock is an argument; the thread is real, in a process that ends with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

PREAMBLE = """
import os, threading
from tenax._logs.device_thread import DeviceThread, install_interrupt_handler
install_interrupt_handler()
gate, woken = threading.Semaphore(0), threading.Semaphore(0)
"""


def run(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + program + "\nprint(end='', flush=True)\nos._exit(0)"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_lane_holds_then_sticks_then_flows() -> None:
    """Above the limit it holds; after a window without movement it is stuck and drops; movement ends that."""
    told = run("""
def consume(batch):
    gate.acquire()
    lane.on_written(sum(map(len, batch)))
lane = DeviceThread(consume, woken.release, limit_bytes=100, stuck_after_s=1.0)
def tell(now):
    lane.update(now)
    print(now, lane.holding, lane.stuck, lane.drops, lane.deadline, flush=True)
big = b"x" * 300_000  # more than a batch, so that each is written alone
lane.put(b"x" * 90, 90); tell(0.0)
lane.put(big, len(big)); tell(10.0)
tell(10.9)
tell(11.0)
gate.release(2); woken.acquire()
while lane.pending: pass
tell(12.0)
""")
    assert told == [
        "0.0 False False False None",
        "10.0 True False False 10.9",
        "10.9 True False False 11.0",
        "11.0 False True True None",
        "12.0 False False False None",
    ]


def test_a_lane_that_moves_is_not_stuck() -> None:
    """What the device took within the window, or still holds for its reader, begins another window."""
    told = run("""
held = 0
def consume(batch):
    gate.acquire()
lane = DeviceThread(consume, woken.release, limit_bytes=100, stuck_after_s=1.0, waiting_in_device=lambda: held)
lane.put(b"x" * 200, 200)
lane.update(0.0)
held = -7; lane.update(1.0); print(lane.holding, lane.stuck, round(lane.deadline, 3))
lane.on_written(1); lane.update(2.0); print(lane.holding, lane.stuck)
lane.update(3.0); print(lane.holding, lane.stuck)
""")
    assert told == ["True False 1.9", "True False", "False True"]


def test_a_lane_whose_thread_died_says_so() -> None:
    """An error in the thread wakes the loop and is raised there, instead of swallowing all that comes."""
    told = run("""
def consume(batch):
    raise ZeroDivisionError("in the thread")
lane = DeviceThread(consume, woken.release, limit_bytes=100, stuck_after_s=1.0)
lane.put(b"x", 1)
woken.acquire()
try:
    lane.update(0.0)
except ZeroDivisionError as error:
    print(error, flush=True)
""")
    assert told == ["in the thread"]
