"""The scripts of ``examples/frameworks`` train on two nodes, and a worker that is killed does not change the result.

``./dev frameworks`` installs the frameworks and runs these tests. ``FRAMEWORKS_PYTHON`` is an interpreter with them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kit.addresses import own_endpoint
from kit.processes import on_linux
from tenax.progress import LAYOUT

PYTHON = os.environ.get("FRAMEWORKS_PYTHON", "")
LONGEST_S = 600  # for both agents: four workers import for many seconds of CPU time each
SCRIPTS = Path(__file__).parents[2] / "examples" / "frameworks"
pytestmark = [
    on_linux,
    pytest.mark.skipif(not PYTHON, reason="needs the frameworks, and minutes: ./dev frameworks runs it"),
    pytest.mark.timeout(2 * LONGEST_S),
]

# DDP changes the order of its gradients after its first step, also after a restart, and another order is rounded
# differently. With these changes it keeps one order. The other scripts do not need that.
EXACT = {
    "ddp": [("nn.Linear(32, 1)))", "nn.Linear(32, 1)), find_unused_parameters=True)")],
    "fsdp": [],
    "hf_trainer": [],
    "with_accelerate": [
        ("import set_seed", "import DistributedDataParallelKwargs as Options, set_seed"),
        ("(cpu=True)", "(cpu=True, kwargs_handlers=[Options(find_unused_parameters=True)])"),
    ],
    "with_jax": [],
    "with_lightning": [('strategy="ddp"', 'strategy="ddp_find_unused_parameters_true"')],
}
SAVED_STEPS, KILLED_AT_SAMPLE = 4, 70  # each rank uses 12 samples in a step, so this is in the sixth step
KILL = f"""

class Samples(Samples):
    count = 0

    def __getitem__(self, index):
        import os, signal

        Samples.count += 1
        is_first = os.environ["TENAX_GENERATION"] == "1"
        if Samples.count == {KILLED_AT_SAMPLE} and os.environ["RANK"] == "3" and is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)
"""


def copy_of(name: str, folder: Path, addition: str = "") -> Path:
    """Copy a script, so that its results can be compared bit by bit, with an addition to the module ``task``."""
    shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / f"{name}.py"
    source = path.read_text()
    for before, after in EXACT[name]:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    path.write_text(source)
    with (folder / "task.py").open("a") as file:
        file.write(addition)
    return path


def run_on_two_nodes(script: Path, folder: Path) -> str:
    """Run two agents with two workers each. Return their output, after both have succeeded."""
    folder.mkdir()
    flags = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-endpoint", own_endpoint()]
    outputs = [folder / f"node{number}.txt" for number in range(2)]
    agents = []
    try:
        for number, output in enumerate(outputs):
            with output.open("w") as file:
                command = [PYTHON, "-m", "tenax", "run", *flags, "--log-dir", folder / f"logs{number}", script, folder]
                env = {**os.environ, "OMP_NUM_THREADS": "1"}
                agents.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))
        codes = [agent.wait(LONGEST_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    text = "\n".join(output.read_text() for output in outputs)
    assert codes == [0, 0], text
    return text


def trained(text: str) -> str:
    """Return the fingerprint of the weights."""
    (found,) = [line.partition("trained: ")[2] for line in text.splitlines() if line.startswith("trained: ")]
    return found


def first_steps(folder: Path, attempt: int) -> set[int]:
    """Return the first step that each worker of an attempt has reported."""
    return {LAYOUT.unpack_from(path.read_bytes())[1] for path in folder.glob(f"logs*/*/attempt_{attempt}/*/progress")}


@pytest.mark.parametrize("name", EXACT)
def test_a_killed_worker_does_not_change_the_result(name: str, tmp_path: Path) -> None:
    """The job resumes from its checkpoint, and its weights are equal, bit by bit, to those of an undisturbed run."""
    undisturbed = run_on_two_nodes(copy_of(name, tmp_path / "plain"), tmp_path / "undisturbed")
    disturbed = run_on_two_nodes(copy_of(name, tmp_path / "killing", KILL), tmp_path / "disturbed")
    assert "was killed by SIGKILL" in disturbed
    assert first_steps(tmp_path / "disturbed", 1) == {SAVED_STEPS + 1}
    assert trained(disturbed) == trained(undisturbed)


def test_every_script_is_tested() -> None:
    assert sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "task") == sorted(EXACT)
