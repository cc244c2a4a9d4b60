"""TorchElastic's public names: present here and callable in the same way, or absent for a reason that is written down.

The names come from a walk through the installed torch; ``docs/generate_compatibility.py`` does it, for the reference
page as well. It runs in a process of its own: importing ``tenax.compat`` here would change what other tests import.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GENERATOR = Path(__file__).parents[2] / "docs" / "generate_compatibility.py"

# Few enough to be read at a glance, and so that the walk cannot lose some of them unnoticed.
_ALWAYS_THERE = {
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.control_plane",
    "torch.distributed.elastic.events",
    "torch.distributed.elastic.metrics",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.elastic.rendezvous.etcd_store",
    "torch.distributed.elastic.timer.file_based_local_timer",
    "torch.distributed.elastic.utils.data.cycling_iterator",
    "torch.distributed.launcher.api",
    "torch.distributed.run",
}


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_compatibility", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """The page, and what is to be said about each module and name of the installed torch."""
    pytest.importorskip("torch", reason="torch is not installed")
    done = subprocess.run(
        [sys.executable, GENERATOR, "--json"], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def judgements(known: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Module, name, state, note."""
    return [(module, *each) for module, entry in known["modules"].items() for each in entry["names"]]


def test_the_walk_finds_what_there_is(known: dict[str, Any]) -> None:
    assert set(known["modules"]) >= _ALWAYS_THERE
    assert len(judgements(known)) > 200


def test_every_public_name_is_here_or_absent_for_a_reason(known: dict[str, Any]) -> None:
    """A name that torch exports can be imported from ours, and every call that torch accepts is accepted here."""
    assert [f"{module}: {note}" for module, _, state, note in judgements(known) if state == "wrong"] == []


def test_a_call_that_torch_accepts_and_we_do_not_is_noticed(generator: ModuleType) -> None:
    """The judge can judge."""

    def mine(b: int, a: int, c: int) -> None: ...

    entry = {"parameters": [["a", "POSITIONAL_OR_KEYWORD", False]], "members": {}, "home": "x"}
    problems = generator._problems("mine", mine, entry)
    assert problems == [
        "mine('b', 'a', 'c') should begin with ('a',)",
        "mine requires ['b', 'c'], torch does not",
    ]


def test_a_method_that_is_said_to_be_absent_is_missing_here_and_not_there(generator: ModuleType) -> None:
    class Mine:
        def here(self) -> None: ...

    entry = {"parameters": None, "members": {"here": None, "absent": None}, "home": "x"}
    assert generator._problems("Mine", Mine, entry, frozenset({"absent"})) == []
    assert generator._problems("Mine", Mine, entry, frozenset({"absent", "here", "nowhere"})) == [
        "Mine.here is said to be absent, and is here",
        "Mine.nowhere is said to be absent, and torch has none either",
    ]


def test_the_tables_name_nothing_that_is_not_there(generator: ModuleType, known: dict[str, Any]) -> None:
    """A reason for a name that torch has lost, or that we have got, is taken out."""
    absent = {f"{module}.{name}" for module, name, state, _ in judgements(known) if state == "absent"}
    assert set(generator.ABSENT) <= absent
    different = {f"{module}.{name}" for module, name, state, _ in judgements(known) if state == "different"}
    assert set(generator.ABSENT_METHODS) <= different
    notes = {note for _, _, state, note in judgements(known) if state == "different"}
    assert [key for key, note in generator.DIFFERENT.items() if note not in notes] == []


def test_the_page_is_up_to_date(generator: ModuleType, known: dict[str, Any]) -> None:
    """As docs/generate_compatibility.py writes it today."""
    assert generator.PAGE.read_text() == known["page"]


def test_under_compat_every_one_of_torchs_paths_is_ours(known: dict[str, Any]) -> None:
    """All of them are found by rule."""
    code = """
import importlib, json, os
import tenax.compat
print(json.dumps({name: importlib.import_module(name).__name__ for name in json.loads(os.environ["NAMES"])}))
"""
    names = [name for name in known["modules"] if not name.startswith("torch.numa")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NAMES": json.dumps(names)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: known["modules"][name]["ours"] for name in names}
