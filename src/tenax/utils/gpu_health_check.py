"""GPU health: query the NVIDIA driver whether a GPU needs to be reset, drained or rebooted.

Drivers from r570 on report the *recovery action* that each GPU needs. They are queried through NVML (the package
nvidia-ml-py, extra ``tenax[gpu]``), which is imported on first use. Without the library, a driver, a GPU or that query,
the health is *unknown*, which is not unhealthy, and a message gives the reason. An error of the driver for one GPU,
above all that it has been lost, is unhealthy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

__all__ = ["GPUHealthCheck", "GpuHealth", "PynvmlMixin", "create_gpu_health_check", "quick_gpu_health_check"]

_RECOVERY_ACTION_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, should the Python package be older than the driver
_FIRST_DRIVER = 570
_NONE = 0
_ACTIONS = {
    1: ("gpu reset", "it must be reset: end the processes that use it, then nvidia-smi --gpu-reset"),
    2: ("node reboot", "the node must be rebooted"),
    3: ("drain p2p", "its peer-to-peer traffic must be drained: end the processes that use it, then check again"),
    4: ("drain and reset", "it works at reduced capacity: start no more work on it, then reset it"),
    5: ("gpu reset bus", "it must be reset together with its bus"),
}
# By NVML: uninitialized, not supported, no permission, driver not loaded, library not found, function not found,
# operating system, argument version mismatch, deprecated. They are about the query, not about the GPU.
_NOT_THE_GPU = {1, 3, 4, 9, 12, 13, 17, 25, 26}

T = TypeVar("T")
_one_at_a_time = threading.RLock()  # NVML is initialized and shut down once per process


class GpuHealth(msgspec.Struct, frozen=True):
    """The health of one GPU. ``is_healthy`` is None if it is unknown."""

    index: int
    is_healthy: bool | None
    action: str = ""  # the recovery action that it needs
    why: str = ""


class PynvmlMixin:
    """Loads NVML. ``nvml``: a module like pynvml; None: pynvml, imported on first use."""

    def __init__(self, nvml: Any = None) -> None:
        self.pynvml: Any = nvml
        self.why_not = ""  # why the driver cannot be queried; empty if it can

    def check_pynvml_availability(self) -> bool:
        """Return whether the driver can be queried. If not, ``why_not`` is the reason."""
        if self.pynvml is None:
            try:
                import pynvml
            except ImportError:
                self.why_not = "NVML's Python package is not installed; install tenax[gpu], or nvidia-ml-py"
                return False
            self.pynvml = pynvml
        return self._query(lambda: True, "does not respond") is not None

    def _query(self, query: Callable[[], T], failure: str) -> T | None:
        """Return the result of a query with NVML initialized. None: it failed, and ``why_not`` is the reason."""
        what = "does not respond"
        with _one_at_a_time:
            try:
                self.pynvml.nvmlInit()
                try:
                    self.why_not, what = "", failure
                    return query()
                finally:
                    self.pynvml.nvmlShutdown()
            except self.pynvml.NVMLError as error:
                self.why_not = f"the NVIDIA driver {what}: {error}"
                return None


class GPUHealthCheck(PynvmlMixin):
    """``check()`` returns the health of every GPU. Calling the object returns False if one is known to be unhealthy.

    ``device_index``: the only GPU to check, as nvidia-smi counts; None: all.
    ``interval``: seconds between two checks of ``async_check``.
    ``on_failure``: called without arguments when a check has found an unhealthy GPU.
    ``nvml``: a module like pynvml; None: pynvml.
    """

    def __init__(
        self,
        device_index: int | None = None,
        interval: int = 60,
        on_failure: Callable[[], object] | None = None,
        *,
        nvml: Any = None,
    ) -> None:
        super().__init__(nvml)
        self.device_index = device_index
        self.interval = interval
        self.on_failure = on_failure
        self.pynvml_available = self.check_pynvml_availability()
        self.enabled = self.pynvml_available and self._driver_is_new_enough()

    def __call__(self) -> bool:
        """Check once. True also if the health is unknown."""
        is_healthy = all(gpu.is_healthy is not False for gpu in self.check())
        if not is_healthy and self.on_failure is not None:
            self.on_failure()
        return is_healthy

    async def async_check(self) -> None:
        """Check every ``interval`` seconds, until cancelled. Does not block the event loop."""
        import asyncio

        while True:
            await asyncio.get_running_loop().run_in_executor(None, self)
            await asyncio.sleep(self.interval)

    def check(self) -> list[GpuHealth]:
        """Return the health of each GPU. Empty if the driver cannot be queried; ``why_not`` is the reason."""
        if not self.enabled:
            return []
        return self._query(self._health_of_all, "did not report the number of GPUs") or []

    def _health_of_all(self) -> list[GpuHealth]:
        only = self.device_index
        return [self._health_of(each) for each in (range(self.pynvml.nvmlDeviceGetCount()) if only is None else [only])]

    def _health_of(self, index: int) -> GpuHealth:
        nvml = self.pynvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", _RECOVERY_ACTION_FIELD)
            (value,) = nvml.nvmlDeviceGetFieldValues(handle, [field])
            if value.nvmlReturn != 0:
                raise nvml.NVMLError(value.nvmlReturn)
        except nvml.NVMLError as error:
            if error.value in _NOT_THE_GPU:
                return GpuHealth(index, None, why=f"GPU {index}: its driver reported no health: {error}")
            return GpuHealth(index, False, "unreachable", f"GPU {index} does not respond: {error}")
        action = int(value.value.uiVal)
        if action == _NONE:
            return GpuHealth(index, True)
        name, advice = _ACTIONS.get(action, (f"action {action}", f"its driver requests the recovery action {action}"))
        return GpuHealth(index, False, name, f"GPU {index}: {advice}")

    def _driver_is_new_enough(self) -> bool:
        version = self._query(self.pynvml.nvmlSystemGetDriverVersion, "did not report its version")
        if version is None:
            return False
        written = version.decode() if isinstance(version, bytes) else str(version)
        major = written.partition(".")[0]
        if major.isdecimal() and int(major) >= _FIRST_DRIVER:
            return True
        self.why_not = f"the NVIDIA driver is {written}; GPU health checks require {_FIRST_DRIVER} or later"
        return False


def create_gpu_health_check(
    device_index: int | None = None, interval: int = 60, on_failure: Callable[[], object] | None = None
) -> GPUHealthCheck:
    """A GPU health check, ready to be called."""
    return GPUHealthCheck(device_index, interval, on_failure)


def quick_gpu_health_check(device_index: int | None = None) -> bool:
    """Check once: False if a GPU is known to be unhealthy."""
    return GPUHealthCheck(device_index)()
