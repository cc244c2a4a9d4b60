"""How busy the GPU of each process is, by the NVIDIA driver (nvidia-ml-py, extra ``tenax[gpu]``).

A driver may not answer for seconds, so a thread asks it, and the answer is used the next time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


class GpuUse:
    """``nvml``: a module like pynvml; None: pynvml, if it is installed."""

    def __init__(self, nvml: Any = None, start: Callable[[Callable[[], None]], None] | None = None) -> None:
        self._nvml = nvml
        self._start = start if start is not None else _in_a_thread
        self._is_possible = nvml is not None or find_spec("pynvml") is not None
        self._is_asking = False
        self._known: dict[int, float] = {}

    def by_pid(self) -> dict[int, float]:
        """Return the share of the time in which the GPU of each process was busy, as last known, and ask again."""
        if self._is_possible and not self._is_asking:
            self._is_asking = True
            self._start(self._ask)
        return self._known

    def _ask(self) -> None:
        try:
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
            self._known = _use_by_pid(self._nvml)
        except Exception:  # no driver, no GPU, no permission: there is nothing to show
            self._is_possible = False
        finally:
            self._is_asking = False


def _use_by_pid(nvml: Any) -> dict[int, float]:
    nvml.nvmlInit()
    try:
        found: dict[int, float] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            share = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu):
                found[process.pid] = max(share, found.get(process.pid, 0.0))
        return found
    finally:
        nvml.nvmlShutdown()


def _in_a_thread(call: Callable[[], None]) -> None:
    threading.Thread(target=call, name="gpu use", daemon=True).start()
