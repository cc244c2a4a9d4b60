"""ServerThread: a store server in a daemon thread of this process, for launchers and tests."""

from __future__ import annotations

import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from tenax.store._server import Counters, StoreServer


class ServerThread:
    """Serves from its creation until ``close``."""

    def __init__(self, server: StoreServer, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._server = server
        self._thread = threading.Thread(target=server.serve, name="tenax-store", daemon=True)
        self._thread.start()

    @property
    def counters(self) -> Counters:
        return self._server.counters

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.stop()
            self._thread.join()
            self._server.close()

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
