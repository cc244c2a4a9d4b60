"""The history checker detects the violation of each invariant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .history import History

pytestmark = pytest.mark.unit


def write(folder: Path, rank: int, generation: int, **fields: Any) -> None:
    """Write one worker's trace: started at 10 s times its generation, alive for 5 s."""
    born_at = fields.pop("born_at", 10.0 * generation)
    last_at = fields.pop("last_at", born_at + 5)
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
        **fields,
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


def test_a_valid_history_has_no_violations(tmp_path: Path) -> None:
    for generation in (1, 2, 4):
        for rank in (0, 1):
            write(tmp_path, rank, generation, restart_count=int(generation > 1))
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rank": 0, "host": "node1", "pid": 999}, "S1: a rank was assigned twice"),
        ({"world_size": 3}, "S3: the workers of generation 2 of 2: ranks 0 on node0, 1 on node1 have different values"),
        ({"master_port": "1"}, "S3: the workers of generation 2"),
        ({"restart_count": 1}, "S3: the workers of generation 2"),
        ({"rank": 2}, "S3: the ranks of generation 2"),
        ({"host": "node0", "rank": 1, "local_rank": 1, "alive_before": [101]}, "S2: rank 1 of generation 2 on node0"),
    ],
)
def test_a_worker_with_inconsistent_values_is_detected(tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
    write(tmp_path, 0, 1)
    write(tmp_path, 0, 2)
    rank = fields.pop("rank", 1)
    if "alive_before" in fields:
        write(tmp_path, rank, 2, **{key: value for key, value in fields.items() if key != "alive_before"})
        path = tmp_path / f"trace-{rank}-2.jsonl"
        path.write_text(path.read_text().replace('"alive_before": []', f'"alive_before": {fields["alive_before"]}'))
    else:
        write(tmp_path, rank, 2, **fields)
    assert any(problem.startswith(expected) for problem in violations(tmp_path)), violations(tmp_path)


def test_a_worker_alive_after_the_start_of_the_next_generation_is_detected(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    write(tmp_path, 1, 1, last_at=20.1)
    write(tmp_path, 0, 2)
    write(tmp_path, 1, 2, born_at=20.5)
    (problem,) = violations(tmp_path)
    assert problem.startswith(
        "S1, S2: rank 1 of generation 1 on node1 (pid 101) was alive 0.100 s after the start of generation 2"
    )


def test_a_worker_started_after_the_next_generation_is_detected(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    write(tmp_path, 1, 1, born_at=20.2)
    write(tmp_path, 0, 2)
    assert any(problem.startswith("S10: rank 1 of generation 1") for problem in violations(tmp_path))


def test_reused_ports_and_wrong_restart_counts_are_detected(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, restart_count=3)
    write(tmp_path, 0, 2, restart_count=2, master_port="30001")
    expected = sorted(problem.partition(":")[0] for problem in violations(tmp_path))
    assert expected == ["S4", "S5", "S5"]
