"""Control plane: a worker that can be asked while it runs. TorchElastic's ``worker_main``, and what it is asked.

    from tenax.control_plane import worker_main

    @worker_main()
    def main(): ...

The worker's errors are recorded, as ``record`` does it. If the environment names a socket
(``TORCH_WORKER_SERVER_SOCKET``), a thread answers there, over HTTP, in the way of torch's worker server: a list of
handlers (``GET /handler/``), and the handlers themselves (``POST /handler/ping``). ``tenax ask`` is the other end.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import ParamSpec, TypeVar

    from tenax.control_plane._handlers import HandlerRequest, register_handler, report_step
    from tenax.control_plane._server import WorkerServer

    P = ParamSpec("P")
    R = TypeVar("R")

__all__ = ["HandlerRequest", "register_handler", "report_step", "worker_main"]

TORCH_WORKER_SERVER_SOCKET = "TORCH_WORKER_SERVER_SOCKET"


def worker_main() -> _WorkerMain:
    """For the outermost function of a worker, as a decorator or as a context manager::

        with worker_main():
            train()

    An exception raised inside is recorded in the worker's error file and propagates. If ``TORCH_WORKER_SERVER_SOCKET``
    is set, the worker answers queries at that socket; if the socket cannot be opened, a line on stderr says so and the
    work continues without it.
    """
    return _WorkerMain()


class _WorkerMain:
    def __init__(self) -> None:
        self._server: WorkerServer | None = None

    def __enter__(self) -> None:
        from tenax._failures.error_handler import get_error_handler

        get_error_handler().initialize()
        self._server = _start_server()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            from tenax._failures.error_handler import get_error_handler
            from tenax._failures.record import _record

            _record(get_error_handler(), error)
        if self._server is not None:
            self._server.stop()
            self._server = None

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R | None]:
        import functools

        from tenax._failures.record import record

        recorded = record(fn)

        @functools.wraps(fn)
        def served(*args: P.args, **kwargs: P.kwargs) -> R | None:
            server = _start_server()
            try:
                return recorded(*args, **kwargs)
            finally:
                if server is not None:
                    server.stop()

        return served


def _start_server() -> WorkerServer | None:
    path = os.environ.get(TORCH_WORKER_SERVER_SOCKET, "")
    if not path:
        return None
    from tenax.control_plane._server import WorkerServer

    server = WorkerServer(path)
    try:
        server.start()
    except (OSError, ValueError) as error:
        from tenax._failures.error_handler import _print

        reason = getattr(error, "strerror", None) or error
        _print(f"this worker cannot be asked: {reason}; it works on all the same")
        return None
    return server


def __getattr__(name: str) -> object:
    # Imported on first use, so that a worker without queries does not wait for them at its start.
    if name not in ("HandlerRequest", "register_handler", "report_step"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tenax.control_plane import _handlers

    return getattr(_handlers, name)
