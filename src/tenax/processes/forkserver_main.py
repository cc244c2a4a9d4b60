"""A keeper for the start method ``forkserver``: a clean interpreter that forks workers instead of starting new ones."""

from __future__ import annotations

from tenax.channel import Channel
from tenax.processes.function_worker import run_forked
from tenax.processes.keeper_main import Keeper


def main(descriptor: int) -> None:
    """Entry of the helper process."""
    Keeper(Channel.from_descriptor(descriptor), run_forked).run()
