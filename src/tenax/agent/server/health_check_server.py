"""The health check server, at TorchElastic's module path. The code is in ``tenax._observe.health``."""

from tenax._observe.health.server import (
    GPUHealthCheckServer,
    HealthCheckServer,
    create_gpu_healthcheck_server,
    create_healthcheck_server,
)

__all__ = [
    "GPUHealthCheckServer",
    "HealthCheckServer",
    "create_gpu_healthcheck_server",
    "create_healthcheck_server",
]
