"""Write docs/reference/compatibility.md: every module and public name of TorchElastic, and what tenax does about it.

    .venv/bin/python docs/generate_compatibility.py           write it
    .venv/bin/python docs/generate_compatibility.py --check   only say whether it is out of date, or a name is wrong
    .venv/bin/python docs/generate_compatibility.py --json    print everything that it knows, for the test

The names come from a walk through the installed torch, never from a list: what torch gets or loses shows here. A name
is *here* when it can be imported from the module of tenax and called in every way in which torch's can be called. The
two tables below say what is behind a name that behaves differently, and why one is absent. A test looks at all of it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parent / "reference" / "compatibility.md"

# Names that torch's modules have and ours do not, with a reason that their users can accept.
_REDIRECTS = "torch.distributed.elastic.multiprocessing.redirects"
ABSENT = {
    f"{_REDIRECTS}.IS_MACOS": "a detail of torch's own; ask `sys.platform`",
    f"{_REDIRECTS}.IS_WINDOWS": "a detail of torch's own; ask `sys.platform`",
    f"{_REDIRECTS}.libc": "a detail of torch's own; `get_libc()` is here",
}

# Methods that a class of tenax does not have; the page gives the reason.
ABSENT_METHODS = {
    "torch.distributed.elastic.rendezvous.etcd_rendezvous.EtcdRendezvous": frozenset(
        (
            *("announce_self_waiting", "confirm_membership", "confirm_phase", "create_path_if_not_exists", "get_path"),
            *("get_rdzv_state", "handle_existing_rendezvous", "handle_join_last_call", "init_phase", "join_phase"),
            *("join_rendezvous", "setup_lease_renewal", "try_create_rendezvous", "try_wait_for_state_change"),
            *("wait_for_final", "wait_for_peers", "wait_for_rendezvous_to_free"),
        )
    ),
}

# Names that behave differently, with the page that describes it.
_DIFFERENT = "../differences.md"
_WATCHING = "timers-health-checks-control-plane-utilities"
DIFFERENT = {
    "agent.server.api.RunResult": f"[an unhealthy group has failed]({_DIFFERENT}#python)",
    "agent.server.api.WorkerSpec": f"[less has to be given]({_DIFFERENT}#python)",
    "agent.server.health_check_server.HealthCheckServer": f"[it answers]({_DIFFERENT}#{_WATCHING})",
    "agent.server.health_check_server.create_healthcheck_server": f"[it answers]({_DIFFERENT}#{_WATCHING})",
    "agent.server.local_elastic_agent.LocalElasticAgent": f"[less has to be given]({_DIFFERENT}#python)",
    "multiprocessing.api.DefaultLogsSpecs": f"[made when it is needed]({_DIFFERENT}#logs)",
    "multiprocessing.api.LogsDest": f"[not a dataclass]({_DIFFERENT}#python)",
    "multiprocessing.api.RunProcsResult": f"[who was stopped has not failed]({_DIFFERENT}#python)",
    "multiprocessing.start_processes": f"[no signal handlers, no polling]({_DIFFERENT}#python)",
    "multiprocessing.errors.ChildFailedError": f"[another text]({_DIFFERENT}#failures)",
    "multiprocessing.errors.record": f"[`sys.exit()` is a success]({_DIFFERENT}#python)",
    "multiprocessing.tail_log.tail_logfile": f"[no filter copies everything]({_DIFFERENT}#logs)",
    "rendezvous.dynamic_rendezvous.DynamicRendezvousHandler": f"[JSON, not pickle]({_DIFFERENT}#several-nodes)",
    "rendezvous.etcd_rendezvous.EtcdRendezvous": f"[no methods for its phases]({_DIFFERENT}#etcd)",
    "rendezvous.etcd_rendezvous.EtcdRendezvousHandler": f"[a dynamic rendezvous]({_DIFFERENT}#etcd)",
    "rendezvous.etcd_rendezvous.EtcdRendezvousRetryImmediately": f"[never raised]({_DIFFERENT}#etcd)",
    "rendezvous.etcd_rendezvous.EtcdRendezvousRetryableFailure": f"[never raised]({_DIFFERENT}#etcd)",
    "rendezvous.etcd_rendezvous_backend.EtcdRendezvousBackend": f"[takes a client for v3]({_DIFFERENT}#etcd)",
    "rendezvous.etcd_store.EtcdStore": f"[exact, and all of torch's methods]({_DIFFERENT}#etcd)",
    "rendezvous.static_tcp_rendezvous.StaticTCPRendezvous": f"[attempts are distinguished]({_DIFFERENT}#several-nodes)",
    "launcher.api.LaunchConfig": f"[checks its fields]({_DIFFERENT}#python)",
    "launcher.api.launch_agent": f"[leaves the environment alone]({_DIFFERENT}#python)",
    "run.determine_local_world_size": f"[counts without torch]({_DIFFERENT}#command-line)",
    "run.parse_args": f"[other rules for arguments after the script]({_DIFFERENT}#command-line)",
    "utils.api.macros": f"[only `${{local_rank}}` is replaced]({_DIFFERENT}#environment)",
    "utils.data.cycling_iterator.CyclingIterator": "takes any iterable; empty epochs are passed over",
    "utils.data.elastic_distributed_sampler.ElasticDistributedSampler": "works without torch, and with fewer samples "
    "than ranks",
    "utils.distributed.create_c10d_store": "a [`tenax.store.TCPStore`](../guides/store.md), which binds a free port by "
    "itself",
    "utils.logging.get_logger": "`LOGLEVEL` in any case, or a number",
}

_INTRODUCTION = """\
# TorchElastic names

