"""Workers that run a Python function: how they receive the function and return its value.

The agent writes the function and its arguments into an anonymous file that only the worker inherits; the worker writes
its return value into another. Files, not pipes: a result of any size blocks neither side, and a worker that dies while
writing leaves a file that is visibly incomplete. No other process can open them, so they may hold pickles.

A function can end in these ways: it returns (its value), raises (failure with the exception), calls ``sys.exit(n)``
(that code; 0 means success with None), calls ``os._exit`` or is killed (that code or signal), or returns a value that
cannot be pickled (failure with that reason).

A worker whose function has returned does not exit until the functions of all workers of its node have
(``ReturnBarrier``): a process that exits closes its connections, and a peer may still use them.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PAYLOAD_DESCRIPTOR, RESULT_DESCRIPTOR, BARRIER_DESCRIPTOR, FIRST_FREE_DESCRIPTOR = 3, 4, 5, 6
ANY_RESULT_DESCRIPTOR, ANY_BARRIER_DESCRIPTOR = -1, -2  # in a Launch: any free number
_LENGTH = struct.Struct("<Q")


class ResultUnreadable(Exception):
    """The worker succeeded, but its return value cannot be read here."""


# --- the agent's side -------------------------------------------------------------------------------------------------


def anonymous_file(name: str) -> int:
    """Create a file without a name, which no other process can open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    import tempfile

    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())


class ReturnBarrier:
    """Keeps the function workers of one generation alive until all of their functions have returned.

    A socket that all of them inherit. It holds one byte for each worker but one. A worker that returns takes a byte and
    waits until the socket is shut down; the worker that finds none left is the last and shuts it down. The agent takes
    a byte for a worker that exits with 0 without returning, and opens the barrier when a worker fails and when workers
    are stopped; the agent's death opens it too. So a worker waits only while another worker of its node runs.
    """

    def __init__(self, workers: int) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.sendall(bytes(workers - 1))
        self.descriptor = self._theirs.fileno()  # workers inherit it

    def arrive(self) -> None:
        _take_ticket(self._theirs)

    def open(self) -> None:
        _shut_down(self._ours)

    def close(self) -> None:
        self.open()
        self._ours.close()
        self._theirs.close()


def write_payload(
    descriptor: int, wrap: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...], start_method: str
) -> dict[int, int]:
    """Pickle the function for a fresh interpreter.

    Return the further descriptors that the arguments need: the number in the worker to the one in this process.

    The worker's own multiprocessing uses the same start method. The pickler and preparation are multiprocessing's, so
    a worker takes whatever a ``multiprocessing.Process`` takes (locks, queues, pipes, functions of ``__main__``).
    """
    import io
    from multiprocessing import context, resource_tracker, spawn
    from multiprocessing.reduction import ForkingPickler

    needed = _NeededDescriptors()
    buffer = io.BytesIO()
    preparation = {**spawn.get_preparation_data("tenax-worker"), "start_method": start_method}
    tracker: int | None = getattr(resource_tracker._resource_tracker, "_fd", None)
    if tracker is not None:
        tracker = needed.duplicate_for_child(tracker)
    context.set_spawning_popen(needed)  # type: ignore[arg-type]
    try:
        ForkingPickler(buffer).dump((preparation, tracker))
        ForkingPickler(buffer).dump((wrap, function, args))
    finally:
        context.set_spawning_popen(None)
    _write_all(descriptor, buffer.getbuffer())
    return needed.descriptors


class _NeededDescriptors:
    """The interface that multiprocessing expects of a process being started."""

    def __init__(self) -> None:
        from multiprocessing import popen_spawn_posix

        self.DupFd = popen_spawn_posix._DupFd  # how an argument finds its descriptor there
        self.descriptors: dict[int, int] = {}

    def duplicate_for_child(self, descriptor: int) -> int:
        # Its number in the worker, above those that tenax uses.
        number = FIRST_FREE_DESCRIPTOR + len(self.descriptors) + 64
        self.descriptors[number] = descriptor
        return number


def has_result(descriptor: int) -> bool:
    """Return whether the worker wrote its return value, or began to."""
    return os.fstat(descriptor).st_size > 0


