"""The page on customization: its programs do what it says, also those that need more than one file."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kit.addresses import own_endpoint
from kit.processes import PATIENCE_S, on_linux

from .agents import Start, start
from .pages import DOCS, Sample, samples

pytestmark = on_linux
__all__ = ["start"]

PAGE = DOCS / "guides" / "customization.md"
_NAME = re.compile(r"# (\w+\.py)\n")


def named(*pages: Path) -> dict[str, Sample]:
    """The samples that are files: their first line says which."""
    found = [(match[1], sample) for page in pages for sample in samples(page) if (match := _NAME.match(sample.text))]
    assert len(dict(found)) == len(found), "two samples have the same name"
    return dict(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, sample in named(PAGE).items():
        (tmp_path / name).write_text(sample.text)
    return tmp_path


def run(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_program_of_the_page_is_run() -> None:
    """By its mark or by a test of this module."""
    here = {"my_launcher.py", "test_my_store.py"}
    left_out = [
        sample.name
        for sample in samples(PAGE)
        if sample.language == "python" and not sample.is_to_run and sample.text[2:].partition("\n")[0] not in here
    ]
    assert not left_out


def test_the_launcher_says_what_the_page_shows(folder: Path) -> None:
    """One node: the line, and what is below it."""
    (shown,) = [sample.text for sample in samples(PAGE) if sample.text.startswith("$ python3 my_launcher.py")]
    command, *said = shown.splitlines()
    assert run(folder, *shlex.split(command)[2:]).splitlines() == said


def test_the_launcher_says_in_words_how_a_worker_failed(folder: Path) -> None:
    """Both that one raised and that one was killed, on a line each."""
    launcher = folder / "my_launcher.py"
    whole = launcher.read_text()
    for line, said in (
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
            timeout=2 * PATIENCE_S,
            check=False,
        )
        assert done.returncode == 1
        assert [line for line in done.stderr.splitlines() if line.startswith(said)], done.stderr


def test_the_launcher_joins_several_nodes(folder: Path) -> None:
    """Two of it, at one endpoint: four ranks, each told by its own node."""
    words = [sys.executable, "my_launcher.py", "--nodes", "2", "--endpoint", own_endpoint(), "--workers", "2", "hi"]
    env = {**os.environ, "TMPDIR": str(folder)}
    nodes = [subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        said = [node.communicate(timeout=2 * PATIENCE_S)[0].splitlines() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert sorted(said) == [[f"hi from rank {rank} of 4" for rank in ranks] for ranks in ((0, 1), (2, 3))]


def test_the_handler_calls_the_others_when_one_meets_again(folder: Path) -> None:
    """A node whose workers failed waits in the next round, and the other one is told to come."""
    program = """
from threading import Thread
from my_rendezvous import InFolder

one, other = (InFolder("meeting", "run", 2) for _ in range(2))

def meet(*handlers):
    met = []
    threads = [Thread(target=lambda each=each: met.append(each.next_rendezvous())) for each in handlers]
    for thread in threads:
        thread.start()
    return threads, met

def finish(threads):
    for thread in threads:
        thread.join()

threads, met = meet(one, other)
finish(threads)
assert sorted(rank for _, rank, _ in met) == [0, 1]
assert other.num_nodes_waiting() == 0
threads, met = meet(one)
while not other.num_nodes_waiting():
    pass
more, met_too = meet(other)
finish(threads + more)
assert sorted(rank for _, rank, _ in met + met_too) == [0, 1]
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


CONTRACT_OF_A_GROUP = "forms or shares or fresh or closed or in_time"  # what does not wait to see that nothing happens


def test_the_backend_keeps_the_contract(tmp_path: Path) -> None:
    """The module of the other page, against its own backend."""
    page = DOCS / "guides" / "custom-rendezvous.md"
    (backend,) = [sample.text for sample in samples(page) if "class FolderBackend" in sample.text]
    (contract,) = [sample.text for sample in samples(page) if "RendezvousHandlerContract" in sample.text]
    (tmp_path / "my_package.py").write_text(backend)
    (tmp_path / "test_folder.py").write_text(contract)
    said = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CONTRACT_OF_A_GROUP, "test_folder.py")
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None
    assert int(passed[1]) >= 5


# --- entry points -----------------------------------------------------------------------------------------------------


def install(folder: Path, entries: str) -> None:
    """What an installer leaves behind, as far as entry points are concerned."""
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    lines = re.sub(r'\[project\.entry-points\."(.+)"\]', r"[\1]", entries).replace('"', "")
    (info / "entry_points.txt").write_text(lines)


def test_what_a_package_offers_is_found_by_name(start: Start, folder: Path) -> None:
    """The command line of the page on two nodes, with the entries of the page: each of the four has done its work."""
    (entries,) = [sample.text for sample in samples(PAGE) if sample.language == "toml"]
    (line,) = [sample.text for sample in samples(PAGE) if sample.language == "console" and "--metrics" in sample.text]
    install(folder, entries)
    (folder / "train.py").write_text("import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE']); sys.exit(3)")
    words = shlex.split(line.removeprefix("$ ").replace("\\\n", " "))[2:]
    nodes = [start(words, PYTHONPATH=str(folder)) for _ in range(2)]
    assert [node.ended() for node in nodes] == [3, 3], nodes
    for rank in range(2):
        assert (folder / "kept" / f"rank-{rank}-generation-1.out").read_text() == f"{rank} 2\n"
    assert (folder / "metrics.csv").read_text().splitlines().count("torchelastic,workers.default.run_total,1") == 2
    assert sorted((folder / "alarms").read_text().splitlines()) == ["job17: rank 0 3", "job17: rank 1 3"]
