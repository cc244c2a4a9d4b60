"""The dashboard: serves the run's status to browsers while the coordinator runs in this agent.

    loop's thread      computes a status after changes, while browsers are connected, and executes requests
    server's thread    HTTP: computes, encodes and sends differences

Invariants (tests cite the numbers):

D1  Without a connected browser, nothing is computed.
D2  The dashboard uses a small share of the loop's time, however large and busy the run is: the pause after a status is
    a multiple of the time that it took.
D3  Every page and every request needs the key, which is in the link. Requests that change the run need it in a header,
    which another site cannot make a browser send.
D4  A browser that stops reading loses its stream, and can reconnect.
"""

from __future__ import annotations

import errno
import hmac
import os
import time

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._io.http.message import (
    BAD_REQUEST,
    CONFLICT,
    FORBIDDEN,
    INTERNAL_ERROR,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    OK,
    Limits,
    Request,
    Response,
    json,
    text,
)
from tenax._io.http.pending import DeferredResponse, Stream, event
from tenax._io.http.server import ClientLimits, HttpServer
from tenax._io.listen import listen
from tenax._observe.dashboard import feed
from tenax._observe.dashboard.files import HEADERS, PAGES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn

    from tenax._core.requests import AnyRequest
    from tenax._io.interfaces import Cancellable, EventLoop, OperatorService
    from tenax._view.status import RunStatus

_COALESCE_S = 0.03  # wait this long for further changes
_MIN_PAUSE_S = 0.1  # between two statuses
_REST_PER_WORK = 40  # pause after a status, as a multiple of its CPU time (D2)
_MAX_PAUSE_S = 0.7
_ANSWER_S = 30.0  # timeout for an answer of a node or of the loop
_MAX_WAIT_S = 20.0  # for new lines
_MAX_LINES = 1000
_KEY_BYTES = 18
KEY_VARIABLE = "TENAX_DASHBOARD_KEY"
_MIN_KEY = 16
_MAX_BODY = 4096
_KEY_HEADER = "x-tenax-key"
_UNBUFFERED = {"X-Accel-Buffering": "no"}  # proxies must not delay events
_FROM_DASHBOARD = "requested on the dashboard"


