"""Classes, defaults, fields, enumerations and constants are torch's, except those with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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

# class.part -> why ours is not torch's
DIFFERENT = {
    "LogsDest.bases": "msgspec's struct",
    "LogsDest.dataclass": "made on the start path, where importing dataclasses costs",
    "LogsDest.defaults": "empty texts instead of factories of empty texts",
    "NumaOptions.bases": "msgspec's struct",
    "NumaOptions.dataclass": "as LogsDest",
    "NumaOptions.frozen": "it is frozen, without dataclasses",
    "RendezvousStoreInfo.dataclass": "as LogsDest",
    "LaunchConfig.defaults": "None in the signature; a new dict in each config",
    "EtcdStore.bases": "torch's stores are compiled",
    "PContext.abstract": "processes are one generation of the machine; _start, _poll and _close do not exist",
    "RendezvousHandler.abstract": "get_backend() may be left out: the name it is registered under will do",
}
# The older etcd rendezvous was a sequence of phases, each with its methods. Ours is not.
DIFFERENT |= {
    f"EtcdRendezvous.{name}()": "a phase of the older rendezvous"
    for name in (
        *("announce_self_waiting", "confirm_membership", "confirm_phase", "create_path_if_not_exists", "get_path"),
        *("get_rdzv_state", "handle_existing_rendezvous", "handle_join_last_call", "init_phase", "join_phase"),
        *("join_rendezvous", "setup_lease_renewal", "try_create_rendezvous", "try_wait_for_state_change"),
        *("wait_for_final", "wait_for_peers", "wait_for_rendezvous_to_free"),
    )
}
# What ours has besides: torch's bases, fields and abstract methods must all be there.
MORE = {"SelfReport", "redirects", "tee", "restart_policy", "notice_signals", "notice_s", "preload"} | {
    *("dashboard", "on_hang", "hang_after", "trace"),
}


@pytest.fixture(scope="module")
def seen() -> tuple[dict[str, Any], dict[str, Any]]:
    """Torch's and ours, in processes of their own, both at once."""
    pytest.importorskip("torch", reason="torch is not installed")
    asked = [
        subprocess.Popen([sys.executable, str(_SHAPES), *names], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for names in (MODULES.keys(), MODULES.values())
    ]
    said = [process.communicate()[0] for process in asked]
    assert [process.returncode for process in asked] == [0, 0]
    theirs, ours = map(json.loads, said)
    return theirs, ours


@pytest.mark.parametrize("module", MODULES)
def test_what_torch_shows_is_shown_here(seen: tuple[dict[str, Any], dict[str, Any]], module: str) -> None:
    """Where both modules export a name: the same kind of thing, with the same defaults, fields and values."""
    theirs, ours = seen[0][module], seen[1][MODULES[module]]
    problems = [
        f"{name}.{part}: {their!r}, here {our!r}"
        for name in theirs.keys() & ours.keys()
        for part, their, our in _parts(theirs[name], ours[name])
        if their != our and f"{name}.{part}" not in DIFFERENT
    ]
    assert problems == []


def _parts(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for part, their in theirs.items():
        our = ours.get(part)
        if part in ("bases", "dataclass") and isinstance(our, list):
            our = [each for each in our if each not in MORE]
        if part in ("defaults", "values") and isinstance(our, dict):
            our = {name: value for name, value in our.items() if name in their}
        if part == "properties" and isinstance(our, list):
            our = [name for name in our if name in their]
        if part == "methods" and isinstance(our, dict):
            for name, arguments in their.items():
                mine = our.get(name)
                mine = mine and {each: value for each, value in mine.items() if each in arguments}
                yield f"{name}()", arguments, mine
            continue
        yield part, their, our


def test_no_reason_is_out_of_date(seen: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """What is said to differ does."""
    differing = set()
    for module, ours in MODULES.items():
        for name in seen[0][module].keys() & seen[1][ours].keys():
            for part, their, our in _parts(seen[0][module][name], seen[1][ours][name]):
                if their != our:
                    differing.add(f"{name}.{part}")
    assert set(DIFFERENT) - differing == set()
