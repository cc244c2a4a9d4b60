"""The keeper for the start method ``forkserver``: a clean interpreter that forks workers instead of running exec."""

from __future__ import annotations

from tenax._io.helper_channel import Channel
from tenax._processes.function_worker import run_forked
from tenax._processes.keeper_main import Keeper


def main(descriptor: int) -> None:
    Keeper(Channel.from_descriptor(descriptor), run_forked).run()
