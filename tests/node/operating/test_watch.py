"""``tenax status --watch``: on a terminal one screen that follows the run, in a pipe a line for each event."""

from __future__ import annotations

import json
import os
import re

from kit.jobs import TENAX, until

from .kit import Operator


def test_on_a_terminal_it_follows_the_run_until_ctrl_c(operator: Operator) -> None:
    (agent,) = operator.cluster.start(nodes=(1, 1), run_id="solo", backend="local", workers=2)
    operator.until_found(agent)
    operator.cluster.hub.generation(2)
    terminal = operator.terminal("status", "--watch", columns=60, rows=20)
    terminal.until("generation 1 is running, 2 workers on 1 node")
    assert operator.tenax("restart", "--yes").code == 0
    workers = operator.cluster.hub.generation(2, 2)
    terminal.until("generation 2 is running, 2 workers on 1 node")
    assert "\x1b[32m" in terminal.seen
    terminal.type(b"\x03")
    assert terminal.wait() == 0
    assert "Traceback" not in terminal.seen
    quiet = operator.terminal("status", env={"NO_COLOR": "1"})
    assert quiet.wait() == 0
    assert "generation 2 is running" in quiet.seen
    assert "\x1b" not in quiet.seen
    operator.cluster.finish(workers)


def test_in_a_pipe_every_event_is_one_line_until_the_run_ends(operator: Operator) -> None:
    (agent,) = operator.cluster.start(nodes=(1, 1), run_id="solo", backend="local")
    operator.until_found(agent)
    operator.cluster.hub.generation(1)
    watching = operator.runner.start("status", "--watch", program=TENAX)
    values = operator.runner.start("status", "--watch", "--json", program=TENAX)
    until(lambda: "started its worker" in watching.out and values.out, lambda: f"lines; there are {watching.out}")
    assert operator.tenax("stop", "--yes", "--why", "enough").code == 0
    done, statuses_done = watching.wait(), values.wait()
    assert agent.wait() == 130
    lines = done.out.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d \S", line) for line in lines)
    assert sum("started its worker" in line for line in lines) == 1
    assert sum("an operator ended the run: enough" in line for line in lines) == 1
    assert (done.code, statuses_done.code) == (0, 0)
    assert done.err == "tenax status: the run 'solo' was cancelled: enough\n"
    statuses = [json.loads(line) for line in statuses_done.out.splitlines()]
    assert statuses[-1]["outcome"] == "cancelled"
    assert len({status["mark"] for status in statuses}) == len(statuses), "no status is printed twice"


def test_it_ends_when_the_reader_closes_the_pipe(operator: Operator) -> None:
    """``| head -1``, even if the run has no further event."""
    (agent,) = operator.cluster.start(nodes=(1, 1), run_id="solo", backend="local")
    operator.until_found(agent)
    workers = operator.cluster.hub.generation(1)
    for words in ((), ("--json",)):
        reader, writer = os.pipe()
        watching = operator.runner.start("status", "--watch", *words, program=TENAX, stdout=writer)
        os.close(writer)
        assert os.read(reader, 1)
        os.close(reader)
        done = watching.wait()
        assert (done.code, done.err) == (0, "")
    operator.cluster.finish(workers)


def test_it_continues_when_the_coordinator_moves(operator: Operator) -> None:
    serving, other = operator.cluster.start_in_order(2, conf={"keep_alive_interval": 0.2})
    operator.until_found(serving, other)
    operator.cluster.hub.generation(2)
    watching = operator.runner.start("status", "run", "--watch", program=TENAX)
    until(lambda: "started its worker" in watching.out, "the first lines")
    operator.cluster.kill(serving)
    other.until_printed("takes over the coordinator")
    until(lambda: "takes over as coordinator" in watching.out, lambda: f"the new one; {watching.out} {watching.err}")
    assert operator.tenax("stop", "run", "--yes").code == 0
    assert other.wait() == 130
    assert watching.wait().code == 0
