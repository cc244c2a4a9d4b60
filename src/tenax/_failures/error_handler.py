"""``record`` and ``ErrorHandler``: write the exception that ends a process to its error file. TorchElastic's names.

Subclasses override ``initialize`` and ``record_exception``. Errors of this module are printed to stderr and never
raised, so that they do not hide the user's exception. A decorated function returns, raises and exits as before, except
that an exit with success becomes a plain return. Workers import this module, so it must stay cheap.
"""

from __future__ import annotations

import functools
import os

from tenax._failures import error_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")

__all__ = ["ErrorHandler", "get_error_handler", "record"]


class ErrorHandler:
    """Writes exceptions to the file named by the environment variable ``TORCHELASTIC_ERROR_FILE``, if set."""

    def initialize(self) -> None:
        """Enable the fault handler, which prints the stacks of a crash such as a segmentation fault.

        Call this before the code whose errors are recorded. A fault handler that is already enabled stays unchanged.
        """
        import faulthandler

        if not faulthandler.is_enabled():
            try:
                faulthandler.enable(all_threads=True)
            except Exception:  # sys.stderr was closed or replaced by something without a descriptor
                try:
                    faulthandler.enable(file=2, all_threads=True)
                except Exception as error:
                    _print(f"could not enable the fault handler: {_describe(error)}")
        path = self._get_error_file_path()
        if path:
            error_file.watch(path)

    def record_exception(self, e: BaseException) -> None:
        """Write the exception and its traceback to the error file, unless it holds an earlier cause."""
        path = self._get_error_file_path()
        if not path:
            return
        try:
            import time

            error_file.write_first(path, error_file.content(_describe(e), _traceback_of(e), time.time()))
        except Exception as problem:
            _print(f"could not write the error to {path}: {_describe(problem)}")

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Add the exit code to a child's error data: a child killed by a signal could not write it."""
        message = rootcause_error.get("message")
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            _print(f"exit code {error_code} was not recorded: {rootcause_error_file} has no message object")

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy a child's error file to this process's own, with the child's exit code.

        Replaces an existing file: the child is the cause of whatever this process wrote before.
        """
        path = self._get_error_file_path()
        if not path:
            _print(f"{rootcause_error_file} was not copied: TORCHELASTIC_ERROR_FILE is not set")
            return
        import json

        found = error_file.read(rootcause_error_file)
        data = found.data
        if not found.found or found.problem:
            _print(f"{rootcause_error_file}: {found.problem or 'the error file does not exist'}")
            data = _rebuilt(found)
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, data, error_code)
        self._write_error_file(path, json.dumps(data))

    def _get_error_file_path(self) -> str | None:
        """Return this process's error file. None or empty: there is none."""
        return os.environ.get("TORCHELASTIC_ERROR_FILE")

    def _write_error_file(self, file_path: str, error_msg: str) -> None:
        """Write the text to the file, or print why that failed."""
        try:
            error_file.write_text(file_path, error_msg)
        except Exception as problem:
            _print(f"could not write the error to {file_path}: {_describe(problem)}")


def get_error_handler() -> ErrorHandler:
    """Return the default handler of ``record``."""
    return ErrorHandler()


def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]:
    """Record the exception that ends ``fn``, and re-raise it::

        @record
        def main(): ...

    Use it once per process, on the outermost function. ``sys.exit()`` and ``sys.exit(0)`` become a return of None, so
    that a script run inside another process ends only itself. A ``ChildFailedError`` copies the child's error file,
    with the child's exit code, to this process's own. Other exceptions are written to this process's error file.
    KeyboardInterrupt and exits with another code are not recorded.
    """
    handler = error_handler or get_error_handler()

    @functools.wraps(fn)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except SystemExit as error:
            if error.code is None or error.code == 0:
                return None
            raise
        except Exception as error:
            _record(handler, error)
            raise

    return recorded


def _record(handler: ErrorHandler, error: Exception) -> None:
    try:
        # Recognized by its method, not its class: workers need not import the class, and torch's own ChildFailedError
        # works too.
        get_first_failure: Any = getattr(error, "get_first_failure", None)
        if get_first_failure is None:
            handler.record_exception(error)
            return
        _, failure = get_first_failure()
        if failure.error_file != "<N/A>":
            handler.dump_error_file(failure.error_file, failure.exitcode)
    except Exception as problem:
        # A user's own handler may raise; the function's exception must still propagate.
        _print(f"the error handler failed while recording an error: {_describe(problem)}")


def _rebuilt(found: error_file.ErrorFile) -> dict[str, Any]:
    """Return what could be recovered of a damaged error file, in the usual format."""
    import time

    message = found.message or found.problem or "no error file was written"
    timestamp = time.time() if found.timestamp is None else found.timestamp
    return error_file.content(message, found.traceback, timestamp)


def _traceback_of(error: BaseException) -> str:
    import traceback

    frames = error.__traceback__
    # Skip the frames of tenax's own wrapper.
    while frames is not None and frames.tb_frame.f_globals.get("__name__") == __name__:
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception as problem:
        return f"{_describe(error)}\n(its traceback could not be formatted: {_describe(problem)})"


def _describe(error: BaseException) -> str:
    """Return ``RuntimeError: boom``, even if the exception's own ``__str__`` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}: (its __str__ raised an exception)"


def _print(text: str) -> None:
    """Write one line to descriptor 2: sys.stderr may be closed or replaced while a process exits."""
    from contextlib import suppress

    with suppress(OSError):  # stderr is closed
        os.write(2, f"tenax: {text}\n".encode("utf-8", "backslashreplace"))