<!-- Written by docs/generate_compatibility.py. -->

Every module and public name of TorchElastic in torch {version}, and where it is in tenax. **Here** means that it can
be imported, and that every call that torch accepts is accepted. What is *different* is described next to it;
[Differences](../differences.md) lists everything else.

The heading of each section is torch's path, with tenax's below it. With
[`tenax.compat`](../guides/migrating-from-torchrun.md#programs-that-you-do-not-want-to-change) the first returns the
second; without it, change the imports. The old `torchelastic.X` is `torch.distributed.elastic.X`, and
`torchelastic.distributed.launch` is `torch.distributed.run`.

{counts}
"""

# Runs in a process of its own: torch takes seconds to import, and must see nothing of us.
_WALK = """
import ast, importlib, inspect, json, pkgutil, sys

def parameters(thing):
    try:
        return [(p.name, p.kind.name, p.default is not p.empty) for p in inspect.signature(thing).parameters.values()]
    except (TypeError, ValueError):
        return None

def modules():
    for root in ("torch.distributed.elastic", "torch.distributed.launcher"):
        package = importlib.import_module(root)
        yield root
        for found in pkgutil.walk_packages(package.__path__, root + "."):
            yield found.name
    yield from ("torch.distributed.run", "torch.distributed.argparse_util", "torch.numa.binding")

def defined(module):
    # What a module without a list of its own defines, and what a package takes from its own modules.
    is_package = hasattr(module, "__path__")
    for node in ast.parse(open(module.__file__).read()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and not is_incidental(getattr(module, target.id)):
                    yield target.id
        elif isinstance(node, ast.ImportFrom) and is_package:
            if node.level or (node.module or "").startswith(module.__name__):
                yield from (alias.asname or alias.name for alias in node.names)

def is_incidental(value):
    return type(value).__name__ in ("Logger", "TypeVar", "ParamSpec")

found = {}
for name in modules():
    if any(part.startswith("_") for part in name.split(".")):
        continue
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None) or [each for each in defined(module) if not each.startswith("_")]
    entry = found[name] = {}
    for public in names:
        thing = getattr(module, public)
        if inspect.ismodule(thing):
            continue
        members = {}
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_") and inspect.isroutine(getattr(thing, member)):
                    members[member] = parameters(getattr(thing, member))
        entry[public] = {
            "parameters": parameters(thing) if callable(thing) else None,
            "members": members,
            "home": getattr(thing, "__module__", name),
        }
import torch
json.dump({"version": torch.__version__.partition("+")[0], "modules": found}, sys.stdout)
"""


class Judgement(NamedTuple):
    """What is to be said about one name. A problem is something that must be cured, here or there."""

    name: str
    state: str  # here, different, absent, wrong
    note: str


def walk() -> dict[str, Any]:
    """What the installed torch offers: its version, and by module and name the parameters of everything public."""
    done = subprocess.run([sys.executable, "-c", _WALK], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ours_for(module: str) -> str:
    """The module of tenax that stands for one of torch's."""
    from tenax.compat import target_of

    return target_of(module) or module.replace("torch", "tenax", 1)


def judge(module: str, names: dict[str, Any]) -> Iterator[Judgement]:
    """Each name of one of torch's modules."""
    ours = importlib.import_module(ours_for(module))
    for name, entry in names.items():
        yield _judge_name(module, name, entry, ours)


def _judge_name(module: str, name: str, entry: dict[str, Any], ours: Any) -> Judgement:
    reason = ABSENT.get(f"{module}.{name}")
    if not hasattr(ours, name):
        return Judgement(name, "absent", reason) if reason else Judgement(name, "wrong", "it is missing")
    if reason:
        return Judgement(name, "wrong", "it is listed as absent, but exists")
    problems = _problems(name, getattr(ours, name), entry, ABSENT_METHODS.get(f"{module}.{name}", frozenset()))
    if problems:
        return Judgement(name, "wrong", "; ".join(problems))
    note = DIFFERENT.get(_key(module, name)) or DIFFERENT.get(_key(entry["home"], name))
    return Judgement(name, "different" if note else "here", note or "")


def _key(module: str, name: str) -> str:
    return f"{ours_for(module).removeprefix('tenax.')}.{name}"


def _problems(name: str, mine: Any, entry: dict[str, Any], absent: frozenset[str] = frozenset()) -> list[str]:
    problems = _call_problems(name, mine, entry["parameters"])
    problems += [
        f"{name}.{member} is listed as absent, but {'exists' if hasattr(mine, member) else 'torch does not have it'}"
        for member in sorted(absent)
        if hasattr(mine, member) or member not in entry["members"]
    ]
    for member, parameters in entry["members"].items():
        if member in absent:
            continue
        if not hasattr(mine, member):
            problems.append(f"{name}.{member} is missing")
        else:
            problems += _call_problems(f"{name}.{member}", getattr(mine, member), parameters)
    return problems


def _call_problems(name: str, mine: Any, expected: list[tuple[str, str, bool]] | None) -> list[str]:
    """Parameters have the same names in the same order. Ours may have more defaults than torch, and more parameters."""
    if expected is None or not callable(mine):
        return []
    try:
        parameters = list(inspect.signature(mine).parameters.values())
    except (TypeError, ValueError):  # a type without a signature, there and here
        return []
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


def page(found: dict[str, Any]) -> str:
    """The whole page."""
    parts, counts = [], dict.fromkeys(("here", "different", "absent"), 0)
    for module, names in found["modules"].items():
        judged = list(judge(module, names))
        for each in judged:
            counts[each.state] = counts.get(each.state, 0) + 1
        parts.append(_section(module, judged))
    summary = ", ".join(f"{number} {state}" for state, number in counts.items() if number)
    opening = _INTRODUCTION.format(version=found["version"], counts=f"{sum(counts.values())} names: {summary}.")
    return "\n".join([opening, *parts])


def _section(module: str, judged: list[Judgement]) -> str:
    lines = [f"## `{module}`", "", f"`{ours_for(module)}`", ""]
    here = ", ".join(f"`{each.name}`" for each in judged if each.state == "here")
    others = [each for each in judged if each.state != "here"]
    if here:
        lines += [f"Here: {here}.", ""]
    if others:
        lines += ["| name | | |", "| --- | --- | --- |"]
        lines += [f"| `{each.name}` | {each.state} | {each.note} |" for each in others]
        lines.append("")
    return "\n".join(lines)


def knowledge() -> dict[str, Any]:
    """Everything: the page, and by torch's module its own name here and what is to be said about each of its names."""
    found = walk()
    modules = {
        module: {"ours": ours_for(module), "names": list(judge(module, names))}
        for module, names in found["modules"].items()
    }
    return {"page": page(found), "modules": modules}


def main() -> int:
    known = knowledge()
    if "--json" in sys.argv[1:]:
        json.dump(known, sys.stdout)
        return 0
    problems = [
        f"{module}: {each.note}"
        for module, entry in known["modules"].items()
        for each in entry["names"]
        if each.state == "wrong"
    ]
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(known["page"])
    elif not PAGE.exists() or PAGE.read_text() != known["page"]:
        problems.append(PAGE.name)
        sys.stderr.write(f"{PAGE.name} is out of date: run docs/generate_compatibility.py\n")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
