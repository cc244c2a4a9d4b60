"""The complete example: whatever happens to its nodes, it learns from every sample, and ends where it should."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import signal
from collections import Counter
from pathlib import Path

import pytest

from kit.addresses import own_endpoint
from kit.processes import on_linux

from .agents import LONGEST_S, Agent, Start, start
from .pages import ROOT

pytestmark = [
    on_linux,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]
__all__ = ["start"]

EXAMPLE = ROOT / "examples" / "train_ddp.py"
WATCHED = Path(__file__).with_name("watched_training.py")
SAMPLES, BATCH, EPOCHS, SAVE_EVERY = 64, 8, 4, 3
STEPS_PER_EPOCH = SAMPLES // BATCH
LAST_STEP = EPOCHS * STEPS_PER_EPOCH


class Pipe:
    """Where a worker says that it has come to the sample at which it waits."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def until_here(self, agents: list[Agent]) -> None:
        assert select.select([self._reader], [], [], LONGEST_S)[0], f"nobody came there\n{agents}"
        os.close(self._reader)


def words(*flags: str, script: Path = WATCHED, epochs: int = EPOCHS, samples: int = SAMPLES) -> list[str]:
    own = ["--folder", "checkpoints", "--epochs", str(epochs), "--samples", str(samples), "--batch", str(BATCH)]
    return [*flags, str(script), *own, "--save-every", str(SAVE_EVERY)]


def begun(agent: Agent) -> dict[int, tuple[int, int]]:
    """By generation: after which step this agent's worker went on, and in a world of which size."""
    line = re.compile(r"rank \d of (\d): generation (\d) goes on after step (\d+)")
    found = [match.groups() for each in agent.said if (match := line.search(each))]
    return {int(generation): (int(step), int(world_size)) for world_size, generation, step in found}


def taken(folder: Path, generation: int, world_size: int, first: int, last: int) -> list[list[int]]:
    """By step, the samples that all ranks of a generation took between these two steps."""
    share = BATCH // world_size
    ranks = [
        [int(line) for line in (folder / f"{generation}-{rank}").read_text().split()] for rank in range(world_size)
    ]
    return [[sample for mine in ranks for sample in mine[at * share : (at + 1) * share]] for at in range(last - first)]


def loss_at_the_end(agent: Agent) -> str:
    line = rf"epoch {EPOCHS} of {EPOCHS} is done at step {LAST_STEP}: loss (\S+)"
    (found,) = [match[1] for each in agent.said if (match := re.search(line, each))]
    return found


def test_no_sample_is_lost_whatever_happens_to_the_nodes(start: Start, tmp_path: Path) -> None:
    """A worker is killed, then an agent, then a node joins: each time the next generation goes on after the last
    checkpoint, in the middle of an epoch. But for the steps that are done again, every epoch has each sample once."""
    watched = tmp_path / "watched"
    watched.mkdir()
    second, third = Pipe(tmp_path / "second"), Pipe(tmp_path / "third")
    fates = {
        "1-1": [5 * BATCH // 2 + 2, ""],  # in step 6
        "2-1": [7 * BATCH // 2 + 1, second.path],  # in step 11
        "3-0": [7 * BATCH + 1, third.path],  # in step 17
    }
    env = {"WATCHED": str(watched), "FATES": json.dumps(fates)}
    line = words(
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

    began = begun(stays)
    assert began == {1: (0, 2), 2: (3, 2), 3: (9, 1), 4: (15, 2)}, stays
    ends = [began[generation][0] for generation in (2, 3, 4)] + [LAST_STEP]
    counted = [
        samples
        for (generation, (first, world_size)), last in zip(began.items(), ends, strict=True)
        for samples in taken(watched, generation, world_size, first, last)
    ]
    assert len(counted) == LAST_STEP
    for epoch in range(EPOCHS):
        steps = counted[epoch * STEPS_PER_EPOCH : (epoch + 1) * STEPS_PER_EPOCH]
        assert Counter(sample for step in steps for sample in step) == Counter(range(SAMPLES)), f"epoch {epoch}"
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["restarts_used"], report["membership_changes"]) == (1, 2)

    calm = start(words(), **{**env, "FATES": "{}", "WATCHED": str(tmp_path)})
    for old in (tmp_path / "checkpoints").iterdir():
        old.unlink()
    assert calm.ended() == 0, calm
    assert loss_at_the_end(calm) == loss_at_the_end(stays), "it has learned something else"


def test_no_step_is_lost_when_a_node_leaves(start: Start) -> None:
    """One of two nodes is asked to leave: all save after the same step, and the other goes on after that one."""
    line = words(
        *("--nnodes", "1:2", "--rdzv-endpoint", own_endpoint(), "--rdzv-id", "leaving", "--max-restarts", "0"),
        *("--rdzv-conf", "last_call_timeout=100", "--shutdown-timeout", "60"),
        script=EXAMPLE,
        samples=100_000,
        epochs=100_000,
    )
    line += ["--save-every", "1000000"]
    stays = start(line)
    stays.until("this node serves the coordinator")  # else the one that leaves might, and would stay for the others
    leaves = start(line)
    for agent in (stays, leaves):
        agent.until("generation 1 goes on after step 0")
    leaves.process.send_signal(signal.SIGTERM)
    last = stays.until(r"rank \d leaves after step (\d+)")[1]
    assert stays.until(r"rank 0 of 1: generation 2 goes on after step (\d+)")[1] == last
    assert leaves.ended() == 128 + signal.SIGTERM
    stays.process.send_signal(signal.SIGTERM)
    assert stays.ended() == 128 + signal.SIGTERM


def test_a_step_that_hangs_is_ended(start: Start, tmp_path: Path) -> None:
    """The agent watches: it says which scope was not left, starts again, and the training comes to its end."""
    pipe = Pipe(tmp_path / "hangs")
    env = {"WATCHED": str(tmp_path), "FATES": json.dumps({"1-0": [5 * BATCH + 1, pipe.path]})}
    agent = start([*words("--max-restarts", "5"), "--step-seconds", "2"], **env, TORCHELASTIC_ENABLE_FILE_TIMER="1")
    pipe.until_here([agent])
    assert agent.ended() == 0, agent
    assert any("'a step'" in each for each in agent.said), agent
    assert loss_at_the_end(agent)
