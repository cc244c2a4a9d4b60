"""Other launchers: who is found, how each is called, and that each does the work of an instant worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.harness import Launch, Launcher, Settings
from benchmarks.samples import Samples

from benchmarks import harness, peers, restart

linux = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks are for Linux")
FLAGS = ["--standalone", "--nproc-per-node=2", "--max-restarts=3"]


def test_accelerate_gets_its_own_words_for_torchruns_flags() -> None:
    """It is always alone, and has another name for the number of workers."""
    assert peers.as_accelerate(FLAGS) == ["--num-processes=2", "--max-restarts=3"]
    assert peers.as_torchrun(FLAGS) == FLAGS


def test_a_peer_is_taken_from_the_first_environment_that_has_it(tmp_path: Path) -> None:
    """And from none when it is nowhere."""
    (peer, *_) = peers.PEERS
    for name in ("first", "second", "third"):
        (tmp_path / name / "bin").mkdir(parents=True)
    for name in ("second", "third"):
        (tmp_path / name / "bin" / peer.name).touch()
    environments = [tmp_path / name for name in ("first", "second", "third")]
    launcher = peer.found(environments)
    assert launcher is not None
    assert launcher.command == (str(tmp_path / "second" / "bin" / peer.name),)
    assert peer.found(environments[:1]) is None


def test_who_is_missing_is_said_and_who_is_there_says_its_command() -> None:
    """One sentence each; nobody who was not asked for is mentioned, and no path says where things are kept."""
    floor = peers.find(["subprocess"])
    told = " ".join(peers.notes(["ft_launcher", "subprocess"], floor))
    assert "ft_launcher was not measured: nvidia-resiliency-ext is not installed;" in told
    assert "subprocess: `python bare.py --standalone --nproc-per-node=N --no-python WORKER`" in told
    assert "accelerate" not in told
    assert str(Path(peers.__file__).parent) not in told


def test_the_floor_cannot_restart_and_nobody_has_several_agents() -> None:
    """Who cannot do a case does not take part in it, and says why where it is a case of peers."""
    everybody = [Launcher(name, ()) for name in peers.NAMES]
    assert [launcher.name for launcher in peers.able("launch", everybody)] == list(peers.NAMES)
    assert [launcher.name for launcher in peers.able("restart", everybody)] == ["ft_launcher", "accelerate"]
    assert peers.unable("restart") == {"subprocess": peers.NO_RESTART}
    assert peers.able("agents", everybody) == ()


def test_peers_take_part_in_few_repetitions() -> None:
    """In turns with the others: in the first of every five."""
    ours, peer = Launcher("ours", ()), Launcher("peer", (), every=peers.EVERY)
    turns = list(Settings((ours, peer)).interleaved(7))
    assert [repetition for repetition, launcher in turns if launcher is peer] == [0, 5]
    assert [repetition for repetition, launcher in turns if launcher is ours] == list(range(7))


@pytest.mark.process
@linux
@pytest.mark.parametrize("name", peers.NAMES)
def test_who_is_installed_runs_the_instant_workers(name: str) -> None:
    """All of them, each once, with their ranks; then it is gone with status 0."""
    with Launch(_installed(name), 2, ["exit"]) as launch:
        launch.wait(60)
        assert sorted(event.rank for event in launch.named("end")) == [0, 1]
        assert {event.world for event in launch.named("start")} == {2}


@linux
@pytest.mark.parametrize("name", [name for name in peers.NAMES if name not in peers.unable("restart")])
def test_who_is_installed_and_able_restarts_them(name: str) -> None:
    """Each death has its figures."""
    samples = Samples()
    restart.measure(Settings((_installed(name),), quick=True), samples)
    assert samples.failures == []
    assert {len(figures) for figures in samples.values[name].values()} == {2}


def _installed(name: str) -> Launcher:
    try:
        harness.build_worker()
    except harness.Unusable as reason:
        pytest.skip(str(reason))
    found = peers.find([name])
    if not found:
        pytest.skip(f"{name} is not installed")
    return found[0]


@pytest.mark.process
def test_the_floor_says_when_a_worker_failed() -> None:
    """Without anything else that a launcher does."""
    (floor,) = peers.find(["subprocess"])
    for word, status in (("true", 0), ("false", 1)):
        command = [*floor.command, "--nproc-per-node=2", "--no-python", word]
        assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=False).returncode == status
