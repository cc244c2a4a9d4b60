"""GPU health, with an NVML that says what the test wants: healthy, in need of something, lost, or unknown."""

from __future__ import annotations

import asyncio
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kit.http import kube_probe
from kit.processes import PATIENCE_S, leaving_nothing, on_linux, until
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
    """As much of pynvml as is used. ``gpus``: for each the recovery action, or the error that asking gives."""

    NVMLError = NVMLError
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230

    def __init__(
        self, *gpus: int | NVMLError, driver: str | bytes = "570.86.15", init: NVMLError | None = None
    ) -> None:
        self.gpus = list(gpus)
        self.driver = driver
        self.init_error = init
        self.field_error = 0
        self.begun = 0

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise self.init_error
        self.begun += 1

    def nvmlShutdown(self) -> None:
        self.begun -= 1

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        assert self.begun
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        assert self.begun
        said = self.gpus[index]
        if isinstance(said, NVMLError):
            raise said
        return index

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[Any]:
        assert fields == [230]
        return [SimpleNamespace(nvmlReturn=self.field_error, value=SimpleNamespace(uiVal=self.gpus[handle]))]


def test_gpus_that_need_nothing_are_healthy() -> None:
    """And NVML is closed as often as it was opened."""
    nvml = Nvml(0, 0)
    check = GPUHealthCheck(nvml=nvml)
    assert (check.enabled, check.pynvml_available, check.why_not) == (True, True, "")
    assert check.check() == [GpuHealth(0, True), GpuHealth(1, True)]
    assert check()
    assert nvml.begun == 0


@pytest.mark.parametrize("action", [1, 2, 3, 4, 5, 99])
def test_a_gpu_that_needs_something_is_not(action: int) -> None:
    """Whatever it is, also what only a later driver knows; and the one who wants to know is called."""
    failures: list[str] = []
    check = GPUHealthCheck(on_failure=lambda: failures.append("!"), nvml=Nvml(0, action))
    healthy, sick = check.check()
    assert healthy.is_healthy
    assert (sick.is_healthy, bool(sick.action), sick.why.startswith("GPU 1: ")) == (False, True, True)
    assert not check()
    assert failures == ["!"]


def test_one_gpu_can_be_asked_about() -> None:
    assert GPUHealthCheck(device_index=0, nvml=Nvml(0, 2))()
    assert not GPUHealthCheck(device_index=1, nvml=Nvml(0, 2))()


def test_a_gpu_that_is_lost_is_unhealthy() -> None:
    """The driver cannot even find it."""
    (gpu,) = GPUHealthCheck(nvml=Nvml(NVMLError(GPU_IS_LOST))).check()
    assert (gpu.is_healthy, gpu.action) == (False, "unreachable")


def test_a_question_that_the_driver_does_not_know_accuses_nobody() -> None:
    """Unknown, whether the call or the field says so."""
    (gpu,) = GPUHealthCheck(nvml=Nvml(NVMLError(NOT_SUPPORTED))).check()
    assert gpu.is_healthy is None
    nvml = Nvml(0)
    nvml.field_error = NOT_SUPPORTED
    check = GPUHealthCheck(nvml=nvml)
    assert check.check()[0].is_healthy is None
    assert check()


@pytest.mark.parametrize("driver", ["565.57.01", b"535.1", "unknown"])
def test_an_older_driver_is_not_asked(driver: str | bytes) -> None:
    """A sentence says from which one on; nobody is accused."""
    check = GPUHealthCheck(nvml=Nvml(1, driver=driver))
    assert (check.enabled, check(), check.check()) == (False, True, [])
    assert "GPU health checks require 570 or later" in check.why_not


def test_without_a_driver_there_is_a_sentence() -> None:
    check = GPUHealthCheck(nvml=Nvml(init=NVMLError(DRIVER_NOT_LOADED)))
    assert (check.enabled, check.pynvml_available, check()) == (False, False, True)
    assert check.why_not == "the NVIDIA driver does not respond: NVML error 9"


def test_a_driver_that_goes_away_is_a_sentence_too() -> None:
    """Between two checks."""
    nvml = Nvml(0)
    check = GPUHealthCheck(nvml=nvml)
    nvml.init_error = NVMLError(DRIVER_NOT_LOADED)
    assert check()
    assert "does not respond" in check.why_not


@pytest.mark.skipif("pynvml" in sys.modules, reason="somebody has imported it")
def test_without_the_library_nothing_raises() -> None:
    """On a machine without it, or without GPUs, everything can be called, and nobody is accused."""
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
        await asyncio.wait_for(failed.wait(), PATIENCE_S)
        task.cancel()

    asyncio.run(until_first_failure())


# --- the server -------------------------------------------------------------------------------------------------------


def now() -> int:
    return int(time.time())


@on_linux
def test_a_sick_gpu_is_not_alive() -> None:
    """503 with what it needs, in words and for programs; the summary says the same."""
    with leaving_nothing():
        server = GPUHealthCheckServer(now, 0, 60, nvml=Nvml(0, 2))
        server.start()
        try:
            assert server.wait_for_first_check(PATIENCE_S)
            heard = kube_probe(server.port)
            assert (heard.status, heard.body) == (503, b"GPU 1: the node must be rebooted\n")
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
def test_gpus_that_nobody_can_ask_are_no_reason_to_be_unhealthy() -> None:
    """Without a driver, and when nobody wants them watched."""
    with leaving_nothing():
        server = GPUHealthCheckServer(now, 0, 60, nvml=Nvml(init=NVMLError(DRIVER_NOT_LOADED)))
        server.start()
        assert server.wait_for_first_check(PATIENCE_S)
        assert kube_probe(server.port).status == 200
        assert "does not respond" in server.get_gpu_health_status()["error"]
        server.stop()
        plain = create_gpu_healthcheck_server(now, 0, 60, enable_gpu_monitoring=False)
        plain.start()
        assert kube_probe(plain.port).status == 200
        assert "error" in plain.get_gpu_health_status()
        assert plain.get_health_summary()["overall_healthy"]
        plain.stop()


class Broken(Nvml):
    """A library that fails in a way of its own, until it is mended."""

    trouble = "no such symbol"

    def nvmlDeviceGetCount(self) -> int:
        if self.trouble:
            raise AttributeError(self.trouble)
        return super().nvmlDeviceGetCount()


@on_linux
def test_a_library_that_breaks_is_said_and_looked_at_again() -> None:
    """Nobody is called healthy who could not be asked; nobody is accused either."""
    with leaving_nothing():
        nvml = Broken(2)
        server = GPUHealthCheckServer(now, 0, 60, None, 0.01, nvml=nvml)  # type: ignore[arg-type]
        server.start()
        try:
            assert server.wait_for_first_check(PATIENCE_S)
            said = "the GPUs could not be looked at: AttributeError: no such symbol"
            assert server.get_gpu_health_status() == {"error": said}
            assert kube_probe(server.port).status == 200
            nvml.trouble = ""
            until(lambda: kube_probe(server.port).status == 503, "the next look")
        finally:
            server.stop()
