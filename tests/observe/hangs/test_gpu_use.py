"""How busy the GPU of each worker is: asked in a thread, and without effect if there is no driver."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tenax._observe.hangs.gpu_use import GpuUse

pytestmark = pytest.mark.unit


class Driver:
    """A driver with two GPUs. It answers like pynvml."""

    is_loaded = True

    def nvmlInit(self) -> None:
        if not self.is_loaded:
            raise RuntimeError("driver not loaded")

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return SimpleNamespace(gpu=(100, 7)[gpu])

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in ((11,), (11, 12))[gpu]]


def test_the_answer_is_used_the_next_time() -> None:
    """The busiest GPU of each process. Not more than one question at a time."""
    asked: list[Callable[[], None]] = []
    use = GpuUse(Driver(), asked.append)
    assert use.by_pid() == use.by_pid() == {}
    (ask,) = asked
    ask()
    assert use.by_pid() == {11: 1.0, 12: 0.07}
    assert len(asked) == 2


def test_without_a_driver_it_is_asked_once() -> None:
    driver, asked = Driver(), []
    driver.is_loaded = False
    use = GpuUse(driver, asked.append)
    assert use.by_pid() == {}
    asked.pop()()
    assert use.by_pid() == {}
    assert asked == []
