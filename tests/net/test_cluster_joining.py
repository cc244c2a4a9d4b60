"""Nodes find each other, whatever the order, the name or the address."""

from __future__ import annotations

from collections.abc import Callable
import pytest

from .cluster import PORT, Cluster
from .lab import Lab, requires_netns

pytestmark = requires_netns


def test_basic(lab: Lab) -> None:
    cluster = Cluster(lab, 3)
    cluster.start(*lab)
    cluster.until_at_work(3)
    cluster.finish()
