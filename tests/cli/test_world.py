"""What is asked for must be here: folders, devices, processors, installed names."""

from __future__ import annotations

import os

import pytest

from tenax.cli.arguments import parse
from tenax.cli.flags import UsageError
from tenax.cli.host_checks import check_host


def refusal(words: list[str], cwd: object, **environ: str) -> str:
    with pytest.raises(UsageError) as error:
        check_host(parse([*words, "t.py"], environ), str(cwd), environ)
    return str(error.value)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "t.py").touch()
    return tmp_path


def test_what_is_here(project) -> None:
    """A folder that can be made, a report that can be written, our own names."""
    words = [
        "--log-dir=a/b/c",
        "--report=r.json",
        "--logs-specs=default",
        "--virtual-local-rank",
        "--numa-binding=node",
    ]
    for line in ([], ["--log-dir=/dev/null"], words):
        check_host(parse([*line, "t.py"], {}), str(project), {})
    assert os.listdir(project) == ["t.py"]


def test_virtual_local_rank_needs_a_device_for_each_worker(project) -> None:
    """Too few devices are refused before the first worker starts."""
    words = ["--virtual-local-rank", "--nproc-per-node=3"]
    assert refusal(words, project, CUDA_VISIBLE_DEVICES="5,7").startswith(
        "--virtual-local-rank needs one device per worker, but CUDA_VISIBLE_DEVICES='5,7' names 2"
    )


def test_a_binding_that_this_machine_cannot_give(project) -> None:
    """More workers than cores cannot have cores of their own."""
    sentence = refusal(["--numa-binding=exclusive", "--nproc-per-node=4096"], project, OMP_NUM_THREADS="1")
    assert sentence.startswith("NUMA binding 'exclusive' is not possible here: ")


def test_names_that_are_not_installed(project) -> None:
    """The sentence lists what there is."""
    assert refusal(["--logs-specs=mine"], project).startswith("--logs-specs mine: ")
    assert refusal(["--rdzv-backend=mine"], project).endswith("there are: c10d, etcd, etcd-v2, local, static, tcp")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_log_folder_that_may_not_be_written(project) -> None:
    """A job of days finds out at its start, not at its end."""
    (project / "closed").mkdir(mode=0o500)
    assert refusal(["--log-dir=closed/logs"], project) == (
        f"--log-dir closed/logs: {project}/closed may not be written to; name another folder"
    )
