"""TorchElastic's public names of the parts that this release has: present here, callable in the same way."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys

import pytest

# torch's module -> ours
MODULES = {
    "torch.distributed.elastic.agent.server": "tenax.agent.server",
    "torch.distributed.elastic.agent.server.api": "tenax.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent": "tenax.agent.server.local_elastic_agent",
    "torch.distributed.elastic.agent.server.health_check_server": "tenax.agent.server.health_check_server",
    "torch.distributed.elastic.multiprocessing": "tenax.multiprocessing",
    "torch.distributed.elastic.multiprocessing.api": "tenax.multiprocessing.api",
    "torch.distributed.elastic.multiprocessing.errors": "tenax.multiprocessing.errors",
    "torch.distributed.elastic.multiprocessing.errors.error_handler": "tenax.multiprocessing.errors.error_handler",
    "torch.distributed.elastic.multiprocessing.redirects": "tenax.multiprocessing.redirects",
    "torch.distributed.elastic.multiprocessing.tail_log": "tenax.multiprocessing.tail_log",
    "torch.distributed.elastic.multiprocessing.subprocess_handler": "tenax.multiprocessing.subprocess_handler",
    "torch.distributed.elastic.rendezvous": "tenax.rendezvous",
    "torch.distributed.elastic.rendezvous.api": "tenax.rendezvous.api",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend": "tenax.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous": "tenax.rendezvous.dynamic_rendezvous",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous": "tenax.rendezvous.static_tcp_rendezvous",
    "torch.distributed.elastic.rendezvous.utils": "tenax.rendezvous.utils",
    "torch.distributed.elastic.rendezvous.registry": "tenax.rendezvous.registry",
    "torch.distributed.launcher": "tenax.launcher",
    "torch.distributed.launcher.api": "tenax.launcher.api",
    "torch.distributed.run": "tenax.run",
    "torch.numa.binding": "tenax.numa.binding",
}

# What torch has and we do not, with the reason.
ABSENT = {
    "get_event_failed": "events come with the events package",
    "get_event_succeeded": "events come with the events package",
    "record_duration": "events come with the events package",
}

_DUMP = """
import importlib, inspect, json, sys

def parameters(thing):
    try:
        return [(p.name, p.kind.name, p.default is not p.empty) for p in inspect.signature(thing).parameters.values()]
    except (TypeError, ValueError):
        return None

found = {}
for name in json.load(sys.stdin):
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None)
    if names is None:
        names = [n for n, v in vars(module).items() if not n.startswith("_") and getattr(v, "__module__", "") == name]
    entry = found[name] = {}
    for public in names:
        thing = getattr(module, public)
        members = {}
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_") and inspect.isroutine(getattr(thing, member)):
                    members[member] = parameters(getattr(thing, member))
        entry[public] = {"parameters": parameters(thing) if callable(thing) else None, "members": members}
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def theirs() -> dict[str, dict[str, dict[str, object]]]:
    """What the installed torch offers, looked at in a process of its own."""
    pytest.importorskip("torch", reason="torch is not installed")
    done = subprocess.run(
        [sys.executable, "-c", _DUMP], input=json.dumps(list(MODULES)), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_here(theirs, module: str) -> None:
    """A name that torch's module exports can be imported from ours."""
    ours = importlib.import_module(MODULES[module])
    assert [name for name in theirs[module] if not hasattr(ours, name)] == []


@pytest.mark.parametrize("module", MODULES)
def test_every_call_that_torch_accepts_is_accepted_here(theirs, module: str) -> None:
    """Parameters have the same names in the same order; ours may have more defaults than torch, and more parameters."""
    ours = importlib.import_module(MODULES[module])
    problems = []
    for name, entry in theirs[module].items():
        mine = getattr(ours, name)
        problems += _problems(name, mine, entry["parameters"])
        for member, parameters in entry["members"].items():
            if member in ABSENT:
                continue
            if not hasattr(mine, member):
                problems.append(f"{name}.{member} is missing")
            else:
                problems += _problems(f"{name}.{member}", getattr(mine, member), parameters)
    assert problems == []


def _problems(name: str, mine: object, expected: list[tuple[str, str, bool]] | None) -> list[str]:
    if expected is None or not callable(mine):
        return []
    parameters = list(inspect.signature(mine).parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return []
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    wanted = [each for each, kind, _ in expected if kind == "POSITIONAL_OR_KEYWORD"]
    problems = []
    if positional[: len(wanted)] != wanted:
        problems.append(f"{name}{tuple(positional)} should begin with {tuple(wanted)}")
    required = {each for each, kind, has_default in expected if not has_default and not kind.startswith("VAR")}
    extra = [
        p.name
        for p in parameters
        if p.default is p.empty and p.name not in required and not p.kind.name.startswith("VAR")
    ]
    if extra:
        problems.append(f"{name} requires {extra}, torch does not")
    return problems
