"""``tenax ask SOCKET_OR_FOLDER [HANDLER]``: sends a request to one running worker, or to all workers of a folder."""

from __future__ import annotations

import http.client
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote, urlencode

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._core.text import format_seconds
from tenax._failures.exit_codes import FAILED, SUCCEEDED
from tenax.cli.command import parse_arguments
from tenax.cli.flags import UsageError, seconds
from tenax.cli.run import print_page, print_stderr
from tenax.control_plane._sockets import is_socket

ASK_USAGE = """\
usage: tenax ask [--timeout SECONDS] SOCKET_OR_FOLDER [HANDLER] [NAME=VALUE ...]

Query a running worker, or all workers of this host whose sockets are in a folder. The job must have been started with
TORCH_WORKER_SERVER_SOCKET=FOLDER, and its script must use tenax.control_plane.worker_main (or torch's).

  tenax ask /tmp/job                       list the handlers of the workers
  tenax ask /tmp/job ping                  check that they answer
  tenax ask /tmp/job status                rank, generation, step ...
  tenax ask /tmp/job dump_traceback        the stacks of all threads of all workers
  tenax ask /tmp/job/rank3 dump_traceback  ... of one worker
  tenax ask /tmp/job lower_rate factor=0.5 a handler that the script has registered

  --timeout SECONDS  how long to wait for an answer (default: 10)

Exit code 0: every worker answered. 1: some did not, or reported an error; each is named. 2: wrong usage.
"""

_TIMEOUT_S = 10.0
_MAX_BYTES = 64 << 20
_CUT_OFF = "the worker exited before it answered"


class Question(msgspec.Struct, frozen=True):
    path: str  # of a socket or a folder
    handler: str = ""  # empty: list the handlers
    params: tuple[tuple[str, str], ...] = ()
    timeout_s: float = _TIMEOUT_S


class Answer(msgspec.Struct, frozen=True):
    """One worker's answer, or why there is none."""

    is_good: bool
    text: str


def ask(argv: Sequence[str]) -> int:
    question = parse_question(argv)
    paths = sockets_at(question.path)
    # In parallel, so that a worker that does not answer does not delay the others.
    with ThreadPoolExecutor(min(len(paths), 64)) as pool:
        answers = list(pool.map(lambda path: ask_worker(path, question), paths))
    is_folder = os.path.isdir(question.path)
    page, errors = "", []
    for name, answer in zip(map(os.path.basename, paths), answers, strict=True):
        if answer.is_good:
            page += (f"== {name}\n" if is_folder else "") + answer.text.rstrip("\n") + "\n"
        else:
            errors.append(f"tenax ask: {name}: {answer.text.strip()}")
    printed = print_page(page)
    for error in errors:
        print_stderr(error)
    return printed or (FAILED if errors else SUCCEEDED)


def parse_question(argv: Sequence[str]) -> Question:
    arguments = parse_arguments(argv, values=("--timeout",))
    if not arguments.positional:
        raise UsageError("no socket or folder given")
    path, handler, *rest = [*arguments.positional, ""] if len(arguments.positional) == 1 else arguments.positional
    for arg in rest:
        if arg.find("=") < 1:
            raise UsageError(f"{arg!r} is not a parameter; write NAME=VALUE")
    if "=" in handler:
        raise UsageError(f"{handler!r} is not a handler; write the handler's name before its parameters")
    params = tuple((name, value) for name, _, value in (arg.partition("=") for arg in rest))
    timeout = arguments.values.get("--timeout")
    return Question(path, handler, params, seconds(timeout, "--timeout") if timeout else _TIMEOUT_S)


def sockets_at(path: str) -> list[str]:
    """Return the socket at this path, or the sockets in this folder by rank. Raises ``UsageError``."""
    if not os.path.lexists(path):
        raise UsageError(f"{path!r} does not exist; check that the job is running on this host")
    if not os.path.isdir(path):
        if not is_socket(path):
            raise UsageError(f"{path!r} is neither a socket nor a folder")
        return [path]
    try:
        names = os.listdir(path)
    except OSError as error:
        raise UsageError(f"could not read the folder {path!r}: {error.strerror}") from error
    sockets = [each for name in sorted(names, key=_sort_key) if is_socket(each := os.path.join(path, name))]
    if not sockets:
        raise UsageError(f"no worker sockets in {path!r}; the script must use tenax.control_plane.worker_main")
    return sockets


def _sort_key(name: str) -> tuple[str, int, str]:
    """Sort rank2 before rank10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0), name


def ask_worker(path: str, question: Question) -> Answer:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(question.timeout_s)
            sock.connect(path)
            connection = http.client.HTTPConnection("worker")
            connection.sock = sock
            target = f"/handler/{quote(question.handler, safe='')}"
            if question.params:
                target += f"?{urlencode(question.params)}"
            headers = {"Connection": "close", "Content-Length": "0"}
            connection.request("POST" if question.handler else "GET", target, headers=headers)
            response = connection.getresponse()
            text = response.read(_MAX_BYTES).decode("utf-8", "backslashreplace")
            is_cut_off = bool(response.length) and len(text) < _MAX_BYTES
    except TimeoutError:
        waited = f"no answer within {format_seconds(question.timeout_s)}"
        return Answer(False, f"{waited}; the worker may be in native code that holds the GIL, which py-spy can inspect")
    except ConnectionRefusedError:
        return Answer(False, "connection refused: the worker or its server has exited")
    except FileNotFoundError:
        return Answer(False, "the worker has exited")
    except (ConnectionResetError, BrokenPipeError, http.client.IncompleteRead):
        return Answer(False, _CUT_OFF)
    except (OSError, http.client.HTTPException) as error:
        return Answer(False, f"the request failed: {getattr(error, 'strerror', None) or repr(error)}")
    if is_cut_off:
        return Answer(False, _CUT_OFF)
    if response.status != http.client.OK:
        return Answer(False, text.strip() or f"HTTP status {response.status} {response.reason}")
    return Answer(True, text if question.handler else _listed(text))


def _listed(text: str) -> str:
    try:
        return "\n".join(msgspec.json.decode(text, type=list[str]))
    except DECODE_ERRORS:
        return text
