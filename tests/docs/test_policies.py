"""The restart policies of the page on restarts: decisions for histories, and real runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.processes import TIMEOUT_S, on_linux
from tenax._core.model import Evidence, Failure
from tenax.policy import Change, Continue, GiveUp, History, Keep, Restart

from .pages import DOCS, samples

pytestmark = on_linux
(SAMPLE,) = [
    each for each in samples(DOCS / "guides/restarts-and-stopping.md") if each.text.startswith("# policies.py")
]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(SAMPLE.text, found)
    return found


def failed(at: float, lived_s: float = 600.0, host: str = "host0") -> Failure:
    return Failure(1, 0, 0, 100, 1, at, evidence=Evidence("E", f"E: {at}"), host=host, lived_s=lived_s)


def decide(policy: Any, *failures: Failure) -> Any:
    *earlier, last = failures
    return policy.decide(last, History(len(earlier), 100, tuple(earlier), (last,), 1, last.lived_s))


def test_back_off(page: dict[str, Any]) -> None:
    """Only failures in a row that came soon count; a generation that lived ends the loop."""
    policy, short = page["BackOff"](), [failed(10.0 * n, lived_s=5.0) for n in range(9)]
    assert isinstance(decide(policy, short[0]), Restart)
    waits = [decide(policy, *short[: n + 1]).seconds for n in range(1, 9)]
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600]
    assert isinstance(decide(policy, *short, failed(200.0)), Restart)
    assert isinstance(decide(policy, *short, failed(200.0), failed(300.0, 5.0)), Restart)
    assert isinstance(policy.decide(short[1], History(1, 1, (short[0],))), GiveUp), "the budget still holds"


def test_same_host(page: dict[str, Any]) -> None:
    policy, other = page["SameHost"](), failed(0.0, host="host1")
    assert isinstance(decide(policy, failed(1.0), other, failed(2.0)), Restart)
    assert decide(policy, failed(1.0), other, failed(2.0), failed(3.0)) == GiveUp(
        "host0 caused 3 failures; check that host"
    )


def test_hourly_limit(page: dict[str, Any]) -> None:
    policy, times = page["HourlyLimit"](), [0.0, 600.0, 1200.0, 1800.0]
    assert isinstance(decide(policy, *map(failed, times)), Restart)
    assert isinstance(decide(policy, *map(failed, [*times, 3599.0])), GiveUp)
    assert isinstance(decide(policy, *map(failed, [*times, 3600.0])), Restart), "the first one is an hour ago"


def test_paid_losses(page: dict[str, Any]) -> None:
    policy, loss, join = (
        page["PaidLosses"](),
        Change("loss", ("host1",), "host1 was lost"),
        Change("join", (), "it joined"),
    )
    assert policy.decide_change(loss, History(1, 2)) == Restart("host1 was lost: restart 2 of 2")
    assert policy.decide_change(loss, History(2, 2)) == GiveUp("all 2 restarts are used")
    assert policy.decide_change(Change("drain", (), "drained"), History(2, 2)) == Continue("drained")
    assert policy.decide_change(join, History(0, 2, lived_s=599)) == Continue("it joined")
    assert policy.decide_change(join, History(0, 2, lived_s=601)) == Keep("the generation is older than 10 minutes")


@pytest.mark.parametrize(
    ("name", "generations", "why"),
    [
        ("policies:SameHost", 3, "caused 3 failures; check that host"),
        ("policies:HourlyLimit", 5, "restarted 4 times within an hour"),
        ("quick:BackOff", 4, "all 3 restarts are used"),
    ],
)
def test_a_real_run(tmp_path: Path, name: str, generations: int, why: str) -> None:
    (tmp_path / "policies.py").write_text(SAMPLE.text)
    (tmp_path / "quick.py").write_text("import policies\nclass BackOff(policies.BackOff):\n    first_s = 0.01\n")
    restarts = "3" if name.startswith("quick") else "9"
    flags = ["--max-restarts", restarts, "--restart-policy", name, "--log-dir", "logs"]
    done = subprocess.run(
        [sys.executable, "-m", "tenax", "run", *flags, "--no-python", "sh", "-c", "exit 3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert f"tenax: generation {generations} " in done.stderr
    assert f"tenax: generation {generations + 1} " not in done.stderr
    assert why in " ".join(done.stderr.split())
    (journal,) = tmp_path.glob("logs/*/coordinator.jsonl")
    assert journal.read_text().count('"decision":"Wait"') == (2 if name.startswith("quick") else 0)
