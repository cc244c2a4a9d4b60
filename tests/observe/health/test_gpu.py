"""GPU health, with a fake NVML: healthy, in need of an action, lost, or unknown."""

from __future__ import annotations

import asyncio
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kit.http import kube_probe
from kit.processes import TIMEOUT_S, leaving_nothing, on_linux, until
from tenax.agent.server.health_check_server import GPUHealthCheckServer, create_gpu_healthcheck_server
from tenax.utils.gpu_health_check import (
    GpuHealth,
    GPUHealthCheck,
    PynvmlMixin,
    create_gpu_health_check,
    quick_gpu_health_check,
)

GPU_IS_LOST, NOT_SUPPORTED, DRIVER_NOT_LOADED = 15, 3, 9


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Nvml:
    """The part of pynvml that is used. ``gpus``: the recovery action of each, or the error of the query."""

    NVMLError = NVMLError
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230

    def __init__(
        self, *gpus: int | NVMLError, driver: str | bytes = "570.86.15", init: NVMLError | None = None
    ) -> None:
        self.gpus = list(gpus)
        self.driver = driver
        self.init_error = init
        self.field_error = 0
        self.open_count = 0

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise self.init_error
        self.open_count += 1

    def nvmlShutdown(self) -> None:
        self.open_count -= 1

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        assert self.open_count
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        assert self.open_count
        state = self.gpus[index]
        if isinstance(state, NVMLError):
            raise state
        return index

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[Any]:
        assert fields == [230]
        return [SimpleNamespace(nvmlReturn=self.field_error, value=SimpleNamespace(uiVal=self.gpus[handle]))]


def test_gpus_that_need_no_action_are_healthy() -> None:
    """NVML is closed as often as it was opened."""
    nvml = Nvml(0, 0)
    check = GPUHealthCheck(nvml=nvml)
    assert (check.enabled, check.pynvml_available, check.why_not) == (True, True, "")
    assert check.check() == [GpuHealth(0, True), GpuHealth(1, True)]
    assert check()
    assert nvml.open_count == 0


@pytest.mark.parametrize("action", [1, 2, 3, 4, 5, 99])
def test_a_gpu_that_needs_an_action_is_unhealthy(action: int) -> None:
    """Any action, also one of a newer driver; the callback is called."""
    failures: list[str] = []
    check = GPUHealthCheck(on_failure=lambda: failures.append("!"), nvml=Nvml(0, action))
    healthy, unhealthy = check.check()
    assert healthy.is_healthy
    assert (unhealthy.is_healthy, bool(unhealthy.action), unhealthy.why.startswith("GPU 1: ")) == (False, True, True)
    assert not check()
    assert failures == ["!"]


def test_a_single_gpu_can_be_checked() -> None:
    assert GPUHealthCheck(device_index=0, nvml=Nvml(0, 2))()
    assert not GPUHealthCheck(device_index=1, nvml=Nvml(0, 2))()


def test_a_gpu_that_is_lost_is_unhealthy() -> None:
    """The driver cannot find it."""
    (gpu,) = GPUHealthCheck(nvml=Nvml(NVMLError(GPU_IS_LOST))).check()
    assert (gpu.is_healthy, gpu.action) == (False, "unreachable")


def test_a_query_that_the_driver_does_not_support_is_unknown() -> None:
    """Not unhealthy, whether the call or the field is unsupported."""
    (gpu,) = GPUHealthCheck(nvml=Nvml(NVMLError(NOT_SUPPORTED))).check()
    assert gpu.is_healthy is None
    nvml = Nvml(0)
    nvml.field_error = NOT_SUPPORTED
    check = GPUHealthCheck(nvml=nvml)
    assert check.check()[0].is_healthy is None
    assert check()


@pytest.mark.parametrize("driver", ["565.57.01", b"535.1", "unknown"])
def test_an_older_driver_is_not_queried(driver: str | bytes) -> None:
    """The reason has the required version; no GPU is unhealthy."""
    check = GPUHealthCheck(nvml=Nvml(1, driver=driver))
    assert (check.enabled, check(), check.check()) == (False, True, [])
    assert "GPU health checks require 570 or later" in check.why_not


def test_without_a_driver_there_is_a_reason() -> None:
    check = GPUHealthCheck(nvml=Nvml(init=NVMLError(DRIVER_NOT_LOADED)))
    assert (check.enabled, check.pynvml_available, check()) == (False, False, True)
    assert check.why_not == "the NVIDIA driver does not respond: NVML error 9"


