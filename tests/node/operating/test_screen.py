"""The status screen: fits every terminal, shows the most important first, and contains no control characters."""

from __future__ import annotations

import re

import msgspec
import pytest

from tenax._core.ledger import Goodput, Mean, Spent
from tenax._view.status import EventStatus, FailureStatus, GenerationStatus, NodeStatus, RunStatus
from tenax.cli.status_screen import event_lines, render
from tenax.cli.terminal_table import Column, cells, cut, plain, table, wrapped

pytestmark = pytest.mark.unit

NOW = 1_700_000_000.0
_COLOURS = re.compile(r"\x1b\[[0-9]*m")


def node(number: int, state: str = "working", **fields: object) -> NodeStatus:
    name = f"node{number:04}"
    values = {"node_id": f"id{number}", "name": name, "host": name, "state": state, "since": NOW - 60.0}
    values |= {"slots": 8, "rank": number, "first_rank": number * 8}
    return msgspec.convert({**values, **fields}, NodeStatus)


def failure(rank: int, **fields: object) -> FailureStatus:
    values = {"rank": rank, "local_rank": 0, "host": "node0003", "generation": 2, "exit_code": 1, "at": NOW - 5}
    return msgspec.convert({**values, "what": "exit code 1: RuntimeError: boom", **fields}, FailureStatus)


def status(**fields: object) -> RunStatus:
    nodes = fields.get("nodes", (node(0), node(1)))
    values = {
        "run_id": "llama",
        "now": NOW,
        "phase": "running",
        "doing": "generation 2 is running, 16 workers on 2 nodes",
        "generation": 2,
        "world_size": 16,
        "min_nodes": 2,
        "max_nodes": 4,
        "restarts_used": 1,
        "max_restarts": 3,
        "membership_changes": 1,
        "drains": 2,
        "requests": 0,
        "nodes": nodes,
        "generations": (
            GenerationStatus(1, "first generation", 2, 16, NOW - 900, NOW - 890, NOW - 100, NOW - 90),
            GenerationStatus(2, "rank 3 failed on node0003", 2, 16, NOW - 80, NOW - 75),
        ),
        "generations_forgotten": 0,
        "failures": (),
        "earlier": (),
        "events": tuple(EventStatus(NOW - 100 + i, f"event {i}") for i in range(30)),
        "goodput": Goodput(Spent(10, 20, 800, 10, 60), Mean(1, 0.2), Mean(1, 5.0), 12),
        **fields,
    }
    return msgspec.convert(values, RunStatus)


def plain_screen(text: str) -> list[str]:
    return _COLOURS.sub("", text).splitlines()


def test_it_shows_the_phase_its_duration_and_the_goodput() -> None:
    text = render(status())
    assert text.startswith("run llama: running for 1 min 15 s\n")
    assert "generation  2, formed 1 min 20 s ago: rank 3 failed on node0003" in text
    assert "1 of 3 used, 2 left; 1 membership change; 2 drains" in text
    assert "89 % of 15 min was training" in text
    assert "the failure detected in 200 ms and recovered in 5 s" in re.sub(r"\s+", " ", text)
    assert "nodes, 2 of 2 to 4: 2 working" in text


def test_an_ended_run_shows_its_outcome() -> None:
    text = render(status(phase="over", outcome="failed", doing="the run is over: it is spent", nodes=()))
    assert text.startswith("run llama: failed\n")
    assert "the run is over: it is spent" in text


@pytest.mark.parametrize("width", [1, 40, 47, 60, 80, 200])
@pytest.mark.parametrize("height", [None, 1, 10, 24, 50])
def test_it_fits_every_terminal(width: int, height: int | None) -> None:
    strange = node(7, "draining", name="名前" * 40, failed=(1, 2), steps=(12345, 12399), phases=("checkpoint", ""))
    many = status(
        nodes=(*(node(i) for i in range(20)), strange),
        failures=tuple(failure(i, what="x" * 500, cause="説明 " * 50) for i in range(10)),
        earlier=(failure(0, host="h" * 300), failure(1)),
        doing="word " * 100,
        run_id="r" * 300,
        events=(EventStatus(NOW, "事" * 300),),
    )
    for colour in (False, True):
        text = render(many, width, height, colour=colour)
        assert max(map(cells, plain_screen(text))) <= max(40, width)
        assert height is None or len(text.splitlines()) <= height
        assert text.endswith("\n")


def test_no_information_is_conveyed_by_colour_alone() -> None:
    shown = status(nodes=(node(0), node(1, "draining"), node(2, failed=(0,))), failures=(failure(3),))
    assert plain_screen(render(shown, colour=True)) == render(shown).splitlines()
    assert "\x1b" in render(shown, colour=True)
    assert "working, 1 failed" in render(shown)


def test_nodes_with_problems_come_first() -> None:
    nodes = [node(i) for i in range(1000)]
    nodes[700], nodes[900] = node(700, "draining"), node(900, "starting")
    nodes[500] = node(500, failed=(3,))
    lines = render(status(nodes=tuple(nodes), max_nodes=1000)).splitlines()
    (heading,) = [place for place, line in enumerate(lines) if line.startswith("nodes, ")]
    assert lines[heading] == "nodes, 1000 of 2 to 1000: 998 working, 1 draining, 1 starting"
    names = [line.split()[1] for line in lines[heading + 2 : heading + 6]]
    assert names == ["node0500", "node0700", "node0900", "node0000"]
    assert "  and 984 more: 984 working" in lines
    assert len(lines) < 50


