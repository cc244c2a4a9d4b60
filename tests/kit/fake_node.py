"""A node as an engine sees it, with parts that do nothing unless a test passes its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tenax._core.model import AgentSettings
from tenax._io.interfaces import create_machine


def fake_node(settings: AgentSettings, **parts: Any) -> Any:
    """Return a ``ControlledNode``."""
    nothing = {
        "policy": None,
        "messages_on_connecting": lambda _: [],
        "hold": lambda _: None,
        "keep": lambda *_: None,
        "release": lambda _: None,
        "print_line": lambda _: None,
        "record_run": lambda _: lambda *_: None,
        "create": create_machine,
        "answer": lambda _, reply: reply(None, "this node accepts no requests"),
        "set_operator_api": lambda _: None,
    }
    return SimpleNamespace(settings=settings, **{**nothing, **parts})
