"""The programs of the customization guide work, also those with several files."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kit.addresses import own_endpoint
from kit.processes import TIMEOUT_S, on_linux

from .agents import Start, start
from .pages import DOCS, Sample, samples

pytestmark = on_linux
__all__ = ["start"]

PAGE = DOCS / "guides" / "customization.md"
_NAME = re.compile(r"# (\w+\.py)\n")


def named(*pages: Path) -> dict[str, Sample]:
    """Return the samples that are files, by the name in their first line."""
    found = [(match[1], sample) for page in pages for sample in samples(page) if (match := _NAME.match(sample.text))]
    assert len(dict(found)) == len(found), "two samples have the same name"
    return dict(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, sample in named(PAGE).items():
        (tmp_path / name).write_text(sample.text)
    return tmp_path


def run(folder: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_program_of_the_page_is_run() -> None:
    """By its mark, or by a test of this module."""
    tested = {"my_launcher.py", "test_my_store.py"}
    left_out = [
        sample.name
        for sample in samples(PAGE)
        if sample.language == "python" and not sample.is_to_run and sample.text[2:].partition("\n")[0] not in tested
    ]
    assert not left_out


def test_the_launcher_prints_what_the_page_shows(folder: Path) -> None:
    (shown,) = [sample.text for sample in samples(PAGE) if sample.text.startswith("$ python3 my_launcher.py")]
    command, *expected = shown.splitlines()
    assert run(folder, *shlex.split(command)[2:]).splitlines() == expected


def test_the_launcher_prints_how_a_worker_failed(folder: Path) -> None:
    """By an exception, and by a signal."""
    launcher = folder / "my_launcher.py"
    whole = launcher.read_text()
    for line, message in (
        ("raise ValueError(f'{greeting} is wrong')", "rank 0 failed: ValueError: hi is wrong"),
        ("os.kill(os.getpid(), 9)", "rank 0 failed: Signal 9 (SIGKILL) received by PID "),
    ):
        launcher.write_text(whole.replace("def train(greeting):\n", f"def train(greeting):\n    {line}\n"))
        done = subprocess.run(
            [sys.executable, "my_launcher.py", "--max-restarts", "0", "hi"],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=2 * TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 1
        assert [line for line in done.stderr.splitlines() if line.startswith(message)], done.stderr


def test_the_launcher_joins_several_nodes(folder: Path) -> None:
    """Two launchers at one endpoint: four ranks, each printed by its own node."""
    command = [sys.executable, "my_launcher.py", "--nodes", "2", "--endpoint", own_endpoint(), "--workers", "2", "hi"]
    env = {**os.environ, "TMPDIR": str(folder)}
    nodes = [subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        outputs = [node.communicate(timeout=2 * TIMEOUT_S)[0].splitlines() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert sorted(outputs) == [[f"hi from rank {rank} of 4" for rank in ranks] for ranks in ((0, 1), (2, 3))]


def test_the_handler_reports_a_waiting_node_to_the_others(folder: Path) -> None:
    """A node whose workers failed waits in the next round."""
    program = """
from threading import Thread
from my_rendezvous import InFolder

one, other = (InFolder("rendezvous", "run", 2) for _ in range(2))

def join(*handlers):
    joined = []
    threads = [Thread(target=lambda each=each: joined.append(each.next_rendezvous())) for each in handlers]
    for thread in threads:
        thread.start()
    return threads, joined

def finish(threads):
    for thread in threads:
        thread.join()

threads, joined = join(one, other)
finish(threads)
assert sorted(rank for _, rank, _ in joined) == [0, 1]
assert other.num_nodes_waiting() == 0
threads, joined = join(one)
while not other.num_nodes_waiting():
    pass
more, also_joined = join(other)
finish(threads + more)
assert sorted(rank for _, rank, _ in joined + also_joined) == [0, 1]
assert not one.is_closed()
one.set_closed()
assert other.is_closed()
"""
    run(folder, "-c", program)


def test_the_store_keeps_the_contract(folder: Path) -> None:
    """The test module of the page is collected and passes."""
    passed = re.search(r"(\d+) passed", run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_store.py"))
    assert passed is not None
    assert int(passed[1]) > 20


FAST_TESTS = "forms or shares or fresh or closed or in_time"  # without tests that wait to see that nothing happens


def test_the_backend_keeps_the_contract(tmp_path: Path) -> None:
    """The test module of the other page, with its own backend."""
    page = DOCS / "guides" / "custom-rendezvous.md"
    (backend,) = [sample.text for sample in samples(page) if "class FolderBackend" in sample.text]
    (contract,) = [sample.text for sample in samples(page) if "RendezvousHandlerContract" in sample.text]
    (tmp_path / "my_package.py").write_text(backend)
    (tmp_path / "test_folder.py").write_text(contract)
    output = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", FAST_TESTS, "test_folder.py")
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None
    assert int(passed[1]) >= 5


# --- entry points -----------------------------------------------------------------------------------------------------


def install(folder: Path, entries: str) -> None:
    """Write the metadata of an installed package with these entry points."""
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    lines = re.sub(r'\[project\.entry-points\."(.+)"\]', r"[\1]", entries).replace('"', "")
    (info / "entry_points.txt").write_text(lines)


def test_entry_points_of_an_installed_package_are_used(start: Start, folder: Path) -> None:
    """The command line of the page on two nodes uses all four entry points of the page."""
    (entries,) = [sample.text for sample in samples(PAGE) if sample.language == "toml"]
    (line,) = [sample.text for sample in samples(PAGE) if sample.language == "console" and "--metrics" in sample.text]
    install(folder, entries)
    (folder / "train.py").write_text("import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE']); sys.exit(3)")
    args = shlex.split(line.removeprefix("$ ").replace("\\\n", " "))[2:]
    nodes = [start(args, PYTHONPATH=str(folder)) for _ in range(2)]
    assert [node.ended() for node in nodes] == [3, 3], nodes
    for rank in range(2):
        assert (folder / "kept" / f"rank-{rank}-generation-1.out").read_text() == f"{rank} 2\n"
    assert (folder / "metrics.csv").read_text().splitlines().count("torchelastic,workers.default.run_total,1") == 2
    assert sorted((folder / "alarms").read_text().splitlines()) == ["job17: rank 0 3", "job17: rank 1 3"]
