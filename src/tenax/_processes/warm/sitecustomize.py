"""Runs in a template's interpreter before the user's first line, and returns only in the workers forked from it.

A template is an interpreter that was started exactly as a worker is: same program, flags, script and arguments. It
stops here, before the script, imports what the job needs once, and forks. A forked worker returns from this file and
runs its script as the interpreter does: no frame of tenax is on its stack.

This file and the ``tenax_*`` files of this folder depend on the standard library alone (the worker may run another
Python than the agent), and leave no trace in a worker.
"""

import os
import sys


def _leave_no_trace(here: str) -> None:
    sys.path[:] = [entry for entry in sys.path if entry != here]
    for name in [name for name in sys.modules if name.startswith("tenax_")]:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(here):
            del sys.modules[name]


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


_here = os.path.dirname(os.path.abspath(__file__))
_channel = os.environ.pop("TENAX_TEMPLATE", "")
if _channel:
    try:
        __import__("tenax_template").run_template(int(_channel))
    except BaseException:
        # Otherwise the interpreter would run the script as an extra worker.
        sys.excepthook(*sys.exc_info())
        os._exit(70)
_leave_no_trace(_here)
if _channel:
    __import__("signal").pthread_sigmask(2, ())  # SIG_SETMASK: deliver signals that arrived meanwhile
_run_shadowed_sitecustomize()
