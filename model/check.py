"""Checks the model of leadership (``Leadership.tla``) with TLC.

A *world* is a small cluster and what may happen to it; TLC visits every reachable state. Three kinds of checks, each
exhaustive:

- In every world the safety properties hold.
- For every *mistake*, a rule that is switched off or wrong, some property fails. Else the model would prove nothing.
- Every *goal* is reached: the worlds contain what they were made for.

``./dev model`` runs all of them; ``./dev model NAME ...`` those whose name contains one of the arguments;
``./dev model --trace NAME`` prints TLC's trace. ``./dev model --histories 1000`` checks that simulated histories of the
leadership machine are behaviours of the model (``histories.py``).
"""

# ruff: noqa: T201 - a command prints

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from model.histories import explain, histories, rejected
from model.tlc import run_tlc, what_is_missing

INVARIANTS = ("OneGenerationAtWork", "WorkersAreMembers", "WrittenFirst")
PROPERTIES = ("NumbersGrow", "MembersStay", "NothingAfterTheVerdict", "OnlyTheLeaderWrites")
NAMES = "abcdef"
_HISTORIES_AT_ONCE = 125


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in abstract units: only their order matters."""

    nodes: int = 2
    members: int = 2  # of generation 1, which runs at the start; 0: nothing runs at the start
    is_resting: bool = False  # its workers have stopped
    generations: int = 2
    terms: int = 2
    deaths: int = 1
    ttl: int = 1
    sure: int = 0
    settle: int = 1
    fence: int = 1
    lease: int = 2
    outage: int = 1
    record_ttl: int = 0
    is_slow: bool = False
    links_break: bool = False
    workers_stop: bool = False
    leaders_resign: bool = False
    is_vain: bool = False  # requests to etcd outlive their sender, and a deposed leader goes on deciding
    has_verdicts: bool = False
    is_calm: bool = False
    etcd_is_gone: bool = False
    is_direct: bool = False
    has_focus: bool = False
    invariants: tuple[str, ...] = INVARIANTS
    properties: tuple[str, ...] = PROPERTIES

    def configuration(self, mistake: str = "", goal: str = "") -> str:
        names = NAMES[: self.nodes]
        constants = {
            **{each: each for each in names},
            "Nodes": "{" + ", ".join(names) + "}",
            "Nobody": "Nobody",
            "Ttl": self.ttl,
            "Sure": self.sure,
            "Settle": self.settle,
            "Fence": self.fence,
            "Lease": self.lease,
            "Outage": self.outage,
            "RecordTtl": self.record_ttl,
            "Begin": '"empty"' if not self.members else '"resting"' if self.is_resting else '"running"',
            "BeginMembers": self.members,
            "MaxGeneration": self.generations,
            "MaxTerm": self.terms,
            "MaxDeaths": self.deaths,
            "Slow": self.is_slow,
            "Breaks": self.links_break,
            "Stops": self.workers_stop,
            "Resigns": self.leaders_resign,
            "Vain": self.is_vain,
            "Verdicts": self.has_verdicts,
            "Calm": self.is_calm,
            "EtcdIsGone": self.etcd_is_gone,
            "Direct": self.is_direct,
            "Focus": self.has_focus,
            "Exact": False,
            "Grain": 0,
            "Mistakes": f'{{"{mistake}"}}' if mistake else "{}",
        }
        lines = ["SPECIFICATION Spec", "SYMMETRY Symmetry", "CONSTRAINT Interesting", "CONSTANTS"]
        lines += [
            f"    {name} = {str(value).upper() if isinstance(value, bool) else value}"
            for name, value in constants.items()
        ]
        lines += [f"INVARIANT {each}" for each in ((goal,) if goal else self.invariants)]
        lines += [] if goal else [f"PROPERTY {each}" for each in self.properties]
        return "\n".join(lines) + "\n"


class Check(msgspec.Struct, frozen=True):
    name: str
    world: World
    mistake: str = ""
    expected: tuple[str, ...] = ()  # the properties of which one must fail; none: all must hold
    goal: str = ""  # this must be reached
    is_quick: bool = False  # part of every test run

    @property
    def kind(self) -> str:
        return "mistake" if self.mistake else "goal" if self.goal else "world"


class Result(msgspec.Struct, frozen=True):
    check: Check
    failed: str  # the property that TLC found to fail; empty: none
    states: int
    took_s: float
    output: str

    @property
    def is_right(self) -> bool:
        if self.check.goal:
            return self.failed == self.check.goal
        return self.failed in self.check.expected if self.check.expected else not self.failed


# --- worlds, mistakes, goals ------------------------------------------------------------------------------------------

_S1 = ("OneGenerationAtWork",)
_S2 = ("NumbersGrow", "MembersStay", "WorkersAreMembers")
_TWO = World(has_focus=True)
_TWO_SLOW = World(has_focus=True, is_slow=True)
_PAIR_AND_ONE = World(nodes=3, has_focus=True)
_THREE = World(nodes=3, members=3, has_focus=True)
_THREE_TERMS = World(nodes=3, members=2, terms=3, is_direct=True, has_focus=True)
_ALONE = World(members=1, outage=2, has_focus=True)
_DECISIONS = World(workers_stop=True, has_verdicts=True)
_FROM_NOTHING = World(members=0, generations=2, terms=2, workers_stop=True)
_RECORD_GOES = World(nodes=3, members=2, record_ttl=4, deaths=0, has_focus=True, invariants=_S1, properties=())
_CALM = World(
    nodes=3,
    members=3,
    deaths=0,
    is_calm=True,
    ttl=2,
    sure=1,
    settle=1,
    fence=3,
    lease=4,
    invariants=(*INVARIANTS, "NobodyIsRestarted"),
)

_CALM_WITHOUT_ETCD = msgspec.structs.replace(_CALM, etcd_is_gone=True)

WORLDS = (
    Check("two members", _TWO, is_quick=True),
    Check("two members, all properties", World()),
    Check("two members, longer times", World(ttl=2, sure=1, settle=2, fence=3, lease=4, outage=2, has_focus=True)),
    Check("two members, slow answers", _TWO_SLOW),
    Check("two members, links that break", World(has_focus=True, links_break=True)),
    Check("two members, three terms", World(terms=3, has_focus=True)),
    Check("two members and one more node", _PAIR_AND_ONE),
    Check("three members", _THREE),
    Check("two members and one more node, three terms", _THREE_TERMS),
    Check("one member", _ALONE),
    Check("one member and two more nodes", World(nodes=3, members=1, has_focus=True)),
    Check("two members, leaders resign", World(has_focus=True, leaders_resign=True)),
    Check("two members, late requests", World(has_focus=True, is_vain=True)),
    Check("decisions and verdicts", _DECISIONS),
    Check("from nothing", _FROM_NOTHING),
    Check("a record that goes", _RECORD_GOES),
    Check("calm, etcd is gone", _CALM_WITHOUT_ETCD, is_quick=True),
    Check("calm, leaders change", _CALM),
)


def _mistake(name: str, world: World, expected: tuple[str, ...] = _S1, *, is_quick: bool = False) -> Check:
    return Check(name, world, mistake=name, expected=expected, is_quick=is_quick)


MISTAKES = (
    _mistake("no guard on writes", World(), ("OnlyTheLeaderWrites",), is_quick=True),
    _mistake("no wait before forming", _TWO),
    _mistake("wait of a lease only", _THREE),
    _mistake("forming without having seen a member", _PAIR_AND_ONE),
    _mistake("no outage in the wait for one", _ALONE),
    _mistake("alone without limit", _ALONE),
    _mistake("together with oneself", _ALONE),
    _mistake("together by old proofs", _TWO),
    _mistake("together with those who are linked", _TWO),
    _mistake("together without having written the record", _THREE_TERMS),
    _mistake(
        "together with the generation before while the next is written",
        World(nodes=3, is_resting=True, generations=3, deaths=0, is_direct=True, has_focus=True),
    ),
    _mistake("together for longer than the record lives", _RECORD_GOES),
    _mistake("adopting before all are here", _THREE_TERMS),
    _mistake("every answer counts", _TWO),
    _mistake("idle while a decision is written", _DECISIONS),
    _mistake("nothing counts without etcd", _CALM_WITHOUT_ETCD, ("NobodyIsRestarted",)),
    _mistake("a keep-alive counts from its answer", _TWO_SLOW),
    _mistake("a round trip counts from its end", _TWO),
    _mistake("the fence counts from the answer", _TWO_SLOW),
    _mistake("fence later than the lease", _TWO),
    _mistake("workers start with an old fence", World(generations=3, workers_stop=True)),
    _mistake("silent for a fence is lost", _TWO),
    _mistake("a link that broke is a death", World(has_focus=True, links_break=True)),
    _mistake(
        "missing at the deadline is lost, though it was here",
        World(nodes=3, members=3, has_focus=True, links_break=True),
    ),
    _mistake("a node goes back to an earlier leader", _THREE),
    _mistake("a node keeps two links", _THREE),
    _mistake("refused is dead, whoever lives", _TWO),
    _mistake("a deposed leader closes its listener", _THREE),
    _mistake("the death of any leader will do", _THREE_TERMS),
    _mistake("only the predecessor is known", _THREE_TERMS),
    _mistake("a proof of death needs no wait", _THREE),
    _mistake("a proof of death counts from before the election", _THREE_TERMS),
    _mistake("record read before the election was won", World(), (*_S1, *_S2)),
    _mistake("said before it is written", World(), ("WrittenFirst",)),
    _mistake("a verdict is overwritten", _DECISIONS, ("NothingAfterTheVerdict",)),
    _mistake("a run anew where the record is gone", _DECISIONS, ("NothingAfterTheVerdict", *_S2)),
)

GOALS = (
    Check("a next generation", World(generations=3), goal="NeverNextGeneration", is_quick=True),
    Check("a next generation under another leader", World(generations=3), goal="NeverNextUnderAnother"),
    Check("a generation goes on under another leader", _TWO, goal="NeverAdopted"),
    Check("a generation goes on under another leader, and nobody was late", _CALM, goal="NeverAdopted"),
    Check("two earlier leaders", _THREE_TERMS, goal="NeverTwoBefore"),
    Check("together while somebody else leads", _PAIR_AND_ONE, goal="NeverTogether"),
    Check("alone while somebody else leads", _ALONE, goal="NeverAloneAfterAll"),
)

CHECKS = (*WORLDS, *MISTAKES, *GOALS)

# --- running TLC ------------------------------------------------------------------------------------------------------


def run(check: Check) -> Result:
    began = time.monotonic()
    configuration = check.world.configuration(check.mistake, check.goal)
    output = run_tlc("Leadership", configuration, is_short=check.is_quick)
    found = re.search(r"(?:Invariant|Action property|property) (\w+) is violated", output)
    states = re.findall(r"(\d+) distinct states found", output)
    return Result(check, found[1] if found else "", int(states[-1]) if states else 0, time.monotonic() - began, output)


def describe(result: Result) -> str:
    check = result.check
    if check.goal:
        what = "reached" if result.failed else "NOT REACHED"
    elif check.mistake:
        what = f"found by {result.failed}" if result.failed else "NOT FOUND"
    else:
        what = f"BROKEN: {result.failed}" if result.failed else "holds"
    right = "ok   " if result.is_right else "WRONG"
    return f"{right} {check.kind:8}{check.name:66} {what:36} {result.states:>9,} states {result.took_s:6.1f} s"


def check_histories(seeds: range) -> int:
    """Returns 1 if a transition of a history is no step of the model."""
    began, count, transitions, found = time.monotonic(), 0, 0, 0
    for first in range(seeds.start, seeds.stop, _HISTORIES_AT_ONCE):
        recorded = list(histories(range(first, min(first + _HISTORIES_AT_ONCE, seeds.stop))))
        for each in (each for batch in rejected(recorded) for each in batch):
            found += 1
            print(explain(each), flush=True)
        count += len(recorded)
        transitions += sum(len(each.transitions) for each in recorded)
        took_s = time.monotonic() - began
        print(f"{count} histories, {transitions:,} transitions, {found} rejected: {took_s:.0f} s", flush=True)
    return 1 if found else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev model", description="Check the model of leadership with TLC.")
    parser.add_argument("names", nargs="*", help="only checks whose name or kind contains one of these texts")
    parser.add_argument("--quick", action="store_true", help="only the checks of the test run")
    parser.add_argument("--trace", action="store_true", help="print TLC's output, with the steps to a failure")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="checks that run in parallel")
    parser.add_argument("--histories", type=int, default=0, help="check this many simulated histories instead")
    parser.add_argument("--start", type=int, default=1, help="the first seed of these (default: 1)")
    options = parser.parse_args(arguments)
    if missing := what_is_missing():
        print(f"model: {missing}", file=sys.stderr)
        return 2
    if options.histories:
        return check_histories(range(options.start, options.start + options.histories))
    chosen = [
        each
        for each in CHECKS
        if (each.is_quick or not options.quick)
        and (not options.names or any(word in f"{each.kind} {each.name}" for word in options.names))
    ]
    wrong = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(run, chosen):
            print(describe(result), flush=True)
            wrong += not result.is_right
            if options.trace or (not result.is_right and result.failed):
                print(result.output)
    print(f"{len(chosen)} checks, {wrong} of them wrong")
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