def test_workers_and_steps_are_summarized() -> None:
    nodes = (node(0, steps=(7, 7), slots=2), node(1, slots=2, first_rank=2, steps=(5, 9), phases=("", "checkpoint")))
    text = render(status(nodes=(*nodes, node(2, "spare", rank=-1, first_rank=-1, slots=1))), 100)
    rows = {line.split()[1]: line.split() for line in text.splitlines() if " node000" in line}
    assert rows["node0000"][-3:] == ["ranks", "0-1", "7"]
    assert rows["node0001"][-3:] == ["2-3", "5-9", "checkpoint"]
    assert rows["node0002"][0] == "-"
    assert rows["node0002"][-2:] == ["1", "worker"]


def test_causes_come_before_consequences_and_long_lists_are_cut() -> None:
    others = (
        *(failure(i, role="same") for i in range(4, 10)),
        *(failure(i, role="consequence") for i in range(10, 30)),
    )
    failures = (failure(3, cause="cuda_out_of_memory"), *others)
    text = re.sub(r"\s+", " ", render(status(failures=failures, earlier=(failure(9, generation=1),))))
    assert "failures of generation 2" in text
    assert "rank 3 on node0003 exit code 1: RuntimeError: boom (5 s ago, CUDA out of memory)" in text
    assert "and 3 more" in text
    assert "20 workers failed as a consequence" in text
    assert "rank 9 on node0003 exit code 1: RuntimeError: boom (generation 1, 5 s ago)" in text


@pytest.mark.parametrize("cause", ["exit_code", "killed", "exception"])
def test_a_cause_that_the_failure_states_is_not_repeated(cause: str) -> None:
    assert "boom (5 s ago)" in re.sub(r"\s+", " ", render(status(failures=(failure(3, cause=cause),))))


def test_a_hang_replaces_the_phase() -> None:
    hang = "generation 2 seems to hang: no activity for 5 min; rank 3 on node0003: in load, train.py:7"
    text = re.sub(r"\s+", " ", render(status(hang=hang)))
    assert f"hang {hang}" in text
    assert "is running" not in text
    assert " hang " not in render(status())


def test_a_run_without_restarts_says_so() -> None:
    assert "restarts    none allowed (--max-restarts 0)" in render(status(restarts_used=0, max_restarts=0))


def test_control_characters_in_texts_are_removed() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202e\nsecond"
    shown = status(
        run_id=evil,
        doing=evil,
        nodes=(node(0, name=evil, phases=(evil,)), node(1, evil)),
        failures=(failure(1, host=evil, what=evil, cause=evil),),
        events=(EventStatus(NOW, evil),),
        generations=(GenerationStatus(2, evil, 2, 16, NOW, ended_why=evil),),
    )
    text = render(shown) + "\n".join(event_lines(shown, 0.0))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "owned" in text


def test_a_pipe_gets_each_event_once() -> None:
    shown = status()
    first = event_lines(shown, 0.0)
    assert len(first) == 30
    assert first[0].endswith(" event 0")
    assert [line.split()[-1] for line in event_lines(shown, NOW - 72)] == ["29"]
    assert event_lines(shown, NOW) == []


def test_text_is_cut_and_wrapped_by_its_display_width() -> None:
    assert cells("abc") == 3
    assert cells("名前") == 4
    assert cells("e\u0301") == 1
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdefg", 6) == "abc..."
    assert cells(cut("名前名前名前", 6)) <= 6
    assert wrapped("one two three", 7, 5) == ["one two", "three"]
    assert wrapped("a" * 10, 4, 2) == ["aaaa", "a..."]
    assert wrapped("", 10, 2) == []
    assert plain("a\n b\tc") == "a b c"


def test_a_narrow_table_drops_the_least_important_columns() -> None:
    columns = (Column("A", 2), Column("B", 1), Column("C", 3, min_width=4), Column("D", 9))
    rows = [("1", "22", "three-three", ""), ("4", "55", "six", "")]
    assert table(columns, rows, None) == ["A  B   C", "1  22  three-three", "4  55  six"]
    assert table(columns, rows, 12) == ["A  B   C", "1  22  th...", "4  55  six"]
    assert table(columns, rows, 8) == ["A  C", "1  th...", "4  six"]
    assert table(columns, rows, 5) == ["C", "th...", "six"]


def test_a_column_that_may_shrink_never_grows() -> None:
    columns = (Column("RUN", 9, min_width=12), Column("LOGS", 3))
    assert table(columns, [("a", "/logs/a")], 8) == ["RUN", "a"]
    assert table((Column("RUN", 9, min_width=12), Column("S", 3, min_width=4)), [("a", "long-long")], 10) == [
        "RUN  S",
        "a    lo...",
    ]


def test_what_each_worker_did_last_is_shown_and_the_oldest_comes_first() -> None:
    """Columns without values are omitted, and slow ranks are named above."""
    silent = node(0, slots=2, outputs=(NOW - 300, NOW - 2), cpus=(0.02, 0.98))
    stepping = node(
        1,
        slots=2,
        first_rank=2,
        outputs=(0.0, NOW - 1),
        steps=(12, 1234),
        stepped=(NOW - 8, NOW - 1),
        step_s=(0.6, 0.3),
    )
    text = render(status(nodes=(silent, stepping), slow=("rank 2 on node0001 takes 600 ms per step",)), 100)
    assert "  slow        rank 2 on node0001 takes 600 ms per step\n" in text
    begin = text.index("workers\n  RANK")
    assert text[begin : text.index("\n\n", begin)].splitlines() == [
        "workers",
        "  RANK  NODE      LAST OUTPUT   STEP  LAST STEP  PER STEP   CPU",
        "     0  node0000    5 min ago                               2 %",
        "     2  node0001         none     12    8 s ago    600 ms",
        "     1  node0000      2 s ago                              98 %",
        "     3  node0001      1 s ago  1,234    1 s ago    300 ms",
    ]
