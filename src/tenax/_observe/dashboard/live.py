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
import socket
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._core.requests import AnyRequest, DrainRequest, LogsRequest, RestartRequest, StatusRequest, StopRequest
from tenax._io.http import message as http
from tenax._io.http.server import ClientLimits, DeferredResponse, HttpServer, Stream, event
from tenax._io.interfaces import Cancellable, EventLoop, OperatorService
from tenax._io.listen import listen
from tenax._io.loop import NO_TIMER
from tenax._observe.dashboard.feed import change
from tenax._observe.metrics_page import render
from tenax._view.status import RunStatus
from tenax.metrics._prometheus import CONTENT_TYPE

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
_FROM_DASHBOARD = "requested on the dashboard"

# The pages contain no data of the run, which comes over the stream.
_PAGES = {
    "/": ("page.html", http.HTML),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_METHODS = {"/do": "POST", "/events": "GET"}  # of the other paths: GET, HEAD
# No external or inline content, and no text may become markup or script.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the URL contains the key
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class _Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a POST."""

    do: str  # "drain", "restart" or "stop"
    node: str = ""  # which to drain


@lru_cache(maxsize=8)
def _page(path: str) -> http.Response:
    name, content_type = _PAGES[path]
    return http.Response(http.OK, (Path(__file__).parent / name).read_bytes(), content_type)


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
        self._timer: Cancellable = NO_TIMER
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
            limits=http.Limits(head_bytes=16_384, body_bytes=_MAX_BODY),
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
        self._timer.cancel()
        self._timer = NO_TIMER
        if self._is_watching:
            self._operators.unwatch(self._on_step)
            self._is_watching = False

    def _on_step(self) -> None:
        if self._timer is NO_TIMER:
            pause_s = min(max(_MIN_PAUSE_S, self._took_s * _REST_PER_WORK), _MAX_PAUSE_S)
            now = self._loop.now()
            self._timer = self._loop.at(max(now + _COALESCE_S, self._made_at + pause_s), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = NO_TIMER
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

    # --- in the server's thread ---------------------------------------------------------------------------------------

    def _ask(
        self, request: AnyRequest, make: Callable[[Any, str], http.Response], timeout_s: float = _ANSWER_S
    ) -> DeferredResponse:
        """Submit a request in the loop's thread. ``make`` gets its value and error, in the server's thread."""
        later = DeferredResponse(timeout_s)

        def submit() -> None:
            try:
                self._operators.submit(request, reply)
            except Exception as error:
                later.respond(_internal_error(error))

        def reply(value: Any, error: str) -> None:
            self._server.soon(lambda: respond(value, error))

        def respond(value: Any, error: str) -> None:
            try:
                made = make(value, error)
            except Exception as raised:
                made = _internal_error(raised)
            later.respond(_with_headers(made))

        self._loop.soon(submit)
        return later

    def _with_status(self, make: Callable[[RunStatus], http.Response]) -> DeferredResponse:
        """Answer with the status. A request shares recent ones (D2)."""
        return self._ask(
            StatusRequest(), lambda status, error: http.text(http.INTERNAL_ERROR, error) if error else make(status)
        )

    def _answer(self, request: http.Request) -> http.Response | DeferredResponse | Stream:
        answer = self._route(request)
        return _with_headers(answer) if isinstance(answer, http.Response) else answer

    def _route(self, request: http.Request) -> http.Response | DeferredResponse | Stream:
        path = request.path
        allowed = _METHODS.get(path, "GET, HEAD")
        if request.method not in allowed.split(", "):
            message = f"method not allowed; use {allowed.replace(', ', ' or ')}"
            return http.text(http.METHOD_NOT_ALLOWED, message, Allow=allowed)
        if path != "/" and path in _PAGES:  # the same for every run
            return _page(path)
        if path != "/do" and not self._has_key(request, anywhere=True):
            message = "the key is missing or wrong; open the link that tenax printed, including ?key="
            return http.text(http.FORBIDDEN, message)
        match path:
            case "/do":
                return self._do(request)
            case "/":
                return _page("/")
            case "/events":
                return self._stream()
            case "/status.json":
                return self._with_status(lambda status: http.json(http.OK, status))
            case "/metrics":
                return self._with_status(lambda status: http.Response(http.OK, render(status).encode(), CONTENT_TYPE))
            case "/logs":
                return self._logs(request)
        return http.text(http.NOT_FOUND, "not found; available: /, /status.json and /metrics")

    def _has_key(self, request: http.Request, *, anywhere: bool) -> bool:
        given = [request.headers.get(_KEY_HEADER, "")]
        if anywhere:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            given += [request.params.get("key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        return any([hmac.compare_digest(each.encode(), self._key.encode()) for each in given])

    def _do(self, request: http.Request) -> http.Response | DeferredResponse:
        if not self._has_key(request, anywhere=False):
            message = "the key is missing or wrong; requests that change the run need it in the header X-Tenax-Key"
            return http.text(http.FORBIDDEN, message)
        try:
            action = msgspec.json.decode(request.body, type=_Action)
        except DECODE_ERRORS as error:
            return http.text(http.BAD_REQUEST, f'invalid body; expected JSON such as {{"do": "restart"}}: {error}')
        match action:
            case _Action("drain", node) if node:
                return self._ask(DrainRequest(node, _FROM_DASHBOARD), _value_or_error)
            case _Action("restart"):
                return self._ask(RestartRequest(_FROM_DASHBOARD), _value_or_error)
            case _Action("stop"):
                return self._ask(StopRequest(_FROM_DASHBOARD), _value_or_error)
        return http.text(http.BAD_REQUEST, "unknown action; expected 'restart', 'stop', or 'drain' with a 'node'")

    def _logs(self, request: http.Request) -> http.Response | DeferredResponse:
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
            return http.text(http.BAD_REQUEST, f"invalid number: {error}")
        return self._ask(wanted, _value_or_error, wanted.wait_s + _ANSWER_S)

    def _stream(self) -> Stream:
        headers = {**_HEADERS, "X-Accel-Buffering": "no"}  # proxies must not delay events
        stream = Stream(self._forget, headers=headers, heartbeat=event("heartbeat", b"1"))
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
        difference = None if self._shown is None else change(self._shown, status)
        self._shown = status
        new = event("change", http.as_json(difference)) if difference is not None else b""
        everything = b""
        for stream, has_whole in list(self._streams.items()):
            if not has_whole:
                everything = everything or event("whole", http.as_json(status))
                self._streams[stream] = True  # before sending, which removes a stream that is closed
                stream.send(everything)
            elif new:
                stream.send(new)

    def _send_closed(self) -> None:
        for stream in list(self._streams):
            stream.send(event("closed", b"{}"))


def _value_or_error(value: Any, error: str) -> http.Response:
    return http.json(http.CONFLICT, {"error": error}) if error else http.json(http.OK, {"value": value})


def _with_headers(response: http.Response) -> http.Response:
    return msgspec.structs.replace(response, headers={**_HEADERS, **response.headers})


def _internal_error(error: Exception) -> http.Response:
    return http.text(http.INTERNAL_ERROR, f"{type(error).__name__}: {error}".partition("\n")[0])


def _for_people(host: str) -> str:
    """Return the host for a link. A wildcard address becomes the host's name."""
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - the user chose it
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
