"""The functions that workers of ``test_launch.py`` run.

Not in the module of tests, because a spawned worker would import pytest with it, for 0.2 s.
"""

from __future__ import annotations

import multiprocessing
import os
import signal


def identify(text: str) -> tuple[str, str, str]:
    return text, os.environ["RANK"], os.environ["TORCHELASTIC_RUN_ID"]


def reduce_and_leave(times: int) -> float:
    """Return without destroying the process group."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1000)
    for _ in range(times):
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return float(total[0])


def start_method_of_children() -> str:
    return multiprocessing.get_start_method()


def fail(text: str) -> None:
    if os.environ["RANK"] == "0":
        raise ValueError(text)
    signal.pause()
