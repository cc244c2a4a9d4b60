"""The demo: what a newcomer runs first does what it says, and cleans up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .pages import ROOT

LONGEST_S = 90


def test_the_demo_ends_well_and_leaves_nothing(tmp_path: Path) -> None:
    """In a pipe: exit code 0, all three acts, and an empty temporary folder afterwards."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
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
    """The job of the demo needs nothing of tenax but its environment variables: it imports the standard library."""
    source = (ROOT / "examples" / "elastic_counter.py").read_text()
    imported = {
        line.split()[1].partition(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))
    }
    assert imported <= set(sys.stdlib_module_names)
