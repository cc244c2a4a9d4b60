"""The scripts of the cluster tests do what the tests rely on."""

from __future__ import annotations

import sys
from pathlib import Path

from kit.processes import needs_torch

from . import traces
from .lab import Host, Lab, requires_netns
from .running import Running

pytestmark = requires_netns

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 5


def start(script: str, host: Host, rank: int, world: int, generation: int, *arguments: str) -> Running:
    """Start a worker as a launcher does; node0 is the master."""
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
    return host.run([sys.executable, str(SCRIPTS / script), str(lab.shared), *arguments], env=env)


def test_a_plain_worker_records_steps_and_fails_or_finishes_on_request(lab: Lab) -> None:
    failing, finishing = (start("plain_worker.py", lab[rank], rank, 2, generation=3) for rank in range(2))
    lab.until(lambda: {line["rank"] for line in traces.read(lab.shared, event="step")} == {0, 1}, "a step of each")
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


@needs_torch
def test_only_a_correct_result_passes_the_check(lab: Lab) -> None:
    arguments = ("--step-s", "0", "--check", "--steps")
    correct = start("torch_train.py", lab[0], 0, 1, 1, *arguments, str(STEPS))
    assert correct.wait(timeout_s=90).code == 0, correct
    assert [line["step"] for line in traces.read(lab.shared, event="step")] == list(range(1, STEPS + 1))
    wrong = start("torch_train.py", lab[0], 0, 1, 2, *arguments, str(STEPS - 1))  # the checkpoint is of a later step
    assert wrong.wait(timeout_s=90).code == 4, wrong
    assert "the parameters differ by" in wrong.err
