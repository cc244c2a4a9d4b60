"""The checker of histories bites: each promise is broken once, in writing, and it is this one that is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .history import History

pytestmark = pytest.mark.unit


def write(folder: Path, rank: int, generation: int, **told: Any) -> None:
    """One worker's trace: born at ten times its generation, alive for five seconds."""
    born_at = told.pop("born_at", 10.0 * generation)
    last_at = told.pop("last_at", born_at + 5)
    about = {
        "rank": rank,
        "local_rank": 0,
        "world_size": 2,
        "generation": generation,
        "restart_count": 0,
        "pid": 100 * generation + rank,
        "host": f"node{rank}",
        "master_addr": "10.0.0.1",
        "master_port": str(30000 + generation),
        **told,
    }
    start = {
        "event": "start",
        "step": 0,
        "at": born_at + 0.1,
        "born_at": born_at,
        "birth_mark": "1",
        "alive_before": [],
    }
    lines = [start | about, {"event": "step", "step": 7, "at": last_at} | about]
    with (folder / f"trace-{rank}-{generation}.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def violations(folder: Path) -> list[str]:
    history = History(folder)
    history.update()
    return history.violations(max_restarts=1)


def test_a_good_history_has_none(tmp_path: Path) -> None:
    for generation in (1, 2, 4):
        for rank in (0, 1):
            write(tmp_path, rank, generation, restart_count=int(generation > 1))
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"rank": 0, "host": "node1", "pid": 999}, "S1: a rank was given twice"),
        ({"world_size": 3}, "S3: the workers of generation 2 of 2: ranks 0 on node0, 1 on node1 were told different"),
        ({"master_port": "1"}, "S3: the workers of generation 2"),
        ({"restart_count": 1}, "S3: the workers of generation 2"),
        ({"rank": 2}, "S3: the ranks of generation 2"),
        ({"host": "node0", "rank": 1, "local_rank": 1, "alive_before": [101]}, "S2: rank 1 of generation 2 on node0"),
    ],
)
def test_a_worker_that_was_told_something_else_is_found(tmp_path: Path, told: dict[str, Any], named: str) -> None:
    write(tmp_path, 0, 1)
    write(tmp_path, 0, 2)
    rank = told.pop("rank", 1)
    if "alive_before" in told:
        write(tmp_path, rank, 2, **{key: value for key, value in told.items() if key != "alive_before"})
        path = tmp_path / f"trace-{rank}-2.jsonl"
        path.write_text(path.read_text().replace('"alive_before": []', f'"alive_before": {told["alive_before"]}'))
    else:
        write(tmp_path, rank, 2, **told)
    assert any(problem.startswith(named) for problem in violations(tmp_path)), violations(tmp_path)


def test_a_worker_that_outlives_the_beginning_of_the_next_generation_is_found(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    write(tmp_path, 1, 1, last_at=20.1)
    write(tmp_path, 0, 2)
    write(tmp_path, 1, 2, born_at=20.5)
    (problem,) = violations(tmp_path)
    assert problem.startswith("S1, S2: rank 1 of generation 1 on node1 (pid 101) was alive 0.100 s after generation 2")


def test_a_worker_that_is_started_after_the_next_generation_is_found(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    write(tmp_path, 1, 1, born_at=20.2)
    write(tmp_path, 0, 2)
    assert any(problem.startswith("S10: rank 1 of generation 1") for problem in violations(tmp_path))


def test_ports_that_come_again_and_budgets_that_do_not_add_up_are_found(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, restart_count=3)
    write(tmp_path, 0, 2, restart_count=2, master_port="30001")
    named = sorted(problem.partition(":")[0] for problem in violations(tmp_path))
    assert named == ["S4", "S5", "S5"]
