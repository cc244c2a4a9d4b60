"""The live page: serves what the coordinator knows to browsers, for as long as the coordinator is here.

    loop's thread      the desk: a status is made when something has happened and somebody watches, and requests go in
    server's thread    HTTP: what has changed is found, written down and sent

Laws (tests cite the numbers):

D1  With nobody watching, nothing is computed.
D2  What the page costs the loop is a small share of its time, however large the run and however much happens: the
    longer a status takes to make, the longer the next one waits.
D3  Nobody sees or does anything without the key, which is in the link. What changes the run needs it in a header, which
    no other page can make a browser send.
D4  A browser that takes nothing any more loses its stream, and can come back.
"""

from __future__ import annotations

import errno
import hmac
import os
import time

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._io.http.deferred import Later
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
from tenax._io.http.server import HttpServer, Patience
from tenax._io.http.stream import Stream, event
from tenax._io.listen import listen
from tenax._observe.dashboard import feed
from tenax._observe.dashboard.files import HEADERS, PAGES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn

    from tenax._core.requests import AnyRequest
    from tenax._io.ports import Cancellable, EventLoop, OperatorApi
    from tenax._view.status import RunStatus

_SOONEST_S = 0.03  # what happens together is shown together
_BETWEEN_S = 0.1  # two statuses, at least
_REST_PER_WORK = 40  # so many times as long as a status took to make, the next one waits (D2) ...
_MAX_BETWEEN_S = 0.7  # ... but nobody waits longer than that
_ANSWER_S = 30.0  # how long a node, or the loop, may take to answer
_MAX_WAIT_S = 20.0  # for new lines
_MAX_LINES = 1000
_KEY_BYTES = 18
KEY_VARIABLE = "TENAX_DASHBOARD_KEY"
_LEAST_KEY = 16
_MAX_BODY = 4096
_KEY_HEADER = "x-tenax-key"
_UNBUFFERED = {"X-Accel-Buffering": "no"}  # for a proxy on the way: each event is due now
_FROM_THE_PAGE = "asked for on the page"


