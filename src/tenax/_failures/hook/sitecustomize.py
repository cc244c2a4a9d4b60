"""Runs in a worker's interpreter before the user's first line, and writes an uncaught exception to the error file.

So the report has the exception and its time without any annotation in the user's code, even if the process then hangs
while exiting and has to be killed. It also records until when the script imports its modules. This file depends on the
standard library alone (the worker may run another Python than the agent), leaves no trace in the environment of the
worker or its children, and never makes a worker fail.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType

_IMPORTS_OFFSET = 80  # in the progress file, after what ``tenax.progress`` writes
_IMPORTS_S = 0.05  # shorter imports are not recorded


def _leave_no_trace() -> bool:
    """Restore PYTHONPATH and the import path, so that children run without the hook. Return whether it is enabled."""
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


def _run_shadowed_sitecustomize() -> None:
    """Import the environment's own sitecustomize, if it has one: this file shadowed it."""
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
            # Not KeyboardInterrupt and SystemExit, and not in a forked child that inherited this hook.
            if issubclass(kind, Exception) and os.getpid() == own_pid:
                _write(path, kind, error, trace)
        finally:
            if kind is KeyboardInterrupt and os.getpid() == own_pid and before is sys.__excepthook__:
                _show_interrupt(trace)
            else:
                before(kind, error, trace)

    sys.excepthook = record_and_show


def _show_interrupt(trace: "TracebackType | None") -> None:
    """Show where Ctrl-C interrupted this worker, in one line: many workers would print the same traceback."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    if trace is not None:
        code = trace.tb_frame.f_code
        where = f" in {code.co_name} ({code.co_filename}, line {trace.tb_lineno})"
    if sys.stderr is not None:
        sys.stderr.write(f"rank {os.environ.get('RANK', '?')}: KeyboardInterrupt{where}\n")


def _dump_stacks_at_signal(mark: str, path: str) -> None:
    """Dump all stacks at a signal, in C code: works even if the interpreter is stuck."""
    try:
        import faulthandler

        # The file stays open until exec or exit; children do not inherit it.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        file = os.open(os.path.join(os.path.dirname(path), "stacks.txt"), flags, 0o666) if path else 2
        faulthandler.register(int(mark), file, all_threads=True)
        # It shows at most the newest hundred threads. The main thread is the oldest, and receives the signals.
        faulthandler.register(int(mark) + 1, file, all_threads=False)
    except BaseException:  # noqa: S110 - full disk, no faulthandler: the report will show that there are no stacks
        pass


class _Imports:
    """A finder that finds nothing. It records when the script last began to import a module at its top level."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._at = time.monotonic()

    def find_spec(self, _name: str, _path: object = None, _target: object = None) -> None:
        now = time.monotonic()
        if now - self._at < _IMPORTS_S or os.getpid() != self._pid:
            return
        self._at = now
        is_importing = _is_script_importing()
        if is_importing:
            self._record(now)
        elif is_importing is False:  # the script runs
            self._at = float("inf")

    def _record(self, now: float) -> None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(os.path.join(os.path.dirname(self._path), "progress"), flags, 0o644)
            try:
                os.pwrite(descriptor, int(now * 1e9).to_bytes(8, "little"), _IMPORTS_OFFSET)
            finally:
                os.close(descriptor)
        except OSError:  # full disk: this time counts as training
            pass


def _is_script_importing() -> "bool | None":
    """Return whether an import statement at the top level of the script is running; None: something else imports."""
    frame: FrameType | None = sys._getframe(2)
    inner = script = called = None
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__":
            script, called = frame, inner
        frame, inner = frame.f_back, frame
    if script is None or script.f_code.co_name != "<module>":  # before the script, or in a thread
        return None
    return called is not None and called.f_code.co_filename.startswith("<frozen importlib")


def _write(path: str, kind: "type[BaseException]", error: BaseException, trace: "TracebackType | None") -> None:
    """Write TorchElastic's format atomically, never over an existing file: the first cause wins."""
    draft = f"{path}.{os.getpid()}.draft"
    try:
        import json
        import time
        import traceback

        now = time.time()
        lines = traceback.format_exception_only(kind, error)
        message = lines[-1] if issubclass(kind, SyntaxError) else "".join(lines)  # that one starts with its location
        text = "".join(traceback.format_exception(kind, error, trace))
        extra = {"py_callstack": text[-64000:], "timestamp": str(int(now)), "timestamp_s": now}
        data = {"message": {"message": message.strip()[:16000], "extraInfo": extra}}
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(data, file)
        _publish(draft, path)
    except BaseException:  # noqa: S110 - full disk, a json.py of the user: the traceback is still on stderr
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
        sys.meta_path.insert(0, _Imports(_path))
    _mark = os.environ.pop("TENAX_STACKS_SIGNAL", None)
    if _mark:
        _dump_stacks_at_signal(_mark, _path or "")
_run_shadowed_sitecustomize()
