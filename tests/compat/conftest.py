"""Interpreters for the tests of tenax.compat: one with tenax and without torch, and one with neither."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.jobs import Runner

SRC = Path(__file__).parents[2] / "src"
# A package that looks like torch as far as imports are concerned.
LIKE_TORCH = {
    "torch/__init__.py": "version = 'torchs'",
    "torch/nn.py": "Module = 'torchs'",
    "torch/distributed/__init__.py": "def is_torchelastic_launched(): return 'torchs'",
    "torch/distributed/checkpoint.py": "save = 'torchs'",
    "torch/distributed/run.py": "main = 'torchs'",
    "torch/distributed/elastic/__init__.py": "",
    "torch/distributed/elastic/rendezvous/__init__.py": "RendezvousHandler = 'torchs'",
    "torch/distributed/elastic/rendezvous/only_torchs.py": "Thing = 'torchs'",
}


class Python:
    """An interpreter in its own environment."""

    def __init__(self, home: Path, *, has_tenax: bool) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True, timeout=60)
        self.path = str(home / "venv" / "bin" / "python")
        self.libraries = home / "libraries"
        self.libraries.mkdir()
        if has_tenax:
            msgspec = importlib.util.find_spec("msgspec")
            assert msgspec is not None
            assert msgspec.origin is not None
            (self.libraries / "msgspec").symlink_to(Path(msgspec.origin).parent)
            (self.libraries / "tenax").symlink_to(SRC / "tenax")
        # Found like installed packages, so that nothing depends on PYTHONPATH.
        (site,) = (home / "venv").glob("lib/python*/site-packages")
        (site / "libraries.pth").write_text(str(self.libraries))

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        settings = re.compile("PYTHON|TENAX|PET_|TORCH")
        clean = {key: value for key, value in os.environ.items() if not settings.match(key)}
        return subprocess.run(
            [self.path, *args], env={**clean, **env}, capture_output=True, text=True, timeout=60, check=False
        )

    def output(self, code: str, *args: str, **env: str) -> str:
        """Run the code, which must succeed, and return what it prints."""
        done = self.run("-c", textwrap.dedent(code), *args, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Python:
    """An interpreter with tenax and without torch."""
    return Python(tmp_path_factory.mktemp("bare"), has_tenax=True)


@pytest.fixture(scope="session")
def without_tenax(tmp_path_factory: pytest.TempPathFactory) -> Python:
    """An interpreter without tenax and torch."""
    return Python(tmp_path_factory.mktemp("without_tenax"), has_tenax=False)


@pytest.fixture(scope="session")
def like_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a package named torch."""
    home = tmp_path_factory.mktemp("like_torch")
    for name, text in LIKE_TORCH.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    return str(home)


@pytest.fixture
def runner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runner]:
    runner = Runner(tmp_path, f"{abs(hash(request.node.nodeid)):x}")
    yield runner
    runner.close()
