"""``record``: the decorator that writes the exception of a function to the error file. TorchElastic's semantics.

Workers import it, so it must stay cheap. The decorated function returns, raises and exits as before, except that an
exit with success becomes a plain return.
"""

from __future__ import annotations

import functools

from tenax._failures.error_handler import ErrorHandler, get_error_handler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")

__all__ = ["record"]


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
        from tenax._failures.error_handler import _describe, _print

        _print(f"the error handler failed while recording an error: {_describe(problem)}")
