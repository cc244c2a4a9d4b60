"""A worker that is a Python function: how it gets the function, and how its return value comes home.

The agent writes the function and its arguments into an anonymous file that only the worker inherits; the worker writes
its return value into another. Files, not pipes: a result of any size never blocks anybody, and a worker that dies
in the middle leaves a file that is visibly incomplete. Nobody else can open either of them, which is why they may
hold pickles.

Ends, all defined: the function returns (its value), raises (failure with the exception), calls ``sys.exit(n)`` (that
code; 0 means success with None), calls ``os._exit`` or is killed (that code or signal), returns something that
cannot be pickled (failure that says so).

A worker whose function has returned does not exit until the functions of all workers of its node have
(``ReturnBarrier``): a process that exits closes its connections, and a peer may still use them.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

PAYLOAD_DESCRIPTOR, RESULT_DESCRIPTOR, BARRIER_DESCRIPTOR, FIRST_FREE_DESCRIPTOR = 3, 4, 5, 6
ANY_RESULT_DESCRIPTOR, ANY_BARRIER_DESCRIPTOR = -1, -2  # in a Launch: wherever there is room
_LENGTH = struct.Struct("<Q")


class ResultUnreadable(Exception):
    """The worker ended well, but what it returned cannot be read here."""


# --- the agent's side -------------------------------------------------------------------------------------------------


def anonymous_file(name: str) -> int:
    """A file without a name that others could open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    import tempfile

    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())


class ReturnBarrier:
    """Keeps the function workers of one generation alive until all of their functions have returned.

    A socket that all of them inherit. It holds one byte for each worker but one. A worker that returns takes a byte and
    waits until the socket is shut down; the worker that finds none left is the last and shuts it down. The agent takes
    a byte for a worker that exits with 0 without returning, and opens the barrier when a worker fails, when workers are
    stopped, and, by its own end, when it dies. So a worker waits only while another one of its node runs.
    """

    def __init__(self, workers: int) -> None:
        import socket

        self._ours, self._theirs = socket.socketpair()
        self._ours.sendall(bytes(workers - 1))

    @property
    def descriptor(self) -> int:
        """The end that workers inherit."""
        return self._theirs.fileno()

    def arrive(self) -> None:
        """Count a worker that has ended as returned."""
        _take_ticket(self._theirs)

    def open(self) -> None:
        """Let all workers exit."""
        _shut_down(self._ours)

    def close(self) -> None:
        self.open()
        self._ours.close()
        self._theirs.close()


def write_payload(
    descriptor: int, wrap: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...], start_method: str
) -> dict[int, int]:
    """Pickle the function for a fresh interpreter. Returns further descriptors that the arguments need: number -> ours.

    What the worker starts with multiprocessing is started in the same way as the worker was.

    Uses multiprocessing's own pickler and preparation, so that whatever may be handed to a ``multiprocessing.Process``
    (locks, queues, pipes, functions of ``__main__``) may be handed to a worker.
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
    """What multiprocessing asks of the process that is being started."""

    def __init__(self) -> None:
        from multiprocessing import popen_spawn_posix

        self.DupFd = popen_spawn_posix._DupFd  # how an argument finds its descriptor there
        self.descriptors: dict[int, int] = {}

    def duplicate_for_child(self, descriptor: int) -> int:
        # In the worker it gets a number of its own, above those that we use ourselves.
        number = FIRST_FREE_DESCRIPTOR + len(self.descriptors) + 64
        self.descriptors[number] = descriptor
        return number


def has_result(descriptor: int) -> bool:
    """Return whether the worker returned, or began to hand over what it returned."""
    return os.fstat(descriptor).st_size > 0


def read_result(descriptor: int) -> Any:
    """What the worker returned; None if it exited without returning. Raises ResultUnreadable."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return None
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb", closefd=False) as file:
        header = file.read(_LENGTH.size)
        if len(header) < _LENGTH.size or size != _LENGTH.size + _LENGTH.unpack(header)[0]:
            raise ResultUnreadable("the worker ended while it was handing over its return value")
        try:
            return pickle.load(file)  # noqa: S301 - written by our own worker into a file that only it and we hold
        except Exception as error:
            raise ResultUnreadable(
                f"its return value cannot be unpickled here: {type(error).__name__}: {error}"
            ) from error


# --- the worker's side ------------------------------------------------------------------------------------------------


def main() -> None:
    """Entry of a spawned worker: a fresh interpreter. Does not return.

    The interpreter is not torn down. Native threads that need it (torch's, of a process group that was not destroyed)
    would abort the process, and the run would fail after all work was done.
    """
    _end_process(lambda: _run_payload(PAYLOAD_DESCRIPTOR), flush=_flush_open_files)


def run_forked(spec: dict[str, Any]) -> None:  # noqa: ARG001 - the payload says it all
    """Entry of a worker forked from the fork server. Does not return."""
    end_like_a_program(lambda: _run_payload(PAYLOAD_DESCRIPTOR))


