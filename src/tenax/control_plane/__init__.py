"""Control plane: a worker that answers queries while it runs. TorchElastic's ``worker_main`` and the handlers.

    from tenax.control_plane import worker_main

    @worker_main()
    def main(): ...

The worker's errors are recorded, as by ``record``. If the environment names a socket (``TORCH_WORKER_SERVER_SOCKET``),
a thread serves HTTP there, like torch's worker server: a list of handlers (``GET /handler/``), and the handlers
themselves (``POST /handler/ping``). ``tenax ask`` is the client.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec, TypeVar

    from tenax.control_plane._handlers import HandlerRequest, register_handler, report_step
    from tenax.control_plane._server import WorkerServer

    P = ParamSpec("P")
    R = TypeVar("R")

__all__ = ["HandlerRequest", "register_handler", "report_step", "worker_main"]

TORCH_WORKER_SERVER_SOCKET = "TORCH_WORKER_SERVER_SOCKET"


def worker_main() -> _WorkerMain:
    """Decorate the outermost function of a worker, or wrap its body as a context manager::

        with worker_main():
            train()

    An exception raised inside is recorded in the worker's error file and propagates. If ``TORCH_WORKER_SERVER_SOCKET``
    is set, the worker answers queries at that socket; if the socket cannot be opened, a line on stderr reports that
    and the worker continues without it.
    """
    return _WorkerMain()


class _WorkerMain:
    def __init__(self) -> None:
        self._server: WorkerServer | None = None

    def __enter__(self) -> None:
        from tenax._failures.error_handler import get_error_handler

        get_error_handler().initialize()
        self._server = _start_server()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            from tenax._failures.error_handler import _record, get_error_handler

            _record(get_error_handler(), error)
        if self._server is not None:
            self._server.stop()
            self._server = None

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R | None]:
        import functools

        from tenax._failures.error_handler import record

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
        _print(f"could not start the worker server: {reason}; the worker continues without it")
        return None
    return server


def __getattr__(name: str) -> object:
    # Imported on first use, so that a worker without queries starts faster.
    if name not in ("HandlerRequest", "register_handler", "report_step"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tenax.control_plane import _handlers

    return getattr(_handlers, name)