def test_a_driver_that_stops_responding_is_reported() -> None:
    """Between two checks."""
    nvml = Nvml(0)
    check = GPUHealthCheck(nvml=nvml)
    nvml.init_error = NVMLError(DRIVER_NOT_LOADED)
    assert check()
    assert "does not respond" in check.why_not


@pytest.mark.skipif("pynvml" in sys.modules, reason="pynvml is already imported")
def test_without_the_library_nothing_raises() -> None:
    """On a machine without it, or without GPUs, no GPU is unhealthy."""
    mixin = PynvmlMixin()
    if mixin.check_pynvml_availability():
        pytest.skip("this machine has GPUs")
    assert mixin.why_not
    assert create_gpu_health_check().why_not
    assert quick_gpu_health_check()


def test_it_can_be_checked_from_asyncio() -> None:
    """Until the task is cancelled."""

    async def until_first_failure() -> None:
        failed = asyncio.Event()
        loop = asyncio.get_running_loop()
        check = GPUHealthCheck(None, 60, lambda: loop.call_soon_threadsafe(failed.set), nvml=Nvml(1))
        task = asyncio.create_task(check.async_check())
        await asyncio.wait_for(failed.wait(), TIMEOUT_S)
        task.cancel()

    asyncio.run(until_first_failure())


# --- the server -------------------------------------------------------------------------------------------------------


def now() -> int:
    return int(time.time())


@on_linux
def test_an_unhealthy_gpu_fails_the_health_check() -> None:
    """503 with the required action, as text and as JSON, and in the summary."""
    with leaving_nothing():
        server = GPUHealthCheckServer(now, 0, 60, nvml=Nvml(0, 2))
        server.start()
        try:
            assert server.wait_for_first_check(TIMEOUT_S)
            answer = kube_probe(server.port)
            assert (answer.status, answer.body) == (503, b"GPU 1: the node must be rebooted\n")
            gpus = kube_probe(server.port, "/healthz?format=json").json()["gpu"]["gpus"]
            assert [gpu["is_healthy"] for gpu in gpus] == [True, False]
            summary = server.get_health_summary()
            assert summary["process_health"]["alive"]
            assert not summary["overall_healthy"]
            assert not summary["gpu_health"]["is_healthy"]
            assert set(summary) == {"process_health", "gpu_health", "overall_healthy", "timestamp"}
        finally:
            server.stop()
        assert server.get_gpu_health_status()["pynvml_available"]


@on_linux
def test_gpus_that_cannot_be_checked_do_not_fail_the_health_check() -> None:
    """Without a driver, and with the check disabled."""
    with leaving_nothing():
        server = GPUHealthCheckServer(now, 0, 60, nvml=Nvml(init=NVMLError(DRIVER_NOT_LOADED)))
        server.start()
        assert server.wait_for_first_check(TIMEOUT_S)
        assert kube_probe(server.port).status == 200
        assert "does not respond" in server.get_gpu_health_status()["error"]
        server.stop()
        plain = create_gpu_healthcheck_server(now, 0, 60, enable_gpu_monitoring=False)
        plain.start()
        assert kube_probe(plain.port).status == 200
        assert "error" in plain.get_gpu_health_status()
        assert plain.get_health_summary()["overall_healthy"]
        plain.stop()


class FailingNvml(Nvml):
    """A library that raises an unexpected exception while ``error`` is set."""

    error = "no such symbol"

    def nvmlDeviceGetCount(self) -> int:
        if self.error:
            raise AttributeError(self.error)
        return super().nvmlDeviceGetCount()


@on_linux
def test_an_exception_of_the_library_is_reported_and_the_check_is_repeated() -> None:
    """Meanwhile the GPUs are neither healthy nor unhealthy."""
    with leaving_nothing():
        nvml = FailingNvml(2)
        server = GPUHealthCheckServer(now, 0, 60, None, 0.01, nvml=nvml)  # type: ignore[arg-type]
        server.start()
        try:
            assert server.wait_for_first_check(TIMEOUT_S)
            error = "could not check the GPUs: AttributeError: no such symbol"
            assert server.get_gpu_health_status() == {"error": error}
            assert kube_probe(server.port).status == 200
            nvml.error = ""
            until(lambda: kube_probe(server.port).status == 503, "the next check")
        finally:
            server.stop()
