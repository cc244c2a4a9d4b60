"""Events are serialized and deserialized as by TorchElastic."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.processes import needs_torch
from kit.torch_python import TorchPython
from tenax.events import Event, EventSource, NodeState, RdzvEvent

EVENTS = [
    Event("a", EventSource.AGENT),
    Event("b", EventSource.WORKER, 1_700_000_000_123, {"text": 'ü "\n', "n": 1, "x": 0.5, "yes": True, "none": None}),
]
RDZV_EVENTS = [
    RdzvEvent("file.py:C.m", "run", "joined", "host", 7, NodeState.INIT),
    RdzvEvent("f", "run", "boom", "host", 7, NodeState.FAILED, "a:1", 3, 4, "Traceback\n"),
]
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@pytest.mark.parametrize("event", [*EVENTS, *RDZV_EVENTS], ids=str)
def test_deserialize_reverts_serialize(event: Event | RdzvEvent) -> None:
    text = event.serialize()
    assert "\n" not in text
    assert str(event) == text
    assert type(event).deserialize(text) == event
    assert type(event).deserialize(event) is event


@given(st.builds(Event, st.text(), st.sampled_from(EventSource), st.integers(), st.dictionaries(st.text(), values)))
@settings(derandomize=True, database=None, deadline=None)
def test_deserialize_reverts_serialize_for_any_event(event: Event) -> None:
    assert Event.deserialize(event.serialize()) == event


def test_two_events_share_no_metadata() -> None:
    """A shared default would let one event change another."""
    first, second = Event("a", EventSource.AGENT), Event("b", EventSource.AGENT)
    first.metadata["x"] = 1
    assert second.metadata == {}


def test_unknown_keys_of_a_later_release_are_ignored() -> None:
    text = json.dumps({"name": "a", "source": "AGENT", "colour": "blue"})
    assert Event.deserialize(text) == Event("a", EventSource.AGENT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "invalid JSON for an event"),
        ("[1]", "expected an event, not a list"),
        ('{"name": "a", "source": "MOON"}', "the source of the event is 'MOON'; expected one of AGENT, WORKER"),
        ('{"name": "a"}', "the source of the event is None"),
        ('{"source": "AGENT"}', "the event lacks name"),
    ],
)
def test_text_that_is_not_an_event_is_rejected_with_a_message(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Event.deserialize(text)


def test_a_value_that_is_not_text_is_rejected_with_a_message() -> None:
    with pytest.raises(TypeError, match="from a bytes; expected the output of serialize"):
        Event.deserialize(b"{}")  # type: ignore[arg-type]


_THEIRS = """
import dataclasses, inspect, json, sys
from torch.distributed.elastic import events
from torch.distributed.elastic.events import api, handlers

def parameters(function):
    return [[p.name, p.kind.name, "" if p.default is p.empty else repr(p.default)]
            for p in inspect.signature(function).parameters.values()]

given = json.load(sys.stdin)
json.dump({
    "texts": [events.Event.deserialize(text).serialize() for text in given["events"]]
           + [events.RdzvEvent.deserialize(text).serialize() for text in given["rdzv_events"]],
    "fields": {kind.__name__: [field.name for field in dataclasses.fields(kind)]
               for kind in (events.Event, events.RdzvEvent)},
    "members": {kind.__name__: {each.name: each.value for each in kind}
                for kind in (events.EventSource, events.NodeState)},
    "calls": {name: parameters(getattr(events, name)) for name in given["calls"]},
    "names": sorted(api.__all__),
    "table": sorted(handlers._log_handlers),
}, sys.stdout)
"""


@needs_torch
@pytest.mark.process
def test_texts_names_and_signatures_equal_those_of_torch(torch_python: TorchPython) -> None:
    """The installed torch reads our texts and writes the same; fields, members and parameters are equal."""
    import dataclasses
    import inspect

    from tenax import events
    from tenax.events import api, handlers

    calls = ["record", "record_rdzv_event", "construct_and_record_rdzv_event", "get_logging_handler"]
    texts = {"events": [e.serialize() for e in EVENTS], "rdzv_events": [e.serialize() for e in RDZV_EVENTS]}
    done = torch_python.run("-c", _THEIRS, stdin=json.dumps({**texts, "calls": calls}))
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    assert theirs["texts"] == texts["events"] + texts["rdzv_events"]
    for kind in (Event, RdzvEvent):
        assert [field.name for field in dataclasses.fields(kind)] == theirs["fields"][kind.__name__]
    for enum in (EventSource, NodeState):
        assert {each.name: each.value for each in enum} == theirs["members"][enum.__name__]
    for name in calls:
        ours = [
            [p.name, p.kind.name, "" if p.default is p.empty else repr(p.default)]
            for p in inspect.signature(getattr(events, name)).parameters.values()
        ]
        assert ours == theirs["calls"][name]
    assert [name for name in theirs["names"] if not hasattr(api, name)] == []
    assert sorted(handlers._log_handlers) == theirs["table"]
