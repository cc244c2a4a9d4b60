"""record: the decorator that makes a function write down the exception it dies of. TorchElastic's name and semantics.

Imported by workers, so it must stay cheap. It never hides what the function did: it returns, raises and exits as the
function does, except that an exit with success becomes a plain return.
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
    """Record the exception that ends ``fn``, and let it go on::

        @record
        def main(): ...

    Use it once per process, on the outermost function. ``sys.exit()`` and ``sys.exit(0)`` become a return of None, so
    that a script run inside another process ends only itself. A ``ChildFailedError`` passes the child's own error file
    on, with the child's exit code. Other exceptions are written to this process's error file. KeyboardInterrupt and
    exits with another code are not errors to be recorded.
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
        # Known by its method and not by its class: a worker need not import the class to catch it, and torch's own
        # ChildFailedError is as good as ours.
        get_first_failure: Any = getattr(error, "get_first_failure", None)
        if get_first_failure is None:
            handler.record_exception(error)
            return
        _, failure = get_first_failure()
        if failure.error_file != "<N/A>":
            handler.dump_error_file(failure.error_file, failure.exitcode)
    except Exception as problem:
        # A handler of the user's own may raise. The exception that is on its way is still the one that matters.
        from tenax._failures.error_handler import _describe, _say

        _say(f"the error handler failed while it recorded an error: {_describe(problem)}")
