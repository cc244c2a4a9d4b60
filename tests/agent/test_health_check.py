"""The health check server: alive while the agent makes progress, and honest when it does not."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

from tenax.agent.server.health_check_server import HealthCheckServer, create_healthcheck_server
from watching import leaving_nothing, on_linux

pytestmark = on_linux


def ask(server: HealthCheckServer) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_it_says_whether_there_was_progress() -> None:
    """200 while the last sign of life is young enough, 503 after that."""
    last = [time.time()]
    with leaving_nothing():
        server = create_healthcheck_server(lambda: int(last[0]), 0, 60)
        server.start()
        server.start()
        assert ask(server) == 200
        last[0] -= 3600
        assert ask(server) == 503
        server.stop()
        server.stop()
    assert server.alive_callback() == int(last[0])