def _run_payload(descriptor: int) -> None:
    from multiprocessing import resource_tracker, spawn

    _answer_for_torchelastic()  # before the user's module is imported
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb") as file:
        preparation, tracker = pickle.load(file)  # noqa: S301 - written by our own agent into a file that only we hold
        if tracker is not None:
            resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
        spawn.prepare(preparation)
        try:
            wrap, function, args = pickle.load(file)  # noqa: S301 - as above
        except AttributeError as error:
            raise RuntimeError(
                f"what this worker should run cannot be found in a fresh interpreter ({error}); define it at the top "
                "of its module, and put the code that starts the run under: if __name__ == '__main__':"
            ) from error
    os.set_inheritable(RESULT_DESCRIPTOR, False)
    os.set_inheritable(BARRIER_DESCRIPTOR, False)
    deliver(wrap, function, args, RESULT_DESCRIPTOR, BARRIER_DESCRIPTOR)


def _answer_for_torchelastic() -> None:
    """A fresh interpreter has done it already (see ``tenax.compat``), but the fork server cannot have."""
    if os.environ.get("TENAX_COMPAT", "0") != "0":
        import tenax.compat  # noqa: F401


def _prepare_stacks() -> None:
    """Where the agent watches the scopes of its workers."""
    if "TENAX_STACKS_SIGNAL" in os.environ:
        from tenax._processes.stacks import prepare

        prepare(os.environ)


def deliver(
    wrap: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...], result: int, barrier: int
) -> None:
    """Call the function, hand over what it returns, and wait for the other workers of this node.

    ``wrap`` records what goes wrong, here or in the function.
    """
    _prepare_stacks()

    def call_and_hand_over() -> None:
        value = function(*args)
        try:
            data = pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"the return value of {getattr(function, '__qualname__', function)!s} is a {type(value).__name__} "
                f"that cannot be pickled ({error}); return plain data instead"
            ) from error
        _write_result(result, data)

    wrap(call_and_hand_over)()
    if not has_result(result):  # it called sys.exit(0), which counts as a return
        _write_result(result, pickle.dumps(None))
    _flush()
    _wait_for_others(barrier)


def _write_result(descriptor: int, data: bytes) -> None:
    _write_all(descriptor, _LENGTH.pack(len(data)))
    _write_all(descriptor, data)


def _wait_for_others(descriptor: int) -> None:
    """Wait until the functions of all workers of this node have returned."""
    import select
    import socket

    with socket.socket(fileno=descriptor) as barrier, suppress(KeyboardInterrupt):  # interrupted: exit now
        _take_ticket(barrier)
        until_hangup = select.poll()
        until_hangup.register(barrier, 0)
        until_hangup.poll()


def _take_ticket(barrier: socket.socket) -> None:
    import socket

    try:
        barrier.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:  # all the others have returned
        _shut_down(barrier)


def _shut_down(barrier: socket.socket) -> None:
    import socket

    with suppress(OSError):  # another process has shut it down at the same moment
        barrier.shutdown(socket.SHUT_RDWR)


def end_like_a_program(body: Callable[[], None]) -> None:
    """Run ``body`` in a forked process as if it were a program of its own. Does not return.

    Exit codes and tracebacks are a program's; threads and what was registered for the exit have their time; streams
    are flushed. What the process that was forked had registered is not run.
    """
    _end_process(body, begin=_begin_anew)


def _end_process(
    body: Callable[[], None], *, begin: Callable[[], None] = lambda: None, flush: Callable[[], None] = lambda: None
) -> None:
    code = 1
    try:
        begin()
        code = _code_of(body)
        _wind_up()
        flush()
    except BaseException:  # of a thread pool or an exit handler: shown, and no failure of the function
        sys.excepthook(*sys.exc_info())
    finally:
        _flush()
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def _begin_anew() -> None:
    """Forget what belongs to the process that was forked."""
    import atexit
    from multiprocessing import util

    _speak_for_ourselves()
    atexit._clear()
    atexit.register(util._exit_function)  # type: ignore[attr-defined]  # queues hand over what was put into them
    util._run_after_forkers()  # type: ignore[attr-defined]
    pools = sys.modules.get("concurrent.futures.thread")
    if pools is not None:  # their threads did not come along; nobody should wait for them
        pools._threads_queues.clear()


def _wind_up() -> None:
    """Wait for our threads, then run what was registered for the end."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _speak_for_ourselves() -> None:
    """What is printed goes to this process's own streams, also when the host had put something else in their place."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        try:
            if getattr(sys, name).fileno() == number:
                continue
        except (AttributeError, OSError, ValueError):  # there was none, or it is no file (a notebook, a test)
            pass
        errors = "strict" if number == 1 else "backslashreplace"
        own = open(number, "w", buffering=1, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115 - stays open
        setattr(sys, name, own)


def _code_of(body: Callable[[], None]) -> int:
    """Negative: the signal by which a program ends itself after such an exception."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what came while this process was being made
        body()
    except SystemExit as exit_request:
        return _exit_code(exit_request.code)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):  # nobody reads it any more, or it was closed
                stream.flush()


def _flush_open_files() -> None:
    """Write what is still in the buffers of files that were not closed, as the end of an interpreter does."""
    import gc
    import io

    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):  # the outer buffers first
        for file in gc.get_objects():
            if type(file) is kind:
                with suppress(OSError, ValueError):  # nobody reads it any more, or it was closed
                    file.flush()


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