def read_result(descriptor: int) -> Any:
    """Return the worker's return value; None if it exited without returning. Raises ResultUnreadable."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return None
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb", closefd=False) as file:
        header = file.read(_LENGTH.size)
        if len(header) < _LENGTH.size or size != _LENGTH.size + _LENGTH.unpack(header)[0]:
            raise ResultUnreadable("the worker exited while writing its return value")
        try:
            return pickle.load(file)  # noqa: S301 - written by the worker into an anonymous file
        except Exception as error:
            raise ResultUnreadable(
                f"its return value cannot be unpickled in the agent: {type(error).__name__}: {error}"
            ) from error


# --- the worker's side ------------------------------------------------------------------------------------------------


def main() -> None:
    """Entry point of a spawned worker, a fresh interpreter. Does not return.

    Skips interpreter teardown: native threads that still need the interpreter (torch's, of a process group that was not
    destroyed) would abort the process, and the run would fail after its work was done.
    """
    exit_like_a_program(_run_payload, is_forked=False)


def run_forked(spec: dict[str, Any]) -> None:  # noqa: ARG001 - the payload is complete
    exit_like_a_program(_run_payload)


def _run_payload() -> None:
    from multiprocessing import resource_tracker, spawn

    # Redirect torch's elastic modules before the user's module is imported. The fork server has not done so.
    if os.environ.get("TENAX_COMPAT", "0") != "0":
        import tenax.compat  # noqa: F401
    os.lseek(PAYLOAD_DESCRIPTOR, 0, os.SEEK_SET)
    with open(PAYLOAD_DESCRIPTOR, "rb") as file:
        preparation, tracker = pickle.load(file)  # noqa: S301 - written by the agent into an anonymous file
        if tracker is not None:
            resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
        spawn.prepare(preparation)
        try:
            wrap, function, args = pickle.load(file)  # noqa: S301 - as above
        except AttributeError as error:
            raise RuntimeError(
                f"a fresh interpreter cannot import this worker's function ({error}); define it at the top level "
                "of its module, and put the code that starts the run under: if __name__ == '__main__':"
            ) from error
    os.set_inheritable(RESULT_DESCRIPTOR, False)
    os.set_inheritable(BARRIER_DESCRIPTOR, False)
    deliver(wrap, function, args, RESULT_DESCRIPTOR, BARRIER_DESCRIPTOR)


def deliver(
    wrap: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...], result: int, barrier: int
) -> None:
    """Call the function, write its return value, and wait for the other workers of this node.

    ``wrap`` records errors of the function and of this module.
    """
    if "TENAX_STACKS_SIGNAL" in os.environ:  # the agent requests stack dumps
        from tenax._processes.stacks import prepare

        prepare(os.environ)

    def call_and_write_result() -> None:
        value = function(*args)
        try:
            data = pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"the return value of {getattr(function, '__qualname__', function)!s} is a {type(value).__name__} "
                f"that cannot be pickled ({error}); return plain data"
            ) from error
        _write_result(result, data)

    wrap(call_and_write_result)()
    if not has_result(result):  # it called sys.exit(0), which counts as a return
        _write_result(result, pickle.dumps(None))
    _flush()
    _wait_for_others(barrier)


def _write_result(descriptor: int, data: bytes) -> None:
    _write_all(descriptor, _LENGTH.pack(len(data)))
    _write_all(descriptor, data)


def _wait_for_others(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as barrier, suppress(KeyboardInterrupt):  # interrupted: exit now
        _take_ticket(barrier)
        until_hangup = select.poll()
        until_hangup.register(barrier, 0)
        until_hangup.poll()


def _take_ticket(barrier: socket.socket) -> None:
    try:
        barrier.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:  # all the others have returned
        _shut_down(barrier)


def _shut_down(barrier: socket.socket) -> None:
    with suppress(OSError):  # another process shut it down at the same time
        barrier.shutdown(socket.SHUT_RDWR)


def exit_like_a_program(body: Callable[[], None], *, is_forked: bool = True) -> None:
    """Run ``body`` as if it were a program. Does not return.

    Exit codes and tracebacks are a program's; threads are joined, exit handlers run and streams flushed. Exit handlers
    that a forked process inherited from its parent do not run.
    """
    code = 1
    try:
        if is_forked:
            _reset_inherited_state()
        code = _run_for_exit_code(body)
        threading._shutdown()  # type: ignore[attr-defined]  # joins the threads
        atexit._run_exitfuncs()
        if not is_forked:
            _flush_open_files()
    except BaseException:  # of a thread pool or an exit handler: print it, but the function has not failed
        sys.excepthook(*sys.exc_info())
    finally:
        _flush()
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def _reset_inherited_state() -> None:
    """Drop state that belongs to the parent process."""
    from multiprocessing import util

    _restore_streams()
    atexit._clear()
    atexit.register(util._exit_function)  # type: ignore[attr-defined]  # flushes queues
    util._run_after_forkers()  # type: ignore[attr-defined]
    pools = sys.modules.get("concurrent.futures.thread")
    if pools is not None:  # their threads do not exist here, and must not be joined
        pools._threads_queues.clear()


def _restore_streams() -> None:
    """Point sys.stdout and sys.stderr at descriptors 1 and 2, should the parent have replaced them."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        with suppress(AttributeError, OSError, ValueError):  # none, or not a file (a notebook, a test)
            if getattr(sys, name).fileno() == number:
                continue
        errors = "strict" if number == 1 else "backslashreplace"
        own = open(number, "w", buffering=1, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115 - stays open
        setattr(sys, name, own)


def _run_for_exit_code(body: Callable[[], None]) -> int:
    """Return the exit code; negative: the signal with which a program kills itself after such an exception."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # deliver signals that arrived during the start
        body()
    except SystemExit as exit_request:
        code = exit_request.code
        if code is None or isinstance(code, int):
            return (code or 0) & 0xFF
        sys.stderr.write(f"{code}\n")
        return 1
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):  # the reader is gone, or it was closed
                stream.flush()


def _flush_open_files() -> None:
    """Flush the buffers of files that are still open, as interpreter teardown does."""
    import gc
    import io

    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):  # the outer buffers first
        for file in gc.get_objects():
            if type(file) is kind:
                with suppress(OSError, ValueError):  # the reader is gone, or it was closed
                    file.flush()


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
