"""The complete example trains with every sample despite faults of its nodes."""

from __future__ import annotations

import json
import os
import re
import select
import signal
from collections import Counter
from pathlib import Path

import pytest

from kit.addresses import own_endpoint
from kit.processes import needs_torch, on_linux

from .agents import LONGEST_S, Agent, Start, start
from .pages import ROOT

pytestmark = [
    on_linux,
    needs_torch,
    pytest.mark.timeout(3 * LONGEST_S),  # seconds of CPU time to import torch, which a busy machine multiplies
]
__all__ = ["start"]

EXAMPLE = ROOT / "examples" / "train_ddp.py"
RECORDING = Path(__file__).with_name("recording_training.py")
SAMPLES, BATCH, EPOCHS, SAVE_EVERY = 64, 8, 4, 3
STEPS_PER_EPOCH = SAMPLES // BATCH
LAST_STEP = EPOCHS * STEPS_PER_EPOCH
# What the example imports, and what DDP imports later: several seconds for every worker of every generation.
PRELOAD = ("--preload", "torch.distributed.nn.functional,torch._dynamo")


class Pipe:
    """A named pipe to which a worker writes when it reaches the sample at which it waits."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def until_here(self, agents: list[Agent]) -> None:
        assert select.select([self._reader], [], [], LONGEST_S)[0], f"no worker reached its sample\n{agents}"
        os.close(self._reader)


def arguments(*flags: str, script: Path = RECORDING, epochs: int = EPOCHS, samples: int = SAMPLES) -> list[str]:
    own = ["--folder", "checkpoints", "--epochs", str(epochs), "--samples", str(samples), "--batch", str(BATCH)]
    return [*PRELOAD, *flags, str(script), *own, "--save-every", str(SAVE_EVERY)]


def resumptions(agent: Agent) -> dict[int, tuple[int, int]]:
    """Return by generation: after which step this agent's worker continued, and the world size."""
    line = re.compile(r"rank \d of (\d): generation (\d) continues after step (\d+)")
    found = [match.groups() for each in agent.lines if (match := line.search(each))]
    return {int(generation): (int(step), int(world_size)) for world_size, generation, step in found}


def samples_by_step(folder: Path, generation: int, world_size: int, first: int, last: int) -> list[list[int]]:
    """Return by step the samples of all ranks of a generation between these two steps."""
    share = BATCH // world_size
    ranks = [
        [int(line) for line in (folder / f"{generation}-{rank}").read_text().split()] for rank in range(world_size)
    ]
    return [[sample for mine in ranks for sample in mine[at * share : (at + 1) * share]] for at in range(last - first)]


def final_loss(agent: Agent) -> str:
    line = rf"epoch {EPOCHS} of {EPOCHS} is done at step {LAST_STEP}: loss (\S+)"
    (found,) = [match[1] for each in agent.lines if (match := re.search(line, each))]
    return found


def test_no_sample_is_lost_when_workers_and_nodes_fail_hang_and_join(start: Start, tmp_path: Path) -> None:
    """A worker is killed, then an agent, then a node joins: each time the next generation continues after the last
    checkpoint, in the middle of an epoch. Except for repeated steps, every epoch has each sample once. The result is
    that of a run of one node in which the watchdog kills a step that hangs."""
    records = tmp_path / "records"
    records.mkdir()
    second, third = Pipe(tmp_path / "second"), Pipe(tmp_path / "third")
    faults = {
        "1-1": [5 * BATCH // 2 + 2, ""],  # in step 6
        "2-1": [7 * BATCH // 2 + 1, second.path],  # in step 11
        "3-0": [7 * BATCH + 1, third.path],  # in step 17
    }
    env = {"RECORDS": str(records), "FAULTS": json.dumps(faults)}
    line = arguments(
        *("--nnodes", "1:2", "--rdzv-endpoint", own_endpoint(), "--rdzv-id", "faults", "--max-restarts", "1"),
        *("--rdzv-conf", "last_call_timeout=100"),
    )
    stays = start(["--report", "report.json", *line], **env)
    stays.until("this node serves the coordinator")
    dies = start(line, **env)
    second.until_here([stays, dies])
    dies.process.kill()
    third.until_here([stays, dies])
    joins = start(line, **env)
    assert [stays.ended(), joins.ended(), dies.ended()] == [0, 0, -signal.SIGKILL], [stays, joins, dies]

    began = resumptions(stays)
    assert began == {1: (0, 2), 2: (3, 2), 3: (9, 1), 4: (15, 2)}, stays
    ends = [began[generation][0] for generation in (2, 3, 4)] + [LAST_STEP]
    counted = [
        samples
        for (generation, (first, world_size)), last in zip(began.items(), ends, strict=True)
        for samples in samples_by_step(records, generation, world_size, first, last)
    ]
    assert len(counted) == LAST_STEP
    for epoch in range(EPOCHS):
        steps = counted[epoch * STEPS_PER_EPOCH : (epoch + 1) * STEPS_PER_EPOCH]
        assert Counter(sample for step in steps for sample in step) == Counter(range(SAMPLES)), f"epoch {epoch}"
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["restarts_used"], report["membership_changes"]) == (1, 2)

    for old in (tmp_path / "checkpoints").iterdir():
        old.unlink()
    pipe = Pipe(tmp_path / "hangs")
    env = {"RECORDS": str(tmp_path), "FAULTS": json.dumps({"1-0": [5 * BATCH + 1, pipe.path]})}
    hangs = start([*arguments("--max-restarts", "5"), "--step-seconds", "2"], **env, TORCHELASTIC_ENABLE_FILE_TIMER="1")
    pipe.until_here([hangs])
    assert hangs.ended() == 0, hangs
    assert any("'a step'" in each for each in hangs.lines), hangs
    assert final_loss(hangs) == final_loss(stays), "the training result differs"


def test_no_step_is_lost_when_a_node_leaves(start: Start) -> None:
    """One of two nodes receives SIGTERM: all ranks save after the same step, and the other continues after it."""
    line = arguments(
        *("--nnodes", "1:2", "--rdzv-endpoint", own_endpoint(), "--rdzv-id", "leaving", "--max-restarts", "0"),
        *("--rdzv-conf", "last_call_timeout=100", "--shutdown-timeout", "60"),
        script=EXAMPLE,
        samples=100_000,
        epochs=100_000,
    )
    line += ["--save-every", "1000000"]
    stays = start(line)
    stays.until("this node serves the coordinator")  # otherwise the other might serve it, and stay for this one
    leaves = start(line)
    for agent in (stays, leaves):
        agent.until("generation 1 continues after step 0")
    leaves.process.send_signal(signal.SIGTERM)
    last = stays.until(r"rank \d leaves after step (\d+)")[1]
    assert stays.until(r"rank 0 of 1: generation 2 continues after step (\d+)")[1] == last
    assert leaves.ended() == 128 + signal.SIGTERM
    stays.process.send_signal(signal.SIGTERM)
    assert stays.ended() == 128 + signal.SIGTERM
