from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tenax.elastic import _state

from .fake_agent import FakeAgent


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    """An agent whose channel the next ``generations()`` finds."""
    before = dict(os.environ)
    _state._cuts_agreed = _state._cuts  # a test is a new process, to which nothing has happened
    agent = FakeAgent()
    agent.offer()
    yield agent
    agent.close()
    os.environ.clear()
    os.environ.update(before)
