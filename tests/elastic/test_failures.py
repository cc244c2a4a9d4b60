"""Which exceptions count as a lost peer."""

from __future__ import annotations

import pytest

from tenax.elastic._failures import is_lost_peer
from tenax.store import StoreConnectionError

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:38276."
XLA = "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:45485"


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError(GLOO), True),
        (ValueError(XLA), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (StoreConnectionError("the store at node0:1234 closed the connection"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("sample 4417 has 3 labels"), False),
        (KeyError("Connection closed by peer"), False),
        (FileNotFoundError("checkpoint"), False),
        (SystemExit(3), False),
        (None, False),
    ],
)
def test_a_lost_peer_is_recognised(error: BaseException | None, is_lost: bool) -> None:
    assert is_lost_peer(error) is is_lost


def test_an_exception_that_a_lost_peer_has_caused_counts_too() -> None:
    outer = RuntimeError("the step failed")
    outer.__cause__ = RuntimeError(GLOO)
    assert is_lost_peer(outer)
    outer.__cause__ = outer  # a cycle ends
    assert not is_lost_peer(outer)
