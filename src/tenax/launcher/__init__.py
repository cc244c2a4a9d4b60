"""The launcher: ``LaunchConfig``, ``elastic_launch`` and ``launch_agent``, loaded on first use to keep startup fast."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tenax.launcher.api import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tenax.launcher import api

    return getattr(api, name)
