"""GPUHealthCheckServer: a health check that also checks the GPUs.

With a GPU that needs a reset, ``/healthz`` and ``/readyz`` answer 503 with the required action. The driver has no
notifications, so a thread polls it; a driver that hangs blocks only that thread.
"""

from __future__ import annotations

import threading
import time

from tenax._observe.health.server import HealthCheckServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tenax.utils.gpu_health_check import GpuHealth, GPUHealthCheck

__all__ = ["GPUHealthCheckServer", "create_gpu_healthcheck_server"]

_JOIN_S = 2.0  # a driver may hang; the thread is a daemon


class GPUHealthCheckServer(HealthCheckServer):
    """The first three parameters are those of ``HealthCheckServer``.

    ``gpu_device_index``: the only GPU to check; None: all.
    ``gpu_check_interval``: seconds between two checks.
    ``enable_gpu_monitoring``: False makes it a plain ``HealthCheckServer``.
    ``nvml``: a module with pynvml's interface; None: pynvml.
    """

    def __init__(
        self,
        alive_callback: Callable[[], int],
        port: int,
        timeout: int,
        gpu_device_index: int | None = None,
        gpu_check_interval: int = 60,
        enable_gpu_monitoring: bool = True,
        *,
        nvml: Any = None,
    ) -> None:
        super().__init__(alive_callback, port, timeout)
        self._gpu_device_index = gpu_device_index
        self._gpu_check_interval = gpu_check_interval
        self._gpu_monitoring_enabled = enable_gpu_monitoring
        self._nvml = nvml
        self._gpu_check: GPUHealthCheck | None = None
        self._gpus: list[GpuHealth] = []
        self._check_error = ""  # why the last check failed; empty: it did not
        self._checked_at = 0.0  # seconds since the epoch
        self._has_checked = threading.Event()
        self._stopping = threading.Event()
        self._gpu_thread: threading.Thread | None = None

    def start(self) -> None:
        super().start()
        if self._gpu_monitoring_enabled and self._gpu_thread is None:
            self._stopping.clear()
            self._gpu_thread = threading.Thread(target=self._poll, name="tenax gpu health", daemon=True)
            self._gpu_thread.start()

    def stop(self) -> None:
        super().stop()
        if self._gpu_thread is not None:
            self._stopping.set()
            self._gpu_thread.join(_JOIN_S)
            self._gpu_thread = None

    def get_gpu_health_status(self) -> dict[str, Any]:
        """Return the state of the GPUs. ``is_healthy`` is True unless a GPU is known to be unhealthy."""
        if not self._gpu_monitoring_enabled:
            return {"error": "GPUs are not checked: enable_gpu_monitoring is False"}
        check, gpus = self._gpu_check, self._gpus
        if self._check_error:
            return {"error": self._check_error}
        if check is None:
            return {"error": "GPUs have not been checked yet"}
        if check.why_not:
            return {"error": check.why_not}
        return {
            "enabled": check.enabled,
            "device_index": self._gpu_device_index,
            "is_healthy": all(gpu.is_healthy is not False for gpu in gpus),
            "pynvml_available": check.pynvml_available,
            "timestamp": self._checked_at,
            "gpus": [
                {"index": gpu.index, "is_healthy": gpu.is_healthy, "action": gpu.action, "why": gpu.why} for gpu in gpus
            ],
        }

    def get_health_summary(self) -> dict[str, Any]:
        """Return the health of the agent and of the GPUs."""
        gpu_health = self.get_gpu_health_status()
        return {
            "process_health": {"alive": self._is_making_progress(), "last_progress_time": self._alive_callback()},
            "gpu_health": gpu_health,
            "overall_healthy": self.is_alive(),
            "timestamp": time.time(),
        }

    def wait_for_first_check(self, timeout_s: float) -> bool:
        """Wait for the first check of the GPUs. Return False on timeout."""
        return self._has_checked.wait(timeout_s)

    def _is_making_progress(self) -> bool:
        return time.time() - self._alive_callback() <= self._timeout

    def _poll(self) -> None:
        from tenax.utils.gpu_health_check import GPUHealthCheck

        check: GPUHealthCheck | None = None
        while not self._stopping.is_set():
            try:
                if check is None:
                    check = GPUHealthCheck(self._gpu_device_index, self._gpu_check_interval, nvml=self._nvml)
                self._gpus = check.check()
                self._checked_at = time.time()
                self._gpu_check = check
                self._check_error = ""
            # NVML's Python package can raise anything. If this thread ended, the last result would remain valid.
            except Exception as error:
                self._gpus = []
                self._check_error = f"could not check the GPUs: {type(error).__name__}: {error}"
            self._has_checked.set()
            self._stopping.wait(self._gpu_check_interval)

    def _trouble(self) -> str:
        return "; ".join(gpu.why for gpu in self._gpus if gpu.is_healthy is False)

    def _more(self) -> dict[str, Any]:
        return {"gpu": self.get_gpu_health_status()}


def create_gpu_healthcheck_server(
    alive_callback: Callable[[], int],
    port: int,
    timeout: int,
    gpu_device_index: int | None = None,
    gpu_check_interval: int = 60,
    enable_gpu_monitoring: bool = True,
) -> GPUHealthCheckServer:
    """Return a health check server that also checks the GPUs, not started."""
    return GPUHealthCheckServer(
        alive_callback, port, timeout, gpu_device_index, gpu_check_interval, enable_gpu_monitoring
    )
