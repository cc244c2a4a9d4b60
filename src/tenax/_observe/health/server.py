"""HealthCheckServer: answers over HTTP whether the agent is alive and whether its workers run.

``/readyz`` is about the workers, every other path (``/healthz``, ``/livez``) about the agent. The answer is 200 or 503
with a message, or with details for ``Accept: application/json`` or ``?format=json``. Listens on IPv6 and IPv4.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from tenax._io.http.message import METHOD_NOT_ALLOWED, OK, UNAVAILABLE, Request, Response, json, text
from tenax._io.http.server import HttpServer
from tenax._observe.health.liveness import AgentLiveness, Signs, details, liveness, readiness

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

READY_PATH = "/readyz"


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
        from tenax._io.http.server import HttpServer
        from tenax._io.listen import listen

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
