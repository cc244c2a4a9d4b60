"""Workers of Accelerate and Lightning Fabric survive, as the guide to survivors shows. Run by ``./dev frameworks``."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from kit.processes import on_linux

from .test_recipes import LONGEST_S, PYTHON

pytestmark = [
    on_linux,
    pytest.mark.skipif(not PYTHON, reason="needs the frameworks, and minutes: ./dev frameworks runs it"),
    pytest.mark.timeout(LONGEST_S),
]

ACCELERATE = """
        AcceleratorState._reset_state(reset_partial_state=True)
        dist.init_process_group("gloo")
        library = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
        generation.agree(state)
        replica, prepared = library.prepare(model, optimizer)
"""
FABRIC = """
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        library = Fabric(accelerator="cpu", strategy="ddp_find_unused_parameters_true", devices=devices)
        library.launch()
        generation.agree(state)
        replica, prepared = library.setup(model, optimizer)
"""
IMPORTS = {
    ACCELERATE: """
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
""",
    FABRIC: "from lightning.fabric import Fabric\n",
}
SCRIPT = """
import hashlib, os, signal, sys
import torch, torch._dynamo
import torch.distributed as dist
{imports}
from tenax import elastic

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
state = elastic.State(model=model, optimizer=optimizer, step=0)
for generation in elastic.generations():
    with generation:
{made}
        print(f"rank {{generation.rank}} pid {{os.getpid()}} generation {{generation.number}}", flush=True)
        while state.step < 30:
            torch.manual_seed(1000 * state.step + generation.rank)
            library.backward(replica(torch.randn(4, 8)).square().mean())
            prepared.step()
            prepared.zero_grad()
            state.step += 1
            generation.completed(state.step)
            if sys.argv[1] == "kill" and generation.rank == 1 and state.step == 10 * generation.number < 30:
                os.kill(os.getpid(), signal.SIGKILL)
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
print(f"trained: {{hashlib.sha256(weights).hexdigest()}}", flush=True)
"""


def _run(folder: Path, made: str, what: str) -> str:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(imports=IMPORTS[made], made=made.strip("\n")))
    command = [PYTHON, "-m", "tenax", "run", "--nproc-per-node", "3", "--max-restarts", "2"]
    done = subprocess.run(
        [*command, "--log-dir", str(folder / "logs"), str(script), what],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("made", [ACCELERATE, FABRIC], ids=["accelerate", "fabric"])
def test_the_others_survive_a_killed_worker_and_the_result_is_the_same(made: str, tmp_path: Path) -> None:
    expected, text = (_run(tmp_path, made, what) for what in ("undisturbed", "kill"))
    pids = {int(rank): set(re.findall(rf"^rank {rank} pid (\d+)", text, re.MULTILINE)) for rank in "012"}
    assert [len(pids[rank]) for rank in range(3)] == [1, 3, 1], text
    assert set(re.findall("trained: (.*)", text)) == set(re.findall("trained: (.*)", expected))
    assert len(re.findall("trained: (.*)", text)) == 3
