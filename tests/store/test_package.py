"""The package: every public name exists and is imported on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tenax.store

pytestmark = pytest.mark.process


def test_every_public_name_exists() -> None:
    for name in tenax.store.__all__:
        assert getattr(tenax.store, name).__module__.startswith("tenax.store.")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        tenax.store.nothing  # noqa: B018


def test_importing_the_package_imports_almost_nothing() -> None:
    code = "import sys; before = set(sys.modules); import tenax.store; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["__future__", "tenax", "tenax.store"]


def test_the_agents_imports_include_neither_threading_nor_datetime() -> None:
    code = "import sys, tenax.store._host; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(next(iter(tenax.__path__))) + "/.."},
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert not loaded & {"threading", "datetime", "msgspec", "json", "logging", "asyncio", "torch"}
