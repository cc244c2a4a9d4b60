"""The package: every name is there, and none is loaded before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tenax.store

pytestmark = pytest.mark.process


def test_every_public_name_is_there() -> None:
    for name in tenax.store.__all__:
        assert getattr(tenax.store, name).__module__.startswith("tenax.store.")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        tenax.store.nothing  # noqa: B018


def test_importing_the_package_loads_next_to_nothing() -> None:
    code = "import sys; before = set(sys.modules); import tenax.store; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["__future__", "tenax", "tenax.store"]


def test_what_the_agent_imports_brings_neither_threads_nor_dates() -> None:
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
