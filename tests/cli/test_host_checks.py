"""Checks of the host before a start: folders, devices, CPUs, installed plug-ins."""

from __future__ import annotations

import os

import pytest

from tenax.cli.arguments import parse
from tenax.cli.flags import UsageError
from tenax.cli.host_checks import check_host


def error_of(args: list[str], cwd: object, **environ: str) -> str:
    with pytest.raises(UsageError) as error:
        check_host(parse([*args, "t.py"], environ), environ, str(cwd))
    return str(error.value)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "t.py").touch()
    return tmp_path


def test_valid_options_are_accepted_and_no_file_is_created(project) -> None:
    args = [
        "--log-dir=a/b/c",
        "--report=r.json",
        "--logs-specs=default",
        "--virtual-local-rank",
        "--numa-binding=node",
    ]
    for line in ([], ["--log-dir=/dev/null"], args):
        check_host(parse([*line, "t.py"], {}), {}, str(project))
    assert os.listdir(project) == ["t.py"]


def test_virtual_local_rank_needs_a_device_for_each_worker(project) -> None:
    args = ["--virtual-local-rank", "--nproc-per-node=3"]
    assert error_of(args, project, CUDA_VISIBLE_DEVICES="5,7").startswith(
        "--virtual-local-rank needs one device per worker, but CUDA_VISIBLE_DEVICES='5,7' names 2"
    )


def test_an_impossible_numa_binding_is_rejected(project) -> None:
    """There are more workers than cores."""
    message = error_of(["--numa-binding=exclusive", "--nproc-per-node=4096"], project, OMP_NUM_THREADS="1")
    assert message.startswith("NUMA binding 'exclusive' is not possible here: ")


def test_an_unknown_plug_in_is_rejected_with_the_installed_ones(project) -> None:
    assert error_of(["--logs-specs=mine"], project).startswith("--logs-specs mine: ")
    assert error_of(["--rdzv-backend=mine"], project).endswith(
        "installed backends: c10d, etcd, etcd-v2, local, static, tcp"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_log_folder_without_write_permission_is_rejected(project) -> None:
    (project / "closed").mkdir(mode=0o500)
    assert error_of(["--log-dir=closed/logs"], project) == (
        f"--log-dir closed/logs: no permission to write to {project}/closed; use another folder"
    )
