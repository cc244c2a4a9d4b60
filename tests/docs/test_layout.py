"""The layout of the package: public and private names are distinguished, and the map in the docs is complete."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import tenax

from .pages import DOCS, ROOT

SOURCE = Path(tenax.__file__).parent
MAP = (DOCS / "concepts" / "architecture.md").read_text()
PACKAGES = MAP.partition("\n## Packages\n")[2].partition("\n## ")[0]
NAMES_AT_THE_TOP = sorted(
    {module.name for module in pkgutil.iter_modules([str(SOURCE)])} - {"__main__"},
)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", DOCS / "generate_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = generator()


def rows_of_packages() -> list[tuple[list[str], str]]:
    """Return each row of the map: the names of its packages, and the text."""
    rows = re.findall(r"^\| (`.*?`) \| (.*) \|$", PACKAGES, re.MULTILINE)
    return [(re.findall(r"`(\w+)/?`", names), text) for names, text in rows]


def test_every_package_is_on_the_map() -> None:
    """Each name at the top of the package is in one row of the map, and the map has no other."""
    assert sorted(name for names, _ in rows_of_packages() for name in names) == NAMES_AT_THE_TOP


def test_names_without_an_underscore_are_public() -> None:
    """A package without an underscore is documented as public, or is ``cli``."""
    for names, text in rows_of_packages():
        for name in names:
            assert text.startswith("public: ") == (not name.startswith("_") and name != "cli"), name


def test_the_map_names_files_that_exist() -> None:
    """Each file in the tables and pictures of the map exists."""
    files = set(re.findall(r"\b((?:_?\w+/)+\w+\.py)\b", MAP))
    assert files
    assert [file for file in files if not (SOURCE / file).is_file()] == []


def test_the_map_names_functions_that_exist() -> None:
    """Each name in parentheses after a file of the map is defined in that file."""
    named = re.findall(r"`((?:\w+/)+\w+\.py)`\s+\(([^)]+)\)", MAP)
    pairs = [(file, name) for file, names in named for name in re.findall(r"`(\w+)`", names)]
    assert pairs
    for file, name in pairs:
        assert re.search(rf"^\s*(def )?{name}\b", (SOURCE / file).read_text(), re.MULTILINE), f"{file}: {name}"


def test_contributing_names_files_that_exist() -> None:
    """Each path in CONTRIBUTING.md exists, except those with NAME for a file to be written."""
    paths = re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert paths
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []


def test_decisions_name_files_that_exist() -> None:
    """Each path in a decision exists: from the root of the repository, or in the package as on the map."""
    for page in sorted((DOCS / "decisions").glob("0*.md")):
        for path in re.findall(r"`(\w+/[\w./]*)`", page.read_text()):
            assert (ROOT / path).exists() or (SOURCE / path).exists(), f"{page.name}: {path}"


def test_test_folders_mirror_the_packages() -> None:
    """A folder of tests has the name of a package, or CONTRIBUTING.md lists it."""
    listed = re.findall(
        r"`(\w+)`", (ROOT / "CONTRIBUTING.md").read_text().partition("outside of that rule")[2].partition("\n- ")[0]
    )
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")} - {"kit"}
    assert {each for each in folders if each not in listed} <= {name.removeprefix("_") for name in NAMES_AT_THE_TOP}


def public_modules() -> list[str]:
    return [name for name in REFERENCE.MODULES if "._" not in name]


def test_the_reference_documents_public_modules_only() -> None:
    """No documented module has a private name on its path."""
    assert public_modules() == list(REFERENCE.MODULES)


@pytest.mark.parametrize("name", [name for name in NAMES_AT_THE_TOP if not name.startswith("_") and name != "cli"])
def test_every_public_package_is_in_the_reference(name: str) -> None:
    """Each public name at the top of the package has a section in the reference, for itself or for its modules."""
    prefix = f"tenax.{name}"
    assert any(module == prefix or module.startswith(f"{prefix}.") for module in REFERENCE.MODULES)


def test_every_public_name_has_one_home() -> None:
    """A documented name is explained in one section only; other sections refer to it."""
    page = (DOCS / "reference" / "python.md").read_text()
    explained: dict[object, str] = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        module_name = section.partition("`")[2].partition("`")[0]
        module = importlib.import_module(module_name)
        for entry in re.split(r"^### ", section, flags=re.MULTILINE)[1:]:
            name = entry.partition("`")[2].partition("`")[0]
            thing = getattr(module, name)
            if "\nThe same as in `" in entry or not isinstance(thing, type):
                continue
            assert explained.setdefault(thing, f"{module_name}.{name}") == f"{module_name}.{name}"


def test_private_modules_import_no_test_kit() -> None:
    """Only the replay of a journal, a command, uses the test kit: its checkers are not part of a run."""
    using = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if not path.is_relative_to(SOURCE / "testing") and _imports_testing(path)
    ]
    assert using == ["cli/replay.py"]


def _imports_testing(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tenax.testing"):
            return True
    return False
