"""Runs in a worker's interpreter before the user's first line: an uncaught exception is written to the error file.

So the report knows the exception and the moment it was raised without any annotation in the user's code, also when the
process then hangs on its way out and has to be ended by us. The law of this file: it depends on nothing but the
standard library (the worker may run another Python than the agent), costs nothing until something goes wrong, leaves no
trace in the environment of the worker or of what the worker starts, and can never be the reason that a worker fails.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType


def _leave_no_trace() -> bool:
    """Put PYTHONPATH and the import path back: children of the worker are not ours to watch. Was this meant for us?"""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != here]
    mark = os.environ.pop("TENAX_RECORD_UNCAUGHT", None)
    if mark is None:
        return False
    if mark == "unset":
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = mark[1:]
    return True


def _run_the_real_one() -> None:
    """We stood in front of the environment's own sitecustomize, if it has one."""
    ours = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


def _install(path: str) -> None:
    before = sys.excepthook
    own_pid = os.getpid()

    def record_and_show(kind: "type[BaseException]", error: BaseException, trace: "TracebackType | None") -> None:
        try:
            # Not KeyboardInterrupt and the like, and not for a fork that inherited this hook.
            if issubclass(kind, Exception) and os.getpid() == own_pid:
                _write(path, kind, error, trace)
        finally:
            before(kind, error, trace)

    sys.excepthook = record_and_show


def _show_stacks_at_signal(mark: str, path: str) -> None:
    """Where all threads are, written at a signal by C code: also when the interpreter itself is stuck."""
    try:
        import faulthandler

        # The file stays open for as long as this process is this program; its children do not have it.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        file = os.open(os.path.join(os.path.dirname(path), "stacks.txt"), flags, 0o666) if path else 2
        faulthandler.register(int(mark), file, all_threads=True)
        # It tells no more than the newest hundred threads. The main thread is the oldest, and takes the signals.
        faulthandler.register(int(mark) + 1, file, all_threads=False)
    except BaseException:  # noqa: S110 - a full disk, a Python without it: the report will say that there are none
        pass


def _write(path: str, kind: "type[BaseException]", error: BaseException, trace: "TracebackType | None") -> None:
    """In TorchElastic's format. Whole or not at all, and never over what is there: the first cause wins."""
    draft = f"{path}.{os.getpid()}.draft"
    try:
        import json
        import time
        import traceback

        now = time.time()
        said = traceback.format_exception_only(kind, error)
        message = said[-1] if issubclass(kind, SyntaxError) else "".join(said)  # that one begins with where it is
        text = "".join(traceback.format_exception(kind, error, trace))
        extra = {"py_callstack": text[-64000:], "timestamp": str(int(now)), "timestamp_s": now}
        data = {"message": {"message": message.strip()[:16000], "extraInfo": extra}}
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(data, file)
        _publish(draft, path)
    except BaseException:  # noqa: S110 - a full disk, a stranger's json.py: the traceback on stderr still tells
        pass
    finally:
        if os.path.exists(draft):
            os.unlink(draft)


def _publish(draft: str, path: str) -> None:
    try:
        os.link(draft, path)
    except FileExistsError:
        return
    except OSError:  # a file system without links
        if not os.path.exists(path):
            os.replace(draft, path)


if _leave_no_trace():
    _path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if _path:
        _install(_path)
    _mark = os.environ.pop("TENAX_STACKS_SIGNAL", None)
    if _mark:
        _show_stacks_at_signal(_mark, _path or "")
_run_the_real_one()
