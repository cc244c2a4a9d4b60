"""Which rank's state is used."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from tenax import elastic
from tenax.elastic._agreement import Plan, Row, _StoreGroup, decide
from tenax.elastic._generation import Generation
from tenax.store import TCPStore

from .fake_agent import FakeAgent


def whole(*steps: int) -> list[Row]:
    return [Row(step, False, True) for step in steps]


def shards(*steps: int, moved: int = -1) -> list[Row]:
    return [Row(step, True, rank != moved) for rank, step in enumerate(steps)]


@pytest.mark.parametrize(
    ("rows", "plan"),
    [
        (whole(5, 5, 5), Plan()),
        (whole(5, -1, 5), Plan("", ((0, 1),))),
        (whole(5, 6, 5), Plan("", ((1, 0), (1, 2)))),  # behind by a step that another rank has completed
        (whole(-1, 3, 3, -1, -1), Plan("", ((1, 0), (2, 3), (1, 4)))),  # the senders share the work
        (whole(-1, -1), Plan("no rank has a whole state in memory")),
        (whole(0, -1), Plan("", ((0, 1),))),  # a state before the first step is a state
        (shards(4, 4), Plan()),
        (shards(4, -1), Plan("the state is sharded, and rank 1 does not have its shard")),
        (shards(4, 5), Plan("the state is sharded, and its shards are of different steps")),
        (shards(4, 4, moved=1), Plan("the state is sharded, and rank 1 had another rank or world size before")),
        (shards(-1, -1), Plan("no rank has a whole state in memory")),
    ],
)
def test_the_plan_follows_from_what_every_rank_has(rows: list[Row], plan: Plan) -> None:
    assert decide(rows) == plan


def test_ranks_without_a_process_group_agree_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two new ranks get the state of the third: plain values, bytes of several chunks, and arrays."""
    numpy = pytest.importorskip("numpy")
    server = TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    weights = numpy.arange(6, dtype="f4").reshape(2, 3)
    content = os.urandom(9 << 20)
    states = [
        elastic.State(weights=weights, content=content, nested={"a": [1, (2.5, None)], 7: "b"}, empty=b"", step=3),
        *(elastic.State(weights=numpy.zeros((2, 3), "f4"), content=b"", nested={}, empty=b"x", step=0) for _ in "12"),
    ]
    states[0]._place = (0, 3)  # it has agreed before
    kept = states[1].weights
    generations = [generation_of(rank, 3, monkeypatch) for rank in range(3)]
    together([lambda rank=rank: generations[rank].agree(states[rank], restore=fail) for rank in range(3)])
    for state in states:
        assert state.step == 3
        assert state.content == content
        assert state.nested == {"a": [1, (2.5, None)], 7: "b"}
        assert state.empty == b""
        assert (state.weights == weights).all()
    assert states[1].weights is kept  # changed in place
    assert server.num_keys() <= 3 + 3 + 1  # the chunks are deleted
    server.close()


def generation_of(rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> Generation:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    return Generation(None)


def fail(_: elastic.State) -> None:
    raise AssertionError("restored, although a rank has the state")


def together(calls: list[Any]) -> None:
    errors: list[BaseException] = []

    def run(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors


def test_a_state_whose_replacement_was_not_received_stays_whole(agent: FakeAgent) -> None:
    """Rank 0 is behind by a step. Rank 1, which has to send, is lost in the agreement: the state is used later."""
    server = TCPStore("127.0.0.1", 0, is_master=True)
    state = elastic.State(step=7)
    state._place = (0, 2)  # it has agreed before
    for generation in elastic.generations():
        if generation.number == 1:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.port))
            generation.world_size = 2
            server.set("tenax.elastic/1/row/1/1", "[8, 0, 1]")
        with generation:
            if generation.number == 1:
                waits = threading.Thread(target=lambda: end_when_waiting(agent, server))
                waits.start()
            generation.agree(state, restore=fail)
    waits.join()
    assert (generation.number, state.step) == (2, 7)
    server.close()


def end_when_waiting(agent: FakeAgent, server: TCPStore) -> None:
    """End the generation after rank 0 has written its row."""
    server.get("tenax.elastic/1/row/1/0")
    agent.end_and_begin()


def test_a_checkpoint_that_only_some_ranks_found_is_sent_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    states = [elastic.State(total=0, step=0) for _ in range(2)]

    def restore(state: elastic.State) -> None:
        if state is states[1]:
            state.total, state.step = 10, 4

    generations = [generation_of(rank, 2, monkeypatch) for rank in range(2)]
    together([lambda rank=rank: generations[rank].agree(states[rank], restore=restore) for rank in range(2)])
    assert [(state.total, state.step) for state in states] == [(10, 4), (10, 4)]
    server.close()


def test_a_state_that_is_too_large_for_the_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    group = _StoreGroup(server, generation_of(0, 2, monkeypatch))
    with pytest.raises(ValueError, match="at most 256 MiB"):
        group.send(b"{}", [bytearray(257 << 20)], 1)
    server.close()


@pytest.mark.parametrize(
    ("value", "path"), [({"a": [object()]}, r"state\.part\['a'\]\[0\]"), (lambda: None, r"state\.part")]
)
def test_what_cannot_be_sent_is_an_error_at_the_first_agreement(value: object, path: str) -> None:
    state = elastic.State(part=value, step=0)
    with pytest.raises(TypeError, match=f"^{path} is of the type"):
        Generation(None).agree(state)


def test_a_step_must_be_a_number() -> None:
    with pytest.raises(TypeError, match="number of completed steps"):
        Generation(None).agree(elastic.State(step=-3))


def test_the_parts_of_a_state_are_attributes() -> None:
    state = elastic.State(model="m")
    assert (state.model, state.step) == ("m", 0)
    with pytest.raises(AttributeError, match="no part 'modle'; its parts: step, model"):
        state.modle  # noqa: B018
    with pytest.raises(ValueError, match="underscore"):
        elastic.State(_x=1)
