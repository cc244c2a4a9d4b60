"""A hang with real torch: one rank never joins a collective."""

from __future__ import annotations

import re
import signal

import pytest

from kit.processes import needs_torch

from .kit import LONG_TIMEOUT_S, Job, hang_report

pytestmark = [
    needs_torch,
    pytest.mark.process,
]

SCRIPT = """
import datetime, threading, time
import torch
import torch.distributed as dist

def train(model, seconds):
    until = torch.tensor(time.time() + seconds, dtype=torch.float64)
    dist.broadcast(until, 0)
    while True:
        model.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
        for parameter in model.parameters():  # DDP would take seconds to import
            dist.all_reduce(parameter.grad)
        continues = torch.tensor(float(time.time() < until))
        dist.broadcast(continues, 0)
        if not continues:
            return

def read_from_a_lost_disk():
    threading.Event().wait()

def log():
    while True:
        time.sleep(1.0)
        print("a line", flush=True)

dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
groups = [dist.new_group() for _ in range(2)]  # each has a thread that wakes up 100 times a second
threading.Thread(target=log, daemon=True).start()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
train(model, 4.0)
if dist.get_rank() == 1:
    read_from_a_lost_disk()
train(model, 600.0)
"""


@pytest.mark.timeout(2 * LONG_TIMEOUT_S)
def test_the_rank_that_misses_a_collective_is_reported(job: Job) -> None:
    """The script reports no steps; the kernel's counters are enough. Threads of gloo poll, and another logs."""
    script = job.runner.script(SCRIPT)
    agent = job.runner.start("--nproc-per-node", "2", "--on-hang", "report", "--hang-after", "2", script)
    agent.until_printed("no action is taken", LONG_TIMEOUT_S)
    report = hang_report(agent)
    assert re.search(r"^  rank 1 \(pid .* in read_from_a_lost_disk, in threading\.py:", report[2])
    assert report[3].startswith("  rank 0 (pid ")
    assert "in train" in report[3]
    agent.send(signal.SIGTERM)
    assert agent.wait().code == 128 + signal.SIGTERM
