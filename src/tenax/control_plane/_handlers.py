"""Handlers: the queries that a worker answers, by name.

Three are built in: ``ping``, ``dump_traceback`` (the stack of every Python thread) and ``status`` (ranks, pid and
progress). ``status`` exposes no environment variable except those of the ranks. The script can register others; each
call of those runs in a thread of its own, and the number of concurrent calls of one handler is limited, so a handler
that hangs blocks only calls of itself.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tenax._io.http.message import INTERNAL_ERROR, NOT_FOUND, PLAIN, Request, Response, json, text

Handler = Callable[["HandlerRequest"], Any]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_NUMBERS = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "generation": "TENAX_GENERATION",
    "restarts": "TORCHELASTIC_RESTART_COUNT",
}


class HandlerRequest(msgspec.Struct, frozen=True):
    """What a handler gets: its name, the parameters ``name=value``, and the body."""

    name: str
    params: dict[str, str] = {}
    body: bytes = b""

    def get_param(self, name: str) -> str:
        """Return the parameter, or an empty string."""
        return self.params.get(name, "")


def register_handler(name: str, fn: Callable[[HandlerRequest], Any]) -> None:
    """Register ``fn(request)`` as the handler of the query ``name``.

    It returns text, bytes, None for an empty answer, or a value that can be encoded as JSON. An exception becomes the
    error of that answer and has no other effect. It runs in a thread of its own, beside the training. A second handler
    with the same name replaces the first.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"invalid handler name {name!r}; expected up to 100 letters, digits, '_', '-' and '.'")
    if name in _BUILT_IN:
        raise ValueError(f"the handler {name!r} is built in; choose another name")
    _registered[name] = fn


def report_step(step: int) -> None:
    """Report the progress of the training for ``status``. Cheap; call it after every step."""
    global _step  # noqa: PLW0603 - one training per process
    _step = (int(step), time.monotonic())


def handler_names() -> list[str]:
    """Return the names of all handlers, the built-in ones first."""
    return [*_BUILT_IN, *sorted(_registered)]


def call_handler(name: str, request: Request) -> Response:
    """Return the answer of a handler. An exception becomes an error response."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    fn = _registered.get(name)
    if fn is None:
        return text(NOT_FOUND, f"no handler {name!r}; available: {', '.join(handler_names())}")
    try:
        return _as_response(fn(HandlerRequest(name, request.params, request.body)))
    except BaseException as error:  # user code, and its exit() too; the client gets the error
        line = f"{type(error).__name__}: {error}".partition("\n")[0]
        return text(INTERNAL_ERROR, f"the handler {name!r} raised {line}")


def _as_response(answer: Any) -> Response:
    if answer is None:
        return Response()
    if isinstance(answer, Response):
        return answer
    if isinstance(answer, str):
        return Response(body=answer.encode("utf-8", "backslashreplace"), content_type=PLAIN)
    if isinstance(answer, bytes | bytearray | memoryview):
        return Response(body=bytes(answer), content_type="application/octet-stream")
    return json(200, answer)


# --- built in ---------------------------------------------------------------------------------------------------------


def _dump_traceback() -> Response:
    import traceback

    names = {thread.ident: thread for thread in threading.enumerate()}
    own = threading.get_ident()
    # The main thread first: it is the most interesting one.
    frames = sorted(sys._current_frames().items(), key=lambda each: each[0] != threading.main_thread().ident)
    parts = []
    for ident, frame in frames:
        if ident == own:
            continue  # the thread of this answer
        thread = names.get(ident)
        title = "thread not started by Python" if thread is None else f"thread {thread.name!r}"
        parts.append(f"{title} ({ident}), most recent call last:\n{''.join(traceback.format_stack(frame))}")
    return text(200, "\n".join(parts).rstrip("\n"))


def _status() -> Response:
    values: dict[str, Any] = {name: _number(variable) for name, variable in _NUMBERS.items()}
    (step, at), now = _step, time.monotonic()
    values |= {"pid": os.getpid(), "uptime_s": round(now - _began_at, 3), "step": step}
    values["seconds_since_step"] = None if at is None else round(now - at, 3)
    return json(200, values)


def _number(variable: str) -> int | None:
    written = os.environ.get(variable, "")
    return int(written) if written.isascii() and written.isdecimal() else None


_BUILT_IN: dict[str, Callable[[], Response]] = {
    "ping": lambda: Response(body=b"pong"),
    "dump_traceback": _dump_traceback,
    "status": _status,
}
_registered: dict[str, Handler] = {}
_step: tuple[int | None, float | None] = (None, None)
_began_at = time.monotonic()
