"""The scripts that the tests of runs on several hosts train with do what those tests rely on."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from . import traces
from .lab import Host, Lab, requires_netns
from .running import Running

pytestmark = requires_netns

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 40


def start(script: str, host: Host, rank: int, world: int, generation: int, *words: str) -> Running:
    """A worker as a launcher would start it; node0 is the master."""
    lab = host._lab
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": lab[0].address,
        "MASTER_PORT": str(29500 + generation),
        "TENAX_GENERATION": str(generation),
        "TORCHELASTIC_RESTART_COUNT": str(generation - 1),
    }
    return host.run([sys.executable, str(SCRIPTS / script), str(lab.shared), *words], env=env)


def test_a_plain_worker_beats_fails_when_told_and_finishes_when_told(lab: Lab) -> None:
    failing, finishing = (start("plain_worker.py", lab[rank], rank, 2, generation=3) for rank in range(2))
    lab.until(lambda: {line["rank"] for line in traces.read(lab.shared, event="step")} == {0, 1}, "a beat of each")
    (lab.shared / "fail-0").touch()
    assert failing.wait().code == 3
    assert not (lab.shared / "fail-0").exists()
    (lab.shared / "finish").touch()
    assert finishing.wait().code == 0
    (end,) = traces.read(lab.shared, event="end")
    del end["at"], end["step"]
    assert end == {
        "event": "end",
        "rank": 1,
        "local_rank": 0,
        "world_size": 2,
        "generation": 3,
        "restart_count": 2,
        "pid": finishing.pid,
        "host": "node1",
        "master_addr": lab[0].address,
        "master_port": "29503",
    }


def test_training_goes_on_from_its_checkpoint_in_another_world(lab: Lab) -> None:
    """A generation of two is interrupted; a generation of three ends where one alone would have ended."""
    pytest.importorskip("torch.distributed")
    words = ("--step-s", "0.02", "--check", "--no-ddp", "--steps")
    first = [start("ddp_train.py", lab[rank], rank, 2, 1, *words, str(STEPS)) for rank in range(2)]
    lab.until(lambda: traces.read(lab.shared, step=3, rank=1), lab.tell, timeout_s=90)
    for running in first:
        running.send(signal.SIGTERM)
        assert running.wait().code == -signal.SIGTERM
    done = max(line["step"] for line in traces.read(lab.shared, generation=1))
    assert 3 <= done < STEPS, "the first generation was to be interrupted"
    second = [start("ddp_train.py", lab[rank], rank, 3, 2, *words, str(STEPS)) for rank in range(3)]
    for running in second:
        assert running.wait(timeout_s=90).code == 0, running
    steps = [line["step"] for line in traces.read(lab.shared, event="step", generation=2, rank=2)]
    assert steps == list(range(steps[0], STEPS + 1))
    assert abs(steps[0] - (done + 1)) <= 1, "a step may be saved unnoted, or noted by another rank only"
    wrong = start("ddp_train.py", lab[0], 0, 1, 3, *words, str(STEPS - 1))  # the checkpoint is of a later step
    assert wrong.wait(timeout_s=90).code == 4, wrong
    assert "the parameters are off by" in wrong.err


def test_ddp_trains_across_hosts(lab: Lab) -> None:
    pytest.importorskip("torch.distributed")
    words = ("--steps", "5", "--step-s", "0", "--check")
    ranks = [start("ddp_train.py", lab[rank], rank, 2, 1, *words) for rank in range(2)]
    for running in ranks:
        assert running.wait(timeout_s=90).code == 0, running
    assert [line["host"] for line in traces.read(lab.shared, event="step", step=5, rank=1)] == ["node1"]
