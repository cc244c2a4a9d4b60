"""The health check server: alive while the agent makes progress, and honest when it does not."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request

import pytest

from tenax.agent.server.health_check_server import HealthCheckServer, create_healthcheck_server


def ask(server: HealthCheckServer) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_it_says_whether_there_was_progress() -> None:
    """200 while the last sign of life is young enough, 503 after that, and nobody listens when it was stopped."""
    last = [time.time()]
    server = create_healthcheck_server(lambda: int(last[0]), 0, 60)
    server.start()
    server.start()
    port = server.port
    assert ask(server) == 200
    last[0] -= 3600
    assert ask(server) == 503
    server.stop()
    server.stop()
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=10):
        pass
    assert server.alive_callback() == int(last[0])
