"""ErrorHandler: how a process writes down the exception it dies of. TorchElastic's names and hooks.

Subclasses customise by overriding ``initialize`` and ``record_exception``. Whatever goes wrong here is said on stderr
and never raised: the user's exception is the news, not ours. Imported by workers, so it must stay cheap.
"""

from __future__ import annotations

import os

from tenax._failures import error_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["ErrorHandler", "get_error_handler"]


class ErrorHandler:
    """Writes exceptions to the file that the environment variable ``TORCHELASTIC_ERROR_FILE`` names, if any."""

    def initialize(self) -> None:
        """Make crashes of the interpreter itself (segmentation faults and the like) print where they happened.

        Call it before the code whose errors are to be recorded. A fault handler that is already enabled stays as it is.
        """
        import faulthandler

        if not faulthandler.is_enabled():
            try:
                faulthandler.enable(all_threads=True)
            except Exception:  # sys.stderr was closed or replaced by something without a descriptor
                try:
                    faulthandler.enable(file=2, all_threads=True)
                except Exception as error:
                    _say(f"the fault handler could not be enabled: {_describe(error)}")
        path = self._get_error_file_path()
        if path:
            error_file.watch(path)

    def record_exception(self, e: BaseException) -> None:
        """Write the exception and its traceback to the error file, unless an earlier cause is already there."""
        path = self._get_error_file_path()
        if not path:
            return
        try:
            import time

            error_file.write_first(path, error_file.content(_describe(e), _traceback_of(e), time.time()))
        except Exception as problem:
            _say(f"the error could not be written to {path}: {_describe(problem)}")

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Note the exit code in the data of a child's error: a child that a signal kills cannot know its own."""
        message = rootcause_error.get("message")
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            _say(f"exit code {error_code} is not noted: {rootcause_error_file} has no message object to hold it")

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy a child's error file to this process's own, with the child's exit code.

        It replaces what is there: the child is the cause of whatever this process could have written before.
        """
        path = self._get_error_file_path()
        if not path:
            _say(f"{rootcause_error_file} is not passed on: TORCHELASTIC_ERROR_FILE names no file for this process")
            return
        import json

        found = error_file.read(rootcause_error_file)
        data = found.data
        if not found.found or found.problem:
            _say(f"{rootcause_error_file}: {found.problem or 'there is no such error file'}")
            data = _rebuilt(found)
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, data, error_code)
        self._write_error_file(path, json.dumps(data))

    def _get_error_file_path(self) -> str | None:
        """Where this process writes its error. None or empty: nowhere."""
        return os.environ.get("TORCHELASTIC_ERROR_FILE")

    def _write_error_file(self, file_path: str, error_msg: str) -> None:
        """Write the text to the file, or say why not."""
        try:
            error_file.write_text(file_path, error_msg)
        except Exception as problem:
            _say(f"the error could not be written to {file_path}: {_describe(problem)}")


def get_error_handler() -> ErrorHandler:
    """The handler that ``record`` uses when it is given none."""
    return ErrorHandler()


def _rebuilt(found: error_file.ErrorFile) -> dict[str, Any]:
    """What could be saved of a damaged error file, in the format of a whole one."""
    import time

    message = found.message or found.problem or "no error file was written"
    timestamp = time.time() if found.timestamp is None else found.timestamp
    return error_file.content(message, found.traceback, timestamp)


def _traceback_of(error: BaseException) -> str:
    import traceback

    frames = error.__traceback__
    # Our own wrapper is on every stack and explains nothing.
    while frames is not None and frames.tb_frame.f_globals.get("__name__") == "tenax._failures.record":
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception as problem:
        return f"{_describe(error)}\n(its traceback could not be formatted: {_describe(problem)})"


def _describe(error: BaseException) -> str:
    """``RuntimeError: boom``, also for an exception whose own ``__str__`` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}: (its text could not be made)"


def _say(sentence: str) -> None:
    """One line on stderr. Straight to the descriptor: sys.stderr may be closed or replaced while a process dies."""
    from contextlib import suppress

    with suppress(OSError):  # nobody is left to tell
        os.write(2, f"tenax: {sentence}\n".encode("utf-8", "backslashreplace"))
