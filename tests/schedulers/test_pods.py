"""An Indexed Job of Kubernetes with two simulated pods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.addresses import own_address
from kit.processes import until

from .pod import USER, Pod, why_not

pytestmark = [pytest.mark.network, pytest.mark.skipif(bool(why_not()), reason=why_not())]

DOMAIN = "train.default.svc.cluster.local"
SCRIPT = """
import os, signal, sys
from pathlib import Path

def save(*_):
    print("saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
try:
    Path("/tmp/file").touch()
except OSError as error:
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "uid", os.getuid(), error.strerror, flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[Pod]]:
    """The pods of index 0 and 1. They do not know each other's names yet."""
    made: list[Pod] = []
    try:
        for index in (0, 1):
            name, folder = f"train-{index}", tmp_path / str(index)
            folder.mkdir()
            (folder / "train.py").write_text(SCRIPT)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{own_address()} {name}.{DOMAIN} {name}\n")
            environ = {"JOB_COMPLETION_INDEX": str(index), "TENAX_RDZV_TOKEN": "t" * 32}
            made.append(Pod(folder, name, environ, "--nnodes", "2", "--preload", "none", "train.py"))
        yield made
    finally:
        for pod in made:
            pod.close()


def test_two_pods_are_one_run(pods: list[Pod]) -> None:
    """Process 1, a user without an entry in /etc/passwd, a read-only root, a name that DNS knows late, and SIGTERM."""
    first, second = pods
    second.wait_for(f"cannot resolve the host name 'train-0.{DOMAIN}'")
    with second.hosts.open("a") as hosts:
        hosts.write(first.hosts.read_text())
    for rank, pod in enumerate(pods):
        pod.wait_for(f"rank {rank} of 2 uid {USER} Read-only file system\n")
        assert "train-0" in pod.tenax("ps")

    # Process 1 reaps the orphans of other commands.
    second.execute("sh", "-c", "(exit 3 &)")
    until(lambda: "Z" not in second.execute("ps", "-eo", "stat"), "process 1 to reap the orphan")

    for pod in pods:
        pod.terminate()
    assert [pod.wait() for pod in pods] == [143, 143]
    assert all("saved\n" in pod.output for pod in pods)
