"""Device threads: flowing, holding and stuck. The clock is an argument; the thread is real, in its own process."""

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


def test_a_device_holds_then_is_stuck_then_flows() -> None:
    """Above the limit it holds; after a window without progress it is stuck and drops; progress ends that."""
    output = run("""
def consume(batch):
    gate.acquire()
    device.on_written(sum(map(len, batch)))
device = DeviceThread(consume, woken.release, limit_bytes=100, stuck_after_s=1.0)
def show(now):
    device.update(now)
    print(now, device.holding, device.stuck, device.drops, device.deadline, flush=True)
big = b"x" * 300_000  # more than a batch, so that each is written alone
device.put(b"x" * 90, 90); show(0.0)
device.put(big, len(big)); show(10.0)
show(10.9)
show(11.0)
gate.release(2); woken.acquire()
while device.pending: pass
show(12.0)
""")
    assert output == [
        "0.0 False False False None",
        "10.0 True False False 10.9",
        "10.9 True False False 11.0",
        "11.0 False True True None",
        "12.0 False False False None",
    ]


def test_a_device_that_makes_progress_is_not_stuck() -> None:
    """Bytes written within the window, or a change of what the kernel holds for the reader, begin another window."""
    output = run("""
held = 0
def consume(batch):
    gate.acquire()
device = DeviceThread(consume, woken.release, limit_bytes=100, stuck_after_s=1.0, waiting_in_device=lambda: held)
device.put(b"x" * 200, 200)
device.update(0.0)
held = -7; device.update(1.0); print(device.holding, device.stuck, round(device.deadline, 3))
device.on_written(1); device.update(2.0); print(device.holding, device.stuck)
device.update(3.0); print(device.holding, device.stuck)
""")
    assert output == ["True False 1.9", "True False", "False True"]


def test_an_error_in_a_device_thread_is_raised_in_the_loop() -> None:
    """An error in the thread wakes the loop and is raised there, instead of being swallowed."""
    output = run("""
def consume(batch):
    raise ZeroDivisionError("in the thread")
device = DeviceThread(consume, woken.release, limit_bytes=100, stuck_after_s=1.0)
device.put(b"x", 1)
woken.acquire()
try:
    device.update(0.0)
except ZeroDivisionError as error:
    print(error, flush=True)
""")
    assert output == ["in the thread"]
