"""Survivors with torch and gloo: three ranks, a fault in each generation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kit.processes import needs_torch

pytestmark = [pytest.mark.process, pytest.mark.timeout(300), needs_torch]


def has_gpu() -> bool:
    """Without importing torch."""
    return Path("/dev/nvidia0").exists()


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not has_gpu(), reason="needs a GPU"))]
)
def test_survivors_continue_at_the_same_step_with_the_same_result(device: str) -> None:
    """A killed peer, a stopped peer, and a state that an exception has cut: the result is that without faults."""
    command = [sys.executable, str(Path(__file__).with_name("group_main.py")), device]
    done = subprocess.run(command, capture_output=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    undisturbed, disturbed = found["undisturbed"], found["disturbed"]
    assert [rank["digest"] for rank in disturbed] == [rank["digest"] for rank in undisturbed]
    assert [rank["losses"] for rank in disturbed] == [12, 12, 12]
    # Ranks 0 and 1 took part in all generations in one process, and restored only in the first.
    for rank in disturbed[:2]:
        assert [number for number, _, _ in rank["generations"]] == [1, 2, 3, 4]
        assert rank["restored"] == 1
    # No step was lost: a step that another rank had completed before the fault was not repeated.
    steps = [step for _, step, _ in disturbed[0]["generations"]]
    assert steps in ([0, 3, 6, 10], [0, 3, 6, 9])  # whether a rank had completed step 10 when its generation ended
    # Rank 2 was replaced twice. The last process survived its own exception, with the state of another rank.
    assert [number for number, _, _ in disturbed[2]["generations"]] == [3, 4]
    assert disturbed[2]["restored"] == 0
    assert disturbed[0]["generations"][1][2] == "restart 1"
    # Blocked collectives returned although the stopped process did not end.
    assert max(found["held_s"]) < 5


def test_survivors_leave_while_gloo_waits_for_peers_that_are_gone() -> None:
    """The peers have published their addresses, and never connect: there is no connection that could be ended."""
    command = [sys.executable, str(Path(__file__).with_name("connecting_main.py"))]
    done = subprocess.run(command, capture_output=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert max(found["dead"] + found["stopped"]) < 5, found


@pytest.mark.skipif(not has_gpu(), reason="needs a GPU")
def test_a_group_of_nccl_is_aborted_and_made_again(tmp_path: Path) -> None:
    """With one rank: NCCL does not allow two on one GPU."""
    done = subprocess.run(
        [sys.executable, "-c", NCCL, str(tmp_path)],
        capture_output=True,
        check=False,
        timeout=280,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == ["1", "1.0", "2", "1.0", "done"]


NCCL = """
import os, sys, threading
sys.path.insert(0, os.getcwd())
import torch, torch.distributed as dist
from elastic.fake_agent import FakeAgent
from tenax import elastic

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
agent = FakeAgent()
agent.offer()
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = elastic.State(model=model, optimizer=optimizer, step=0)
for generation in elastic.generations():
    with generation:
        store = f"file://{sys.argv[1]}/store-{generation.number}"
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
        generation.agree(state)
        ones = torch.ones(1, device="cuda")
        dist.all_reduce(ones)
        model(torch.ones(1, 4, device="cuda")).sum().backward()
        optimizer.step()
        state.step += 1
        print(state.step, ones.item(), flush=True)
        generation.completed(state.step)
        if generation.number == 1:
            agent.end_and_begin()
            threading.Event().wait(60)
print("done")
"""
