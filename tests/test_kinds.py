"""Every test has one kind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kit.kinds import FOLDERS, KINDS, kinds


def test_every_test_has_exactly_one_kind(request: pytest.FixtureRequest) -> None:
    wrong = {item.nodeid: kinds(item) for item in request.session.items if len(kinds(item)) != 1}
    assert not wrong


def test_the_kind_of_every_folder_exists() -> None:
    assert set(FOLDERS.values()) <= set(KINDS)


def test_a_unit_test_cannot_start_a_process() -> None:
    with pytest.raises(AssertionError, match="a test of the kind 'unit' starts a process"):
        subprocess.run([sys.executable, "-c", ""], check=True)
