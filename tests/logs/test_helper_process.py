"""Helper process: fresh, alone with its channel, and out of the terminal's reach."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ASK = """
import json, os, select, sys
import tenax._io.helper_process
from tenax._io.helper_process import spawn_helper
pid, channel = spawn_helper("tenax.helper_probe", "tenax-probe", isolated=sys.argv[1] == "isolated")
assert select.select([channel], [], [], 10)[0], "the helper did not answer"
((facts,), _) = next(channel.receive())
os.waitpid(pid, 0)
print(json.dumps(facts))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A copy of what a helper needs, with a probe among it."""
    source = Path(__file__).parents[2] / "src" / "tenax"
    package = tmp_path / "packages" / "tenax"
    (package / "_io").mkdir(parents=True)
    for name in ("__init__.py", "_io/__init__.py", "_io/helper_channel.py", "_io/helper_process.py"):
        (package / name).write_text((source / name).read_text())
    (package / "helper_probe.py").write_text((Path(__file__).parent / "helper_probe.py").read_text())
    (tmp_path / "socket.py").write_text("raise ImportError('the current directory stands in for the library')")
    return tmp_path


def ask(place: Path, mode: str) -> dict[str, object]:
    import json

    extra_read, extra_write = os.pipe()
    os.set_inheritable(extra_write, True)
    code = f"import sys; sys.path.append({str(place / 'packages')!r}); exec({ASK!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code, mode],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(place / "packages")},
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
def test_a_helper_has_only_its_channel(place: Path, mode: str) -> None:
    """It leads its session, holds three standard streams and the channel, whatever its parents left open."""
    facts = ask(place, mode)
    assert facts["leads_session"] is True
    assert facts["descriptors"] == [0, 1, 2, 3]
    assert facts["stdin"] == os.devnull
    assert facts["name"] == "tenax-probe"
    assert facts["looks_in_current_directory"] is False
    assert facts["inheritable"] is False


def test_isolated_means_without_the_users_python(place: Path) -> None:
    """An isolated helper reads no PYTHON variables and no site packages, and no neighbour of tenax; the other does."""
    assert [ask(place, "isolated")[fact] for fact in ("isolated", "no_site")] == [1, 1]
    assert [ask(place, "shared")[fact] for fact in ("isolated", "no_site")] == [0, 0]
