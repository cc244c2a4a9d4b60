"""HealthCheckServer: answers over HTTP whether the agent is alive and whether its workers run, also by their GPUs.

``/readyz`` is about the workers, every other path (``/healthz``, ``/livez``) about the agent. The answer is 200 or 503
with a message, or with details for ``Accept: application/json`` or ``?format=json``. Listens on IPv6 and IPv4.

With a GPU that needs a reset, ``/healthz`` and ``/readyz`` of a ``GPUHealthCheckServer`` answer 503 with the required
action. The driver has no notifications, so a thread polls it; a driver that hangs blocks only that thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from tenax._io.http.message import METHOD_NOT_ALLOWED, OK, UNAVAILABLE, Request, Response, json, text
from tenax._io.http.server import HttpServer
from tenax._io.listen import listen
from tenax._observe.health.check import AgentLiveness, Signs, details, liveness, readiness

if TYPE_CHECKING:
    from tenax.utils.gpu_health_check import GpuHealth, GPUHealthCheck

READY_PATH = "/readyz"
_JOIN_S = 2.0  # a driver may hang; the thread is a daemon


class HealthCheckServer:
    """Serves between ``start`` and ``stop``. To answer differently, override these two in a subclass.

    ``alive_callback``: returns the time of the last progress, in seconds since the epoch.
    ``port``: port to listen on; 0: any free port.
    ``timeout``: maximum age of the last progress, in seconds.
    ``signs``: liveness that the agent records.
    """

    def __init__(
        self, alive_callback: Callable[[], int], port: int, timeout: int, *, signs: AgentLiveness | None = None
    ) -> None:
        self._alive_callback = alive_callback
        self._port = port
        self._timeout = timeout
        self.signs = AgentLiveness() if signs is None else signs
        self._server: HttpServer | None = None
        self._bound_port = 0

    @property
    def alive_callback(self) -> Callable[[], int]:
        return self._alive_callback

    @property
    def port(self) -> int:
        """The port; if it was 0, the one that the system chose."""
        return self._bound_port or self._port

    def is_alive(self) -> bool:
        """Return the verdict of ``/healthz``."""
        return liveness(self._read(), self._timeout).is_good

    def start(self) -> None:
        """Start serving. Raises OSError if the port cannot be used. Does nothing if already started."""
        if self._server is not None:
            return
        listener = listen("", self._port)
        self._bound_port = int(listener.getsockname()[1])
        self._server = HttpServer(listener, self._answer, name="tenax health check")
        self._server.start()

    def stop(self) -> None:
        """Stop serving. Does nothing if not started."""
        if self._server is not None:
            self._server.stop()
            self._server = None
            self._bound_port = 0

    def _answer(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            return text(METHOD_NOT_ALLOWED, "method not allowed; use GET or HEAD", Allow="GET, HEAD")
        signs = self._read()
        judge = readiness if request.path == READY_PATH else liveness
        judged = judge(signs, self._timeout)
        status = OK if judged.is_good else UNAVAILABLE
        if request.wants_json:
            return json(status, {**details(judged, signs, self._timeout), **self._more()})
        return text(status, judged.why)

    def _read(self) -> Signs:
        signs = self.signs.read()
        try:
            age_s = max(0.0, time.time() - self._alive_callback())
        except Exception as error:  # third-party code; the answer contains the error
            return msgspec.structs.replace(signs, trouble=f"alive_callback raised {type(error).__name__}: {error}")
        trouble = signs.trouble or self._trouble()
        return msgspec.structs.replace(signs, callback_age_s=age_s, trouble=trouble)

    def _trouble(self) -> str:
        """For subclasses: return another reason for being unhealthy; empty if there is none."""
        return ""

    def _more(self) -> dict[str, Any]:
        """For subclasses: return additional fields of the JSON answer."""
        return {}


def create_healthcheck_server(alive_callback: Callable[[], int], port: int, timeout: int) -> HealthCheckServer:
    """Return a health check server, not started."""
    return HealthCheckServer(alive_callback, port, timeout)


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
        if self._check_error or check is None or check.why_not:
            unknown = "GPUs have not been checked yet" if check is None else check.why_not
            return {"error": self._check_error or unknown}
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
        now, last_progress = time.time(), self._alive_callback()
        return {
            "process_health": {"alive": now - last_progress <= self._timeout, "last_progress_time": last_progress},
            "gpu_health": self.get_gpu_health_status(),
            "overall_healthy": self.is_alive(),
            "timestamp": now,
        }

    def wait_for_first_check(self, timeout_s: float) -> bool:
        """Wait for the first check of the GPUs. Return False on timeout."""
        return self._has_checked.wait(timeout_s)

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
