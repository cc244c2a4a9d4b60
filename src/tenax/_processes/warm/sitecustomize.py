"""Runs in a template's interpreter before the user's first line, and returns only in the workers forked from it.

A template is an interpreter that was started exactly as a worker is: same program, flags, script and arguments. It
stops here, before the script, imports what the job needs once, and forks. A forked worker leaves this file as if it had
never been there and runs its script as the interpreter does: nothing of ours is below its first frame.

The law of this folder's files that are named ``tenax_*``, and of this one: they depend on nothing but the standard
library (the worker may run another Python than the agent), and a worker has no trace of them.
"""

import os
import sys


def _leave_no_trace(here: str) -> None:
    sys.path[:] = [entry for entry in sys.path if entry != here]
    for name in [name for name in sys.modules if name.startswith("tenax_")]:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(here):
            del sys.modules[name]


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


_here = os.path.dirname(os.path.abspath(__file__))
_channel = os.environ.pop("TENAX_TEMPLATE", "")
if _channel:
    try:
        __import__("tenax_template").become_worker_when_asked(int(_channel))
    except BaseException:
        # The interpreter would go on and run the script: a worker that nobody ordered.
        sys.excepthook(*sys.exc_info())
        os._exit(70)
_leave_no_trace(_here)
if _channel:
    __import__("signal").pthread_sigmask(2, ())  # SIG_SETMASK: what came since the order is heard from here on
_run_the_real_one()
