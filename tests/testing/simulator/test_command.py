"""The command ``python -m tenax.testing.simulator``: its output and exit code."""

from __future__ import annotations

import re

import pytest

from tenax.testing.simulator import draw
from tenax.testing.simulator.__main__ import main


def test_many_seeds_print_one_summary_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "5", "--start", "3"]) == 0
    assert capsys.readouterr().out.startswith("5 seeds, 0 broken: ")


def test_the_first_seed_is_random_unless_given(capsys: pytest.CaptureFixture[str]) -> None:
    """The first seed is printed, and repeats the same simulations when passed to --start."""
    assert main(["--seeds", "2"]) == 0
    first, summary = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"first seed: (\d+) \(--start \1 repeats this\)", first)
    assert found is not None
    assert main(["--seeds", "2", "--start", found[1]]) == 0
    (again,) = capsys.readouterr().out.splitlines()
    assert again.rpartition(" in ")[0] == summary.rpartition(" in ")[0]
    assert main(["--seeds", "1"]) == 0
    assert not capsys.readouterr().out.startswith(f"first seed: {found[1]} ")


@pytest.mark.process
def test_several_processes_simulate_the_same_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "6", "--start", "3"]) == 0
    alone = capsys.readouterr().out
    assert main(["--seeds", "6", "--start", "3", "--jobs", "2"]) == 0
    assert capsys.readouterr().out.rpartition(" in ")[0] == alone.rpartition(" in ")[0]


def test_history_prints_the_history_of_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engine", "tcp", "--seed", "3", "--history"]) == 0
    out = capsys.readouterr().out
    assert "host0/coord   Opened() -> " in out
    assert "seed 3: every property holds\n" in out


def test_the_engine_can_be_chosen_and_is_drawn_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engine", "etcd", "--seed", "3", "--history"]) == 0
    assert "elected through etcd" in capsys.readouterr().out
    assert {draw(seed, engine="").has_etcd for seed in range(20)} == {False, True}


def test_nodes_hours_and_mode_replace_what_the_seed_draws(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "8", "--history", "--nodes", "9", "--hours", "0.005", "--mode", "liveness"]) == 0
    out = capsys.readouterr().out
    assert "/n9 " in out
    assert "    18.0000  CALM          the faults stop" in out


def test_a_crowd_prints_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nodes", "30", "--hours", "0.2", "--deaths-per-minute", "1", "--spares", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("30 nodes and 2 spares, 0.2 h, ")
    assert "every property holds" in out
