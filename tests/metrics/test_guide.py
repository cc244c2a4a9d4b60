"""The tables of the guide list every metric, and no other."""

from __future__ import annotations

from docs.pages import DOCS
from tenax.metrics._prometheus import PrometheusMetricHandler
from tenax.metrics._reading import CALLS, MEASURED, STATES, read
from tenax.metrics.api import MetricData

GUIDE = (DOCS / "guides" / "metrics.md").read_text()
_MEASURED = GUIDE.partition("## What is measured")[2]


def rows(heading: str) -> list[tuple[str, ...]]:
    """Return the rows of all tables below this heading, without the headers."""
    lines = _MEASURED.partition(f"### {heading}\n")[2].partition("\n### ")[0].splitlines()
    cells = [tuple(line.strip("| ").split(" | ")) for line in lines if line.startswith("| ")]
    return [row for row in cells if row[0] not in ("name", "---")]


def row_of(group: str, name: str, kind: str, meaning: str) -> tuple[str, ...]:
    reading = read(MetricData(0.0, group, name, 0))
    handler = PrometheusMetricHandler(port=0)
    handler.emit(MetricData(0.0, group, name, 0))
    handler.close()
    (family,) = [line.split()[2] for line in handler.page().splitlines() if line.startswith("# TYPE")]
    labels = f"{{{', '.join(reading.labels)}}}" if reading.labels else ""
    return f"`{name}`", kind, f"`{family}{labels}`", meaning


def test_every_metric_is_in_the_tables() -> None:
    """With its kind, its name in Prometheus and its meaning, in the order of the source."""
    of_functions = [(f"`{call}`", meaning) for call, meaning in CALLS.items()]
    expected = {
        group: [
            row_of(*row)
            for row in MEASURED
            if row.group == group and not any(row.name.startswith(f"{call}.") for call in CALLS)
        ]
        for group in ("tenax", "torchelastic")
    }
    assert rows("Group tenax") == expected["tenax"]
    assert rows("Group torchelastic") == [*expected["torchelastic"], *of_functions]


def test_every_state_and_kind_of_failure_is_listed() -> None:
    assert [each for each in STATES if f"`{each}`" not in _MEASURED] == []
