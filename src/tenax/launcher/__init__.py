"""The launcher: ``LaunchConfig``, ``elastic_launch`` and ``launch_agent``."""

from tenax.launcher.api import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
