"""Packaging: the contents of the sdist, the version and the extras."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tenax import __version__

from .pages import ROOT

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "site", "results", "bin", "*.pyc", "shared"
)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked sdist of this source. It is built from a copy, because setuptools writes to the source folder."""
    source, built = tmp_path_factory.mktemp("source") / "tenax", tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, source, ignore=NOT_SOURCE)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(built)], cwd=source, capture_output=True, text=True, timeout=100, check=True
    )
    subprocess.run(["tar", "-xf", done.stdout.splitlines()[-1]], cwd=built, check=True)
    return built / f"tenax-{__version__}"


def metadata(sdist: Path) -> Message:
    return Parser().parsestr((sdist / "PKG-INFO").read_text())


def test_the_sdist_contains_every_file_of_the_source(sdist: Path) -> None:
    """Tests, docs, changelog and ./dev included, so that it can be tested where it is unpacked."""

    def files(root: Path) -> set[str]:
        folders = (root / name for name in ("benchmarks", "docs", "examples", "model", "src/tenax", "tests"))
        found = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        ignored = re.compile(r"__pycache__|\.pyc$|^benchmarks/(results|bin)/|/\.")
        names = {str(path.relative_to(root)) for path in [*found, *root.glob("*.md"), *root.glob("*.toml")]}
        return {name for name in names if not ignored.search(name)}

    assert files(ROOT) <= files(sdist)
    assert (sdist / "dev").stat().st_mode & 0o111
    assert (sdist / "mkdocs.yml").is_file()


def test_every_file_of_the_package_is_installed() -> None:
    """Styles, scripts and pages are package data; a wheel contains no other files that are not Python."""
    listed = re.search(r"^tenax = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert listed is not None
    package = ROOT / "src" / "tenax"
    files = [path.relative_to(package) for path in package.rglob("*") if path.suffix not in (".py", ".pyc")]
    patterns = ast.literal_eval(listed[1])
    found = [path for path in files if (package / path).is_file()]
    assert found
    assert [path for path in found if not any(path.match(pattern) for pattern in patterns)] == []


def test_the_version_is_that_of_the_package(sdist: Path) -> None:
    """``tenax.__version__`` is its only definition."""
    assert metadata(sdist)["Version"] == __version__
    assert __version__ not in (ROOT / "pyproject.toml").read_text()


def test_published_extras_are_for_users(sdist: Path) -> None:
    """Tools for working on tenax are dependency groups, which are not published."""
    assert set(metadata(sdist).get_all("Provides-Extra", [])) == {"otel", "gpu"}
