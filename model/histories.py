"""Checks that recorded histories of the leadership machine are behaviours of the model, with TLC.

Each seed of the simulator with etcd gives one history (``recording.py``). Every recorded transition must be a step of
``Leadership.tla``, with the recorded parameters (``LeadershipTrace.tla``): TLC evaluates the model's own actions. The
histories of a batch are checked in one run of TLC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

import msgspec

from model.recording import Recorder, Transition, record, ticks
from model.tlc import run_tlc
from tenax.testing.simulator import Parts, Setup, draw

_GRAIN = 2  # units: the error of the difference of two rounded times
_BATCH = 50_000  # transitions


class History(msgspec.Struct, frozen=True):
    name: str  # the seed, for people
    setup: Setup
    nodes: tuple[str, ...]
    transitions: list[Transition]


def history_of(name: str, setup: Setup, parts: Parts | None = None) -> History:
    recorder: Recorder = record(setup, parts)
    return History(name, setup, tuple(recorder.nodes), recorder.history())


def histories(seeds: Iterable[int]) -> Iterable[History]:
    """Record the histories of seeds. Workers that are held between generations are not modelled."""
    for seed in seeds:
        yield history_of(f"seed {seed}", draw(seed, engine="etcd", survivors=False))


def rejected(found: Iterable[History]) -> Iterable[list[History]]:
    """Check histories in batches, and yield those of each batch that are no behaviours of the model.

    Histories of the same size are checked together, because a state has values for each node.
    """
    ordered = sorted(found, key=lambda each: (msgspec.json.encode(each.setup.authority), len(each.nodes)))
    for _, group in groupby(ordered, key=lambda each: each.setup.authority):
        batch: list[History] = []
        for each in group:
            batch.append(each)
            if sum(len(one.transitions) for one in batch) > _BATCH:
                yield _check(batch)
                batch = []
        if batch:
            yield _check(batch)


def _check(batch: list[History]) -> list[History]:
    accepted = {int(number) for number in re.findall(r'<<"accepted", (\d+)>>', _run(batch))}
    return [each for number, each in enumerate(batch, 1) if number not in accepted and each.transitions]


def explain(history: History) -> str:
    """Return the transition that is no step of the model, the ones before it, and the state in which it happened."""
    output = _run([history], explain=True)
    found = re.search(r'<<"rejected", \d+, (\d+), ', output)
    if found is None:
        return f"{history.name}: every transition is a step of the model"
    position = int(found[1])
    recent = "\n".join(map(str, history.transitions[max(0, position - 8) : position]))
    state = output[output.find('"state"') : output.find("Model checking completed")]
    return f"{history.name}: transition {position} is no step of the model:\n{recent}\n{state}"


def _run(batch: list[History], *, explain: bool = False) -> str:
    sequences = ",\n".join(f"  <<{', '.join(map(_as_tla, each.transitions))}>>" for each in batch)
    module = f"---- MODULE Histories ----\nHistories == <<\n{sequences}\n>>\n====\n"
    return run_tlc("LeadershipTrace", _configuration(batch, explain=explain), {"Histories.tla": module}, is_short=True)


def _as_tla(value: object) -> str:
    match value:
        case bool():
            return str(value).upper()
        case int():
            return str(value)
        case str():
            return f'"{value}"'
        case tuple():
            return f"<<{', '.join(map(_as_tla, value))}>>"
        case frozenset():
            return f"{{{', '.join(map(_as_tla, sorted(value)))}}}"
    raise TypeError(f"no TLA+ value: {value!r}")


def _configuration(batch: list[History], *, explain: bool) -> str:
    terms = batch[0].setup.authority
    nodes = sorted({node for each in batch for node in each.nodes})
    lease = ticks(terms.lease.lease_s)
    constants: dict[str, object] = {
        "Nodes": "{" + ", ".join(f'"{node}"' for node in nodes) + "}",
        "Nobody": '"nobody"',
        "Ttl": ticks(terms.ttl_s),
        "Sure": ticks(terms.sure_s),
        "Settle": ticks(terms.settle_s),
        "Fence": lease - 1,  # with the time that killing takes
        "Lease": lease,
        "Outage": ticks(terms.outage_s),
        "RecordTtl": ticks(terms.record_s) if terms.record_s < 3600 else 0,  # longer than a history
        "Begin": '"empty"',
        "BeginMembers": 0,
        **dict.fromkeys(("MaxGeneration", "MaxTerm", "MaxDeaths"), 1_000_000),
        **dict.fromkeys(("Slow", "Breaks", "Stops", "Resigns", "Vain", "Verdicts", "Exact"), "TRUE"),
        **dict.fromkeys(("Calm", "EtcdIsGone", "Direct", "Focus"), "FALSE"),
        "Grain": _GRAIN,
        "Mistakes": "{}",
        "Explain": str(explain).upper(),
    }
    lines = [f"    {name} = {value}" for name, value in constants.items()]
    return "\n".join(("SPECIFICATION TraceSpec", "VIEW Place", "CONSTANTS", *lines)) + "\n"
