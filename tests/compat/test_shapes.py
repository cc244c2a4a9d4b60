"""Classes, defaults, fields, enumerations and constants are torch's, except those with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.processes import needs_torch
from kit.torch_python import TorchPython

pytestmark = needs_torch

_ELASTIC = (
    *("agent.server", "agent.server.api", "agent.server.local_elastic_agent", "agent.server.health_check_server"),
    *("multiprocessing", "multiprocessing.api", "multiprocessing.errors", "multiprocessing.errors.error_handler"),
    *("multiprocessing.redirects", "multiprocessing.tail_log", "multiprocessing.subprocess_handler"),
    *("rendezvous", "rendezvous.api", "rendezvous.c10d_rendezvous_backend", "rendezvous.dynamic_rendezvous"),
    *("rendezvous.static_tcp_rendezvous", "rendezvous.utils", "rendezvous.registry", "rendezvous.etcd_store"),
    *("rendezvous.etcd_rendezvous_backend", "rendezvous.etcd_rendezvous", "rendezvous.etcd_server"),
    *("events", "events.api", "metrics", "metrics.api", "timer", "timer.api", "timer.file_based_local_timer"),
    *("timer.local_timer", "control_plane", "utils", "utils.api", "utils.store", "utils.distributed", "utils.logging"),
    *("utils.data", "utils.process_state"),
)
MODULES = {f"torch.distributed.elastic.{name}": f"tenax.{name}" for name in _ELASTIC} | {
    "torch.distributed.launcher": "tenax.launcher",
    "torch.distributed.launcher.api": "tenax.launcher.api",
    "torch.distributed.run": "tenax.run",
    "torch.numa.binding": "tenax.numa.binding",
}
_SHAPES = Path(__file__).with_name("shapes.py")

# class.part -> why it differs from torch
DIFFERENT = {
    "LogsDest.bases": "msgspec's struct",
    "LogsDest.dataclass": "created during the start, where importing dataclasses is slow",
    "LogsDest.defaults": "empty texts instead of factories of empty texts",
    "NumaOptions.bases": "msgspec's struct",
    "NumaOptions.dataclass": "as LogsDest",
    "NumaOptions.frozen": "it is frozen, without dataclasses",
    "RendezvousStoreInfo.dataclass": "as LogsDest",
    "EtcdStore.bases": "torch's stores are compiled",
    "PContext.abstract": "its processes are one generation of the agent machine; _start, _poll and _close do not exist",
    "RendezvousHandler.abstract": "get_backend() is optional: the registered name is used",
}
# The older etcd rendezvous was a sequence of phases, each with its methods.
DIFFERENT |= {
    f"EtcdRendezvous.{name}()": "a phase of the older rendezvous"
    for name in (
        *("announce_self_waiting", "confirm_membership", "confirm_phase", "create_path_if_not_exists", "get_path"),
        *("get_rdzv_state", "handle_existing_rendezvous", "handle_join_last_call", "init_phase", "join_phase"),
        *("join_rendezvous", "setup_lease_renewal", "try_create_rendezvous", "try_wait_for_state_change"),
        *("wait_for_final", "wait_for_peers", "wait_for_rendezvous_to_free"),
    )
}
# Additions of tenax to torch's bases, fields and abstract methods.
ADDED = {"ForwardingRendezvousHandler", "TimerTable", "WatchdogThread", "Generic"} | {
    *("redirects", "tee", "restart_policy", "notice_signals", "notice_s", "preload"),
    *("dashboard", "on_hang", "hang_after", "trace"),
}


@pytest.fixture(scope="module")
def shapes(torch_python: TorchPython) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shapes of torch and of tenax, each from its own process."""
    torchs = torch_python.run(str(_SHAPES), *MODULES.keys())
    command = [sys.executable, str(_SHAPES), *MODULES.values()]
    tenaxs = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (torchs.returncode, tenaxs.returncode) == (0, 0), torchs.stderr + tenaxs.stderr
    return json.loads(torchs.stdout), json.loads(tenaxs.stdout)


@pytest.mark.parametrize("module", MODULES)
def test_names_have_the_shape_of_torchs(shapes: tuple[dict[str, Any], dict[str, Any]], module: str) -> None:
    """Names that both modules export: the same kind, defaults, fields and values."""
    torchs, tenaxs = shapes[0][module], shapes[1][MODULES[module]]
    problems = [
        f"{name}.{part}: {torch!r}, here {tenax!r}"
        for name in torchs.keys() & tenaxs.keys()
        for part, torch, tenax in _parts(torchs[name], tenaxs[name])
        if torch != tenax and f"{name}.{part}" not in DIFFERENT
    ]
    assert problems == []


def _parts(torchs: dict[str, Any], tenaxs: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for part, torch in torchs.items():
        tenax = tenaxs.get(part)
        if part in ("bases", "dataclass") and isinstance(tenax, list):
            tenax = [each for each in tenax if each not in ADDED]
        if part in ("defaults", "values") and isinstance(tenax, dict):
            tenax = {name: value for name, value in tenax.items() if name in torch}
        if part == "properties" and isinstance(tenax, list):
            tenax = [name for name in tenax if name in torch]
        if part == "methods" and isinstance(tenax, dict):
            for name, arguments in torch.items():
                mine = tenax.get(name)
                mine = mine and {each: value for each, value in mine.items() if each in arguments}
                yield f"{name}()", arguments, mine
            continue
        yield part, torch, tenax


def test_every_listed_difference_still_exists(shapes: tuple[dict[str, Any], dict[str, Any]]) -> None:
    differing = set()
    for module, tenaxs in MODULES.items():
        for name in shapes[0][module].keys() & shapes[1][tenaxs].keys():
            for part, torch, tenax in _parts(shapes[0][module][name], shapes[1][tenaxs][name]):
                if torch != tenax:
                    differing.add(f"{name}.{part}")
    assert set(DIFFERENT) - differing == set()
