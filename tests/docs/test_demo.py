"""The demo works and cleans up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .pages import ROOT

TIMEOUT_S = 90


def test_the_demo_succeeds_and_leaves_no_files(tmp_path: Path) -> None:
    """With its output in a pipe: exit code 0 and all three parts."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for text in (
        "was killed by SIGKILL",
        "resumes at step 10",
        "Stopped by tenax, not failed: ranks 0, 2, 3",
        "every decision follows from the recorded events",
    ):
        assert text in ran.stdout
    assert not list(tmp_path.iterdir())


def test_the_example_runs_without_tenax() -> None:
    """The job of the demo imports only the standard library."""
    source = (ROOT / "examples" / "elastic_counter.py").read_text()
    imported = {
        line.split()[1].partition(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))
    }
    assert imported <= set(sys.stdlib_module_names)