class _Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a POST."""

    do: str  # "drain", "restart" or "stop"
    node: str = ""  # which to drain


def _key(environ: Mapping[str, str]) -> str:
    """Return the key from the environment, for a Prometheus that is configured in advance, or else a random one."""
    given = environ.get(KEY_VARIABLE, "")
    if not given:
        return os.urandom(_KEY_BYTES).hex()
    if len(given) < _MIN_KEY or not all(each.isalnum() or each in "-_" for each in given):
        raise OSError(0, f"{KEY_VARIABLE} must have at least {_MIN_KEY} letters, digits, '-' or '_'")
    return given


class Dashboard:
    """Serves at HOST:PORT (port 0: any free port) from the start. Raises OSError with a message.

    ``operators`` and ``on_error`` are called in the loop's thread only.
    """

    def __init__(
        self,
        address: str,
        operators: OperatorService,
        loop: EventLoop,
        on_error: Callable[[str], None],
        *,
        client_limits: ClientLimits = ClientLimits(connections=96),  # noqa: B008 - frozen
        environ: Mapping[str, str] | None = None,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._operators = operators
        self._loop = loop
        self._on_error = on_error
        self._cpu_clock = cpu_clock
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            listener = listen(host, int(port))
        except OSError as error:
            _refuse(error, host, port)
        self._key = _key(environ or {})
        self.link = f"http://{_for_people(host)}:{listener.getsockname()[1]}/?key={self._key}"
        # Used in the loop's thread.
        self._is_watching = False
        self._is_closed = False
        self._is_broken = False
        self._timer: Cancellable | None = None
        self._made_at = 0.0
        self._took_s = 0.0
        # Used in the server's thread.
        self._streams: dict[Stream, bool] = {}  # and whether it has received the full status
        self._shown: RunStatus | None = None
        self._newest: RunStatus | None = None  # set in the loop's thread
        self._server = HttpServer(
            listener,
            self._answer,
            name="tenax dashboard",
            limits=Limits(head_bytes=16_384, body_bytes=_MAX_BODY),
            client_limits=client_limits,
        )
        self._server.start()

    def close(self) -> None:
        """Send every browser the last status and close."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_watching:
            self._make_and_show()
        self._unwatch()
        self._server.soon(self._send_closed)
        self._server.stop()

    # --- in the loop's thread -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """A browser has connected."""
        if self._is_closed or self._is_broken:
            return
        if not self._is_watching:
            self._operators.watch(self._on_step)
            self._is_watching = True
        self._make_and_show()

    def _unwatch(self) -> None:
        """The last browser has disconnected (D1)."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_watching:
            self._operators.unwatch(self._on_step)
            self._is_watching = False

    def _on_step(self) -> None:
        if self._timer is None:
            pause_s = min(max(_MIN_PAUSE_S, self._took_s * _REST_PER_WORK), _MAX_PAUSE_S)
            now = self._loop.now()
            self._timer = self._loop.at(max(now + _COALESCE_S, self._made_at + pause_s), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._make_and_show()

    def _make_and_show(self) -> None:
        # CPU time, not wall time: on a busy host, longer pauses would only delay the page.
        begun_at = self._cpu_clock()
        try:
            self._newest = self._operators.status()
        except Exception as error:
            self._break(f"{type(error).__name__}: {error}")
            return
        self._made_at = self._loop.now()
        self._took_s = self._cpu_clock() - begun_at
        self._server.soon(self._show)

    def _break(self, why: str) -> None:
        """Stop updating after an error, which must never affect the run."""
        if not self._is_broken:
            self._is_broken = True
            self._unwatch()
            self._on_error(f"the dashboard stopped updating: {why}")

    def _ask(self, request: AnyRequest, later: DeferredResponse) -> None:
        def reply(value: Any, error: str) -> None:
            self._server.soon(lambda: later.respond(_made(_answered, (value, error))))

        self._in_loop(later, lambda: self._operators.submit(request, reply))

    def _in_loop(self, later: DeferredResponse, call: Callable[[], None]) -> None:
        """Call a function in the loop's thread. An exception becomes the answer."""

        def do() -> None:
            try:
                call()
            except Exception as error:
                later.respond(text(INTERNAL_ERROR, f"{type(error).__name__}: {error}".partition("\n")[0]))

        self._loop.soon(do)

    def _with_status(self, make: Callable[[RunStatus], Response]) -> DeferredResponse:
        from tenax._core.requests import StatusRequest

        later = DeferredResponse(_ANSWER_S)

        def give() -> None:
            # A request shares recent statuses (D2). The response is built in the server's thread.
            self._operators.submit(StatusRequest(), reply)

        def reply(status: Any, error: str) -> None:
            found = text(INTERNAL_ERROR, error) if error else None
            self._server.soon(lambda: later.respond(found or _made(make, status)))

        self._in_loop(later, give)
        return later

    # --- in the server's thread ---------------------------------------------------------------------------------------

    def _answer(self, request: Request) -> Response | DeferredResponse | Stream:
        answer = self._answered(request)
        if isinstance(answer, Response):
            return msgspec.structs.replace(answer, headers={**HEADERS, **answer.headers})
        return answer

    def _answered(self, request: Request) -> Response | DeferredResponse | Stream:
        path = request.path
        if request.method not in (("POST",) if path == "/do" else ("GET", "HEAD")):
            allowed = "POST" if path == "/do" else "GET, HEAD"
            return text(METHOD_NOT_ALLOWED, f"method not allowed; use {allowed.replace(', ', ' or ')}", Allow=allowed)
        if path != "/" and path in PAGES:  # the same for every run
            return PAGES[path]()
        if path == "/do":
            return self._do(request)
        if not self._has_key(request, anywhere=True):
            message = "the key is missing or wrong; open the link that tenax printed, including ?key="
            return text(FORBIDDEN, message)
        match path:
            case "/":
                return PAGES["/"]()
            case "/events":
                return (
                    self._stream()
                    if request.method == "GET"
                    else text(METHOD_NOT_ALLOWED, "method not allowed; use GET", Allow="GET")
                )
            case "/status.json":
                return self._with_status(lambda status: json(OK, status))
            case "/metrics":
                return self._metrics()
            case "/logs":
                return self._logs(request)
        return text(NOT_FOUND, "not found; available: /, /status.json and /metrics")

    def _has_key(self, request: Request, *, anywhere: bool) -> bool:
        given = [request.headers.get(_KEY_HEADER, "")]
        if anywhere:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            given += [request.params.get("key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        return any([hmac.compare_digest(each.encode(), self._key.encode()) for each in given])

    def _do(self, request: Request) -> Response | DeferredResponse:
        from tenax._core.requests import DrainRequest, RestartRequest, StopRequest

        if not self._has_key(request, anywhere=False):
            return text(
                FORBIDDEN, "the key is missing or wrong; requests that change the run need it in the header X-Tenax-Key"
            )
        try:
            action = msgspec.json.decode(request.body, type=_Action)
        except DECODE_ERRORS as error:
            return text(BAD_REQUEST, f'invalid body; expected JSON such as {{"do": "restart"}}: {error}')
        later = DeferredResponse(_ANSWER_S)
        match action:
            case _Action("drain", node) if node:
                self._ask(DrainRequest(node, _FROM_DASHBOARD), later)
            case _Action("restart"):
                self._ask(RestartRequest(_FROM_DASHBOARD), later)
            case _Action("stop"):
                self._ask(StopRequest(_FROM_DASHBOARD), later)
            case _:
                return text(BAD_REQUEST, "unknown action; expected 'restart', 'stop', or 'drain' with a 'node'")
        return later

    def _logs(self, request: Request) -> Response | DeferredResponse:
        from tenax._core.requests import LogsRequest

        given = request.params
        try:
            wanted = LogsRequest(
                given.get("node", ""),
                local_rank=int(given.get("local_rank", "-1")),
                generation=int(given.get("generation", "0")),
                stream=given.get("stream", ""),
                cursor=given.get("cursor", ""),
                last=min(max(int(given.get("last", "200")), 1), _MAX_LINES),
                wait_s=max(0.0, min(float(given.get("wait_s", "0")), _MAX_WAIT_S)),  # in this order: NaN becomes 0
            )
        except ValueError as error:
            return text(BAD_REQUEST, f"invalid number: {error}")
        later = DeferredResponse(wanted.wait_s + _ANSWER_S)
        self._ask(wanted, later)
        return later

    def _metrics(self) -> DeferredResponse:
        from tenax._observe.metrics_page import CONTENT_TYPE, render

        return self._with_status(lambda status: Response(OK, render(status).encode(), CONTENT_TYPE))

    def _stream(self) -> Stream:
        stream = Stream(self._forget, headers={**HEADERS, **_UNBUFFERED}, heartbeat=event("heartbeat", b"1"))
        self._streams[stream] = False
        stream.send(b"retry: 1000\n\n")
        self._loop.soon(self._watch)
        return stream

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream, None)
        if not self._streams:
            self._shown = None
            self._loop.soon(self._unwatch_if_unused)

    def _unwatch_if_unused(self) -> None:
        if not self._streams:  # a browser that connected meanwhile has queued _watch after this call
            self._unwatch()

    def _show(self) -> None:
        try:
            self._send_changes()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._loop.soon(lambda: self._break(why))

    def _send_changes(self) -> None:
        """Send the newest status: in full to new streams, as a change to the others."""
        status, self._newest = self._newest, None
        if status is None or not self._streams:
            return
        difference = None if self._shown is None else feed.change(self._shown, status)
        self._shown = status
        new = event("change", feed.encoded(difference)) if difference is not None else b""
        everything = b""
        for stream, has_whole in list(self._streams.items()):
            if not has_whole:
                everything = everything or event("whole", feed.whole(status))
                self._streams[stream] = True  # before sending, which removes a stream that is closed
                stream.send(everything)
            elif new:
                stream.send(new)

    def _send_closed(self) -> None:
        for stream in list(self._streams):
            stream.send(event("closed", b"{}"))


def _answered(found: tuple[Any, str]) -> Response:
    value, error = found
    return json(CONFLICT, {"error": error}) if error else json(OK, {"value": value})


def _made(make: Callable[[Any], Response], of: Any) -> Response:
    try:
        made = make(of)
    except Exception as error:
        return text(INTERNAL_ERROR, f"{type(error).__name__}: {error}".partition("\n")[0])
    return msgspec.structs.replace(made, headers={**HEADERS, **made.headers})


def _for_people(host: str) -> str:
    """Return the host for a link. A wildcard address becomes the host's name."""
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - the user chose it
        import socket

        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _refuse(error: OSError, host: str, port: str) -> NoReturn:
    where = f"port {port}" + (f" of {host}" if host else "")
    if error.errno == errno.EADDRINUSE:
        message = f"{where} is already in use; choose another, or omit it for any free port"
    elif error.errno == errno.EACCES:
        message = f"{where} needs root privileges; choose one above 1023"
    elif error.errno == errno.EADDRNOTAVAIL:
        message = f"{host} is not an address of this host; choose one that is, or omit it for the loopback address"
    else:
        message = f"could not listen on {where}: {error.strerror or error}"
    raise OSError(error.errno, message) from error
