"""tenax behaves like torch in the cases of ``catalogue.py``, except those with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.processes import needs_torch
from kit.torch_python import TorchPython

pytestmark = needs_torch

_CATALOGUE = Path(__file__).with_name("catalogue.py")

_NO_FILES = "with /dev/null as log folder there are no paths, instead of paths below it; filters still apply"
_ARGUMENTS = "only ${local_rank} is replaced"
_INVALID = "an invalid value raises ValueError with a message, or exits as argparse does"

# Cases with different results on purpose; docs/differences.md lists them for users.
DIFFERENT = {
    "RunResult: is_failed() of UNHEALTHY": "it is not a success",
    "Std.from_str('10:3')": "a host may have more than ten GPUs",
    "logs: no files": _NO_FILES,
    "logs: no files, redirects": _NO_FILES,
    "logs: no files, tee": _NO_FILES,
    "logs: no files, a filter": _NO_FILES,
    "macros.substitute(['$local_rank'])": _ARGUMENTS,
    "macros.substitute(['$$'])": _ARGUMENTS,
    "record: to an unknown handler": "a ValueError with the known handlers",
    "determine_local_world_size('0')": _INVALID,
    "determine_local_world_size('-1')": _INVALID,
    "config_from_args: --nnodes 0 t.py": _INVALID,
    "config_from_args: --nnodes 3:2 t.py": _INVALID,
    "config_from_args: --max-restarts -1 t.py": _INVALID,
    "endpoint: --nnodes 0 t.py": _INVALID,
    "endpoint: --nnodes 3:2 t.py": _INVALID,
    "endpoint: --max-restarts -1 t.py": _INVALID,
    "main: --nproc-per-node 0": _INVALID,
    "main: --nnodes 1:2:3": _INVALID,
    "main: --nnodes 0": _INVALID,
    "main: --nnodes 3:2": _INVALID,
    "main: --max-restarts -1": _INVALID,
    "main: --monitor-interval 0": _INVALID,
    "main: --event-log-handler unknown": _INVALID,
    "main: --log-dir /etc/passwd": _INVALID,
    "_get_or_create_logger: unknown": "a ValueError with the known handlers",
    "endpoint: --nnodes 2 --node-rank 1 --master-addr h --rdzv-id j t.py": "torch's run() adds 29500 later",
    "endpoint: --master-port 7 t.py": "the run id of one node is random",
}


@pytest.fixture(scope="module")
def results(
    torch_python: TorchPython, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, str], dict[str, str]]:
    """The results of torch and of tenax, each from its own process.

    tenax counts devices with the torch of another interpreter; here a small module stands for it, as in
    ``test_devices.py``.
    """
    like_torch = tmp_path_factory.mktemp("like_torch")
    (like_torch / "torch.py").write_text("class xpu:\n    device_count = staticmethod(lambda: 0)\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCH"))}
    torchs = torch_python.run(str(_CATALOGUE), "torch", environ=environ)
    tenaxs = subprocess.run(
        [sys.executable, str(_CATALOGUE), "tenax"],
        env={**environ, "PYTHONPATH": str(like_torch)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (torchs.returncode, tenaxs.returncode) == (0, 0), torchs.stderr + tenaxs.stderr
    return json.loads(torchs.stdout), json.loads(tenaxs.stdout)


def test_the_results_are_the_same_as_torchs(results: tuple[dict[str, str], dict[str, str]]) -> None:
    """Except those with a reason, which still differ. One node needs no rendezvous, so it has no endpoint."""
    torchs, tenaxs = results
    assert list(torchs) == list(tenaxs)
    assert len(tenaxs) > 250
    differing = {case: (torchs[case], tenaxs[case]) for case in tenaxs if tenaxs[case] != torchs[case]}
    of_one_node = {case for case in differing if case.startswith("endpoint") and "'local'" in tenaxs[case]}
    unexpected = {case: values for case, values in differing.items() if case not in DIFFERENT.keys() | of_one_node}
    assert unexpected == {}
    assert [case for case in DIFFERENT if case not in differing] == []
