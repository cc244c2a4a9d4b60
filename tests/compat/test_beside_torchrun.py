"""torchrun and tenax in one environment: installing tenax changes nothing for torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kit.processes import needs_torch

pytestmark = needs_torch

ROOT = Path(__file__).parents[2]
METADATA = "import sys; from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with the metadata of tenax as an installation from this source would write it.

    The installation in use may be older than ``pyproject.toml``. torch requires the setuptools that are needed here.
    """
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "src" / "tenax").mkdir(parents=True)
    shutil.copy(ROOT / "src" / "tenax" / "__init__.py", source / "src" / "tenax")
    subprocess.run(
        [sys.executable, "-c", METADATA, str(site)], cwd=source, check=True, timeout=60, stdout=subprocess.DEVNULL
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TENAX"))}
    return {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(site), str(ROOT / "src")])}


def entry_points(environ: dict[str, str], group: str) -> list[str]:
    code = f"from importlib.metadata import entry_points as e; print(*[p.value for p in e(group={group!r})])"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_tenax_adds_nothing_to_the_groups_of_torchrun(installed: dict[str, str]) -> None:
    """The console script shows that the metadata of tenax was read."""
    assert "tenax.cli.main:main" in entry_points(installed, "console_scripts")
    for group in ("torchrun.logs_specs", "torchrun.handlers"):
        assert not [value for value in entry_points(installed, group) if value.startswith("tenax")]


@pytest.mark.parametrize("module", ["torch.distributed.run", "tenax.run"])
def test_the_default_logs_specs_work_with_both(installed: dict[str, str], tmp_path: Path, module: str) -> None:
    """``--logs-specs default`` is the class of the launcher."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--logs-specs", "default", "--log-dir", tmp_path, "--no-python", "echo", "ran"],
        env=installed,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ran" in done.stdout
