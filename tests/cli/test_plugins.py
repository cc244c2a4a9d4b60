"""A broken plug-in of an installed package is a usage error before the start, not a bug in tenax."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

GROUPS = {
    "--rdzv-backend": "torchrun.handlers",
    "--logs-specs": "torchrun.logs_specs",
    "--metrics": "tenax.metric_handlers",
    "--event-log-handler": "tenax.event_handlers",
    "--restart-policy": "tenax.restart_policies",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An installed package whose plug-ins are all broken."""
    info = tmp_path / "extra-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\nmissing = nowhere:make\nbroken = extra:make\nnothing = extra:nothing\nunfit = extra:unfit\n"
            for group in GROUPS.values()
        )
    )
    (tmp_path / "extra.py").write_text(
        "def make(*args, **options):\n    raise KeyError('no key')\n"
        "def nothing(argument=''):\n    return None\n"
        "def unfit(argument=''):\n    return object()\n"
    )
    (tmp_path / "train.py").write_text("print('never')\n")
    return tmp_path


WHY = {"missing": "ModuleNotFoundError: No module named 'nowhere'", "broken": "KeyError: 'no key'"}
CASES = [
    *((flag, name, why) for flag in GROUPS for name, why in WHY.items()),
    *(
        (flag, name, f" '{name}' is {what}; its factory must return an object with a method '{method}'")
        for flag, method in (("--metrics", "emit"), ("--event-log-handler", "record"), ("--restart-policy", "decide"))
        for name, what in (("nothing", "None"), ("unfit", "of type 'object'"))
    ),
]


@pytest.mark.parametrize(("flag", "name", "why"), CASES)
def test_a_broken_plugin_is_named(package: Path, flag: str, name: str, why: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tenax", "run", flag, name, "train.py"],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tenax run: ")
    assert name in done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stderr
