"""The kind of every test: which processes it needs.

A test has one kind. It follows from the folder of the test (``FOLDERS``) and its fixtures (``FIXTURES``); where neither
is right, the file or the test carries the kind as a marker (``pytestmark = pytest.mark.process``). ``./dev test fast``
runs the kinds of ``WITHOUT_PROCESSES``, whose tests may not start a process: one that does fails.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

KINDS = {
    "unit": "functions and classes within the test's own process: files, sockets and threads, but no other process",
    "machine": "a state machine or a simulated cluster: no I/O and no clock",
    "process": "real processes of one node: agent, keeper, workers, log writer, store, an etcd server",
    "cluster": "several real agents on one host",
    "network": "several hosts, made of network namespaces",
    "browser": "the pages in a real browser",
    "docs": "what the documentation shows and claims",
}
WITHOUT_PROCESSES = ("unit", "machine")
FAST = " or ".join(WITHOUT_PROCESSES)  # the -m of ``./dev test fast``
_TESTS = Path(__file__).parents[1]
# A folder within one of these has the same kind, unless it is here itself.
FOLDERS = {
    ".": "unit",
    "agent": "process",
    "benchmarks": "unit",
    "cli": "unit",
    "cli/start": "cluster",
    "cluster": "cluster",
    "compat": "process",
    "control_plane": "process",
    "core": "machine",
    "docs": "docs",
    "e2e": "process",
    "elastic": "unit",
    "engines": "unit",
    "events": "unit",
    "failures": "unit",
    "failures/verdicts": "cluster",
    "frameworks": "cluster",
    "hostile": "unit",
    "io": "unit",
    "io/etcd_client": "process",
    "io/managed_etcd": "process",
    "lanes": "cluster",
    "launcher": "process",
    "logs": "unit",
    "metrics": "unit",
    "multiprocessing": "process",
    "network": "network",
    "node": "unit",
    "node/observers": "process",
    "node/operating": "process",
    "numa": "unit",
    "observe": "unit",
    "observe/dashboard": "browser",
    "observe/hangs": "machine",
    "processes": "process",
    "rendezvous": "unit",
    "schedulers": "unit",
    "store": "unit",
    "testing/model_checking": "process",
    "testing/simulator": "machine",
    "testing": "unit",
    "timer": "unit",
    "utils": "unit",
    "view": "unit",
}
# A test of a folder without processes that uses one of these is a test with processes.
FIXTURES = dict.fromkeys(("runner", "etcd", "make_etcd", "certificates"), "process")
# The tests of these files take longest. They start first, so that none of them runs alone at the end.
LONGEST = ("docs/test_train_ddp.py", "network/test_cluster_training.py", "observe/hangs/test_torch_hangs.py")
# What Python reports before it starts a process.
_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
_running = ""  # the kind of the test that runs


@cache
def _kind_of_folder(path: Path) -> str:
    folder = path.relative_to(_TESTS)
    return next(FOLDERS[str(each)] for each in (folder, *folder.parents) if str(each) in FOLDERS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For ``./dev test fast``, do not import the files that have only tests with processes."""
    if config.getoption("-m") != FAST or collection_path.suffix != ".py":
        return None
    if _kind_of_folder(collection_path.parent) in WITHOUT_PROCESSES:
        return None
    text = collection_path.read_text()
    return None if any(f"mark.{kind}" in text for kind in WITHOUT_PROCESSES) else True


def kind_of(item: pytest.Item) -> str:
    """The kind of a test that carries no marker for it."""
    kind = _kind_of_folder(item.path.parent)
    if kind in WITHOUT_PROCESSES:
        return next((FIXTURES[name] for name in FIXTURES if name in getattr(item, "fixturenames", ())), kind)
    return kind


def kinds(item: pytest.Item) -> list[str]:
    """The kinds that a test is marked with: exactly one after the collection."""
    marked = {marker.name for marker in item.iter_markers()}
    return [kind for kind in KINDS if kind in marked]


def pytest_configure(config: pytest.Config) -> None:
    for kind, meaning in KINDS.items():
        config.addinivalue_line("markers", f"{kind}: {meaning}")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not kinds(item):
            item.add_marker(kind_of(item))
    items.sort(key=lambda item: not str(item.path).endswith(LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    global _running
    _running = kinds(item)[0]
    try:
        return (yield)
    finally:
        _running = ""


def _start_no_process(event: str, _: object) -> None:
    if event in _STARTS and _running in WITHOUT_PROCESSES:
        raise AssertionError(f"a test of the kind {_running!r} starts a process ({event}); see tests/kit/kinds.py")


sys.addaudithook(_start_no_process)
