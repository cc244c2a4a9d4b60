"""Other launchers: which are found, how each is called, and that each runs the instant workers."""

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


def test_torchruns_flags_are_translated_for_accelerate() -> None:
    """It runs on one machine only, and has another flag for the number of workers."""
    assert peers.as_accelerate(FLAGS) == ["--num-processes=2", "--max-restarts=3"]
    assert peers.as_torchrun(FLAGS) == FLAGS


def test_a_peer_is_taken_from_the_first_environment_that_has_it(tmp_path: Path) -> None:
    """None, if no environment has it."""
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


def test_a_missing_launcher_is_reported_and_an_installed_one_has_its_command() -> None:
    """Launchers that were not requested are not mentioned, and there are no local paths."""
    floor = peers.find(["subprocess"])
    text = " ".join(peers.notes(["ft_launcher", "subprocess"], floor))
    assert "ft_launcher was not measured: nvidia-resiliency-ext is not installed;" in text
    assert "subprocess: `python bare.py --standalone --nproc-per-node=N --no-python WORKER`" in text
    assert "accelerate" not in text
    assert str(Path(peers.__file__).parent) not in text


def test_the_floor_cannot_restart_and_no_peer_has_several_agents() -> None:
    """A peer does not take part in cases that it does not support, and there is a reason for it."""
    launchers = [Launcher(name, ()) for name in peers.NAMES]
    assert [launcher.name for launcher in peers.able("launch", launchers)] == list(peers.NAMES)
    assert [launcher.name for launcher in peers.able("restart", launchers)] == ["ft_launcher", "accelerate"]
    assert peers.unable("restart") == {"subprocess": peers.NO_RESTART}
    assert peers.able("agents", launchers) == ()


def test_peers_take_part_in_few_repetitions() -> None:
    """In turns with the others: in the first of every five."""
    ours, peer = Launcher("ours", ()), Launcher("peer", (), every=peers.EVERY)
    turns = list(Settings((ours, peer)).interleaved(7))
    assert [repetition for repetition, launcher in turns if launcher is peer] == [0, 5]
    assert [repetition for repetition, launcher in turns if launcher is ours] == list(range(7))


@pytest.mark.process
@linux
@pytest.mark.parametrize("name", peers.NAMES)
def test_an_installed_peer_runs_the_instant_workers(name: str) -> None:
    """Each once, with its rank; then it exits with status 0."""
    with Launch(_installed(name), 2, ["exit"]) as launch:
        launch.wait(60)
        assert sorted(event.rank for event in launch.named("end")) == [0, 1]
        assert {event.world for event in launch.named("start")} == {2}


@pytest.mark.process
@linux
@pytest.mark.parametrize("name", [name for name in peers.NAMES if name not in peers.unable("restart")])
def test_an_installed_peer_that_can_restart_restarts_the_workers(name: str) -> None:
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
def test_the_floor_exits_with_the_status_of_its_workers() -> None:
    (floor,) = peers.find(["subprocess"])
    for program, status in (("true", 0), ("false", 1)):
        command = [*floor.command, "--nproc-per-node=2", "--no-python", program]
        assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=False).returncode == status
