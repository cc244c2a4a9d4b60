"""Helper process: a fresh interpreter that has only its channel and is outside the terminal's session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PROGRAM = """
import json, os, select, sys
import tenax._io.helper_process
from tenax._io.helper_process import spawn_helper
pid, channel = spawn_helper("tenax.helper_probe", "tenax-probe", isolated=sys.argv[1] == "isolated")
assert select.select([channel], [], [], 10)[0], "the helper sent nothing"
((properties,), _) = next(channel.receive())
os.waitpid(pid, 0)
print(json.dumps(properties))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the modules that a helper needs, with the probe."""
    source = Path(__file__).parents[2] / "src" / "tenax"
    package = tmp_path / "packages" / "tenax"
    (package / "_io").mkdir(parents=True)
    for name in ("__init__.py", "_io/__init__.py", "_io/helper_channel.py", "_io/helper_process.py"):
        (package / name).write_text((source / name).read_text())
    (package / "helper_probe.py").write_text((Path(__file__).parent / "helper_probe.py").read_text())
    (tmp_path / "socket.py").write_text("raise ImportError('imported from the current directory')")
    return tmp_path


def run_probe(folder: Path, mode: str) -> dict[str, object]:
    import json

    extra_read, extra_write = os.pipe()
    os.set_inheritable(extra_write, True)
    code = f"import sys; sys.path.append({str(folder / 'packages')!r}); exec({PROGRAM!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code, mode],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder / "packages")},
            close_fds=False,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    finally:
        os.close(extra_read)
        os.close(extra_write)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("mode", ["isolated", "shared"])
def test_a_helper_has_only_its_channel(folder: Path, mode: str) -> None:
    """It leads its session and holds the standard streams and the channel, whatever its parent left open."""
    properties = run_probe(folder, mode)
    assert properties["leads_session"] is True
    assert properties["descriptors"] == [0, 1, 2, 3]
    assert properties["stdin"] == os.devnull
    assert properties["name"] == "tenax-probe"
    assert properties["looks_in_current_directory"] is False
    assert properties["inheritable"] is False


def test_an_isolated_helper_ignores_the_users_python(folder: Path) -> None:
    """It reads no PYTHON variables and no site packages; one that is not isolated does."""
    assert [run_probe(folder, "isolated")[name] for name in ("isolated", "no_site")] == [1, 1]
    assert [run_probe(folder, "shared")[name] for name in ("isolated", "no_site")] == [0, 0]
