"""tenax has TorchElastic's public names with compatible signatures, or a documented reason for each missing one.

The names come from a walk through the installed torch; ``docs/generate_compatibility.py`` does it, for the reference
page as well. It runs in another process, because importing ``tenax.compat`` here would affect other tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kit.processes import needs_torch
from kit.torch_python import TorchPython

GENERATOR = Path(__file__).parents[2] / "docs" / "generate_compatibility.py"

# A sample, so that the walk cannot miss modules unnoticed.
_EXPECTED = {
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
def known(torch_python: TorchPython) -> dict[str, Any]:
    """The page, and the result for each module and name of the installed torch."""
    done = torch_python.run(str(GENERATOR), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def results(known: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return module, name, state and note of each name."""
    return [(module, *each) for module, entry in known["modules"].items() for each in entry["names"]]


@needs_torch
def test_the_walk_finds_the_modules_of_torch(known: dict[str, Any]) -> None:
    assert set(known["modules"]) >= _EXPECTED
    assert len(results(known)) > 200


@needs_torch
def test_every_public_name_exists_or_has_a_reason(known: dict[str, Any]) -> None:
    """Every call that torch accepts is accepted."""
    assert [f"{module}: {note}" for module, _, state, note in results(known) if state == "wrong"] == []


def test_an_incompatible_signature_is_detected(generator: ModuleType) -> None:
    def mine(b: int, a: int, c: int) -> None: ...

    entry = {"parameters": [["a", "POSITIONAL_OR_KEYWORD", False]], "members": {}, "home": "x"}
    problems = generator._problems("mine", mine, entry)
    assert problems == [
        "mine('b', 'a', 'c') should begin with ('a',)",
        "mine requires ['b', 'c'], torch does not",
    ]


def test_a_method_listed_as_absent_must_exist_only_in_torch(generator: ModuleType) -> None:
    class Mine:
        def here(self) -> None: ...

    entry = {"parameters": None, "members": {"here": None, "absent": None}, "home": "x"}
    assert generator._problems("Mine", Mine, entry, frozenset({"absent"})) == []
    assert generator._problems("Mine", Mine, entry, frozenset({"absent", "here", "nowhere"})) == [
        "Mine.here is listed as absent, but exists",
        "Mine.nowhere is listed as absent, but torch does not have it",
    ]


@needs_torch
def test_the_tables_have_no_obsolete_entries(generator: ModuleType, known: dict[str, Any]) -> None:
    """For names that torch no longer has, or that tenax has now."""
    absent = {f"{module}.{name}" for module, name, state, _ in results(known) if state == "absent"}
    assert set(generator.ABSENT) <= absent
    different = {f"{module}.{name}" for module, name, state, _ in results(known) if state == "different"}
    assert set(generator.ABSENT_METHODS) <= different
    notes = {note for _, _, state, note in results(known) if state == "different"}
    assert [key for key, note in generator.DIFFERENT.items() if note not in notes] == []


@needs_torch
def test_the_page_is_up_to_date(generator: ModuleType, known: dict[str, Any]) -> None:
    assert generator.PAGE.read_text() == known["page"]


@needs_torch
def test_compat_redirects_every_path_of_torch(known: dict[str, Any], torch_python: TorchPython) -> None:
    code = """
import importlib, json, os
import tenax.compat
print(json.dumps({name: importlib.import_module(name).__name__ for name in json.loads(os.environ["NAMES"])}))
"""
    names = [name for name in known["modules"] if not name.startswith("torch.numa")]
    done = torch_python.run("-c", code, environ={**os.environ, "NAMES": json.dumps(names)})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: known["modules"][name]["ours"] for name in names}