class _Wish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a POST."""

    do: str  # "drain", "restart" or "stop"
    node: str = ""  # which to drain


def _key(environ: Mapping[str, str]) -> str:
    """A new one for every page, or the one that is given: for a Prometheus that must know it in advance."""
    given = environ.get(KEY_VARIABLE, "")
    if not given:
        return os.urandom(_KEY_BYTES).hex()
    if len(given) < _LEAST_KEY or not all(each.isalnum() or each in "-_" for each in given):
        raise OSError(0, f"{KEY_VARIABLE} must have at least {_LEAST_KEY} letters, digits, '-' or '_'")
    return given


class Dashboard:
    """Opens at once, at HOST:PORT (port 0: any that is free), or raises OSError with a sentence.

    ``desk`` is used in the loop's thread alone. ``complain`` is told, there too, what is lost.
    """

    def __init__(
        self,
        address: str,
        desk: OperatorApi,
        loop: EventLoop,
        complain: Callable[[str], None],
        *,
        patience: Patience = Patience(connections=96),  # noqa: B008 - frozen
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._desk = desk
        self._loop = loop
        self._complain = complain
        self._cpu_clock = cpu_clock
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            listener = listen(host, int(port))
        except OSError as error:
            _refuse(error, host, port)
        self._key = _key(os.environ)
        self.link = f"http://{_for_people(host)}:{listener.getsockname()[1]}/?key={self._key}"
        # In the loop's thread.
        self._is_watching = False
        self._is_closed = False
        self._is_broken = False
        self._timer: Cancellable | None = None
        self._made_at = 0.0
        self._took_s = 0.0
        # In the server's.
        self._streams: dict[Stream, bool] = {}  # and whether it has had the whole
        self._shown: RunStatus | None = None
        self._newest: RunStatus | None = None  # written by the loop's
        self._server = HttpServer(
            listener,
            self._answer,
            name="tenax page",
            limits=Limits(head_bytes=16_384, body_bytes=_MAX_BODY),
            patience=patience,
        )
        self._server.start()

    def close(self) -> None:
        """Tell every browser how it ended, and hang up."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_watching:
            self._make_and_show()
        self._rest()
        self._server.soon(self._say_farewell)
        self._server.stop()

    # --- in the loop's thread -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Somebody has come."""
        if self._is_closed or self._is_broken:
            return
        if not self._is_watching:
            self._desk.watch(self._on_step)
            self._is_watching = True
        self._make_and_show()

    def _rest(self) -> None:
        """Nobody is left (D1)."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_watching:
            self._desk.unwatch(self._on_step)
            self._is_watching = False

    def _on_step(self) -> None:
        if self._timer is None:
            pause_s = min(max(_BETWEEN_S, self._took_s * _REST_PER_WORK), _MAX_BETWEEN_S)
            now = self._loop.now()
            self._timer = self._loop.at(max(now + _SOONEST_S, self._made_at + pause_s), self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._make_and_show()

    def _make_and_show(self) -> None:
        # Work, not time: on a machine with too much to do, a page that waits for longer shows nothing sooner.
        begun_at = self._cpu_clock()
        try:
            self._newest = self._desk.status()
        except Exception as error:
            self._break(f"{type(error).__name__}: {error}")
            return
        self._made_at = self._loop.now()
        self._took_s = self._cpu_clock() - begun_at
        self._server.soon(self._show)

    def _break(self, why: str) -> None:
        """A page that cannot be made must never end a run."""
        if not self._is_broken:
            self._is_broken = True
            self._rest()
            self._complain(f"the page shows nothing new any more: {why}")

    def _ask(self, request: AnyRequest, later: Later) -> None:
        def reply(value: Any, error: str) -> None:
            self._server.soon(lambda: later.give(_made(_answered, (value, error))))

        self._in_loop(later, lambda: self._desk.ask(request, reply))

    def _in_loop(self, later: Later, call: Callable[[], None]) -> None:
        """From the server's thread. What it raises is an answer."""

        def do() -> None:
            try:
                call()
            except Exception as error:
                later.give(text(INTERNAL_ERROR, f"{type(error).__name__}: {error}".partition("\n")[0]))

        self._loop.soon(do)

    def _with_status(self, make: Callable[[RunStatus], Response]) -> Later:
        from tenax._core.requests import StatusRequest

        later = Later(_ANSWER_S)

        def give() -> None:
            # Not a new one for everybody who asks (D2). What is made of it is made in the server's thread.
            self._desk.ask(StatusRequest(), reply)

        def reply(status: Any, error: str) -> None:
            found = text(INTERNAL_ERROR, error) if error else None
            self._server.soon(lambda: later.give(found or _made(make, status)))

        self._in_loop(later, give)
        return later

    # --- in the server's thread ---------------------------------------------------------------------------------------

    def _answer(self, request: Request) -> Response | Later | Stream:
        answer = self._answered(request)
        if isinstance(answer, Response):
            return msgspec.structs.replace(answer, headers={**HEADERS, **answer.headers})
        return answer

    def _answered(self, request: Request) -> Response | Later | Stream:
        path = request.path
        if request.method not in (("POST",) if path == "/do" else ("GET", "HEAD")):
            allowed = "POST" if path == "/do" else "GET, HEAD"
            return text(METHOD_NOT_ALLOWED, f"only {allowed.replace(', ', ' and ')} is answered here", Allow=allowed)
        if path != "/" and path in PAGES:  # the same for every run
            return PAGES[path]()
        if path == "/do":
            return self._do(request)
        if not self._has_key(request, anywhere=True):
            sentence = "this page needs the key of the run: open the link that tenax printed, with its ?key="
            return text(FORBIDDEN, sentence)
        match path:
            case "/":
                return PAGES["/"]()
            case "/events":
                return self._stream() if request.method == "GET" else text(METHOD_NOT_ALLOWED, "only GET", Allow="GET")
            case "/status.json":
                return self._with_status(lambda status: json(OK, status))
            case "/metrics":
                return self._metrics()
            case "/logs":
                return self._logs(request)
        return text(NOT_FOUND, "there are /, /status.json and /metrics")

    def _has_key(self, request: Request, *, anywhere: bool) -> bool:
        given = [request.headers.get(_KEY_HEADER, "")]
        if anywhere:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            given += [request.params.get("key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        return any([hmac.compare_digest(each.encode(), self._key.encode()) for each in given])

    def _do(self, request: Request) -> Response | Later:
        from tenax._core.requests import DrainRequest, RestartRequest, StopRequest

        if not self._has_key(request, anywhere=False):
            return text(FORBIDDEN, "what changes the run needs the key of its link in the header X-Tenax-Key")
        try:
            wish = msgspec.json.decode(request.body, type=_Wish)
        except DECODE_ERRORS as error:
            return text(BAD_REQUEST, f"the body is no wish, such as {{'do': 'restart'}}: {error}")
        later = Later(_ANSWER_S)
        match wish:
            case _Wish("drain", node) if node:
                self._ask(DrainRequest(node, _FROM_THE_PAGE), later)
            case _Wish("restart"):
                self._ask(RestartRequest(_FROM_THE_PAGE), later)
            case _Wish("stop"):
                self._ask(StopRequest(_FROM_THE_PAGE), later)
            case _:
                return text(BAD_REQUEST, "one can wish for 'restart', 'stop', or 'drain' with a 'node'")
        return later

    def _logs(self, request: Request) -> Response | Later:
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
            return text(BAD_REQUEST, f"a number was expected: {error}")
        later = Later(wanted.wait_s + _ANSWER_S)
        self._ask(wanted, later)
        return later

    def _metrics(self) -> Later:
        from tenax._observe.metrics_page import CONTENT_TYPE, render

        return self._with_status(lambda status: Response(OK, render(status).encode(), CONTENT_TYPE))

    def _stream(self) -> Stream:
        stream = Stream(self._forget, headers={**HEADERS, **_UNBUFFERED}, heartbeat=event("beat", b"1"))
        self._streams[stream] = False
        stream.say(b"retry: 1000\n\n")
        self._loop.soon(self._watch)
        return stream

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream, None)
        if not self._streams:
            self._shown = None
            self._loop.soon(self._rest_if_alone)

    def _rest_if_alone(self) -> None:
        if not self._streams:  # somebody may have come meanwhile: that one's own call comes behind this one
            self._rest()

    def _show(self) -> None:
        try:
            self._tell_streams()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._loop.soon(lambda: self._break(why))

    def _tell_streams(self) -> None:
        """What is new in the newest status."""
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
                self._streams[stream] = True  # before it is said: one that cannot be reached is forgotten then
                stream.say(everything)
            elif new:
                stream.say(new)

    def _say_farewell(self) -> None:
        for stream in list(self._streams):
            stream.say(event("farewell", b"{}"))


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
    """Where a browser finds it. All addresses of this host are called by its name."""
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - asked for
        import socket

        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _refuse(error: OSError, host: str, port: str) -> NoReturn:
    where = f"port {port}" + (f" of {host}" if host else "")
    if error.errno == errno.EADDRINUSE:
        sentence = f"{where} is taken by another program; choose another, or none for any that is free"
    elif error.errno == errno.EACCES:
        sentence = f"{where} is not for everybody; choose one above 1023"
    elif error.errno == errno.EADDRNOTAVAIL:
        sentence = f"{host} is no address of this host; choose one that is, or none for the loopback address"
    else:
        sentence = f"{where} cannot be listened at: {error.strerror or error}"
    raise OSError(error.errno, sentence) from error
