"""Endpoints and options of the command line are parsed as torch parses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenax.rendezvous.utils import _parse_rendezvous_config, parse_rendezvous_endpoint


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        (None, ("localhost", 29400)),
        ("", ("localhost", 29400)),
        ("  ", ("localhost", 29400)),
        ("host", ("host", 29400)),
        ("host:1", ("host", 1)),
        (" node-1.cluster:123 ", ("node-1.cluster", 123)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("[::1]", ("::1", 29400)),
        ("[2001:db8::1]:123", ("2001:db8::1", 123)),
    ],
)
def test_an_endpoint_is_parsed(endpoint: str | None, expected: tuple[str, int]) -> None:
    assert parse_rendezvous_endpoint(endpoint, 29400) == expected


@pytest.mark.parametrize(
    "endpoint", ["host:", "host:x", "host:65536", "host:123456", "host:-1", ":1", "ho st:1", "[]:1"]
)
def test_an_invalid_endpoint_is_rejected(endpoint: str) -> None:
    with pytest.raises(ValueError, match="of the rendezvous endpoint"):
        parse_rendezvous_endpoint(endpoint, 29400)


def test_options_are_parsed() -> None:
    assert _parse_rendezvous_config("") == {}
    assert _parse_rendezvous_config(" a=1 , b = x=y ") == {"a": "1", "b": "x=y"}


@pytest.mark.parametrize("text", [",", "a", "a=", "=1", "a=1,", "a=1,,b=2"])
def test_options_without_a_name_or_a_value_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="rendezvous option"):
        _parse_rendezvous_config(text)


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except ValueError:
        return ValueError


# No line breaks: torch accepts one at the end of a host.
_PIECES = st.lists(st.sampled_from([*"[]:.-_ ,=a1", "host", "localhost", "65535", "65536", "::1", "é"]), max_size=8)
TEXTS = _PIECES.map("".join)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return pytest.importorskip("torch.distributed.elastic.rendezvous.utils", reason="torch is not installed")


@given(text=TEXTS)
@settings(deadline=None)
def test_endpoints_are_parsed_as_by_torch(theirs: Any, text: str) -> None:
    assert outcome(parse_rendezvous_endpoint, text, 7) == outcome(theirs.parse_rendezvous_endpoint, text, 7)


@given(text=TEXTS)
@settings(deadline=None)
def test_options_are_parsed_as_by_torch(theirs: Any, text: str) -> None:
    assert outcome(_parse_rendezvous_config, text) == outcome(theirs._parse_rendezvous_config, text)
