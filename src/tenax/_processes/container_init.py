"""The first process of a container: forwards signals to the agent, which is its child, and reaps orphans.

The kernel gives process 1 two duties that an agent does not have. It drops signals for which process 1 has no handler,
so that a SIGTERM during the start of an agent would be lost; and it makes process 1 the parent of every orphan, such as
those of ``kubectl exec``. When process 1 exits, the kernel kills all others.
"""

from __future__ import annotations

import os
import signal


def run_below_init() -> None:
    """Fork. Return in the child; in process 1, serve it and exit with its exit code."""
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        received = signal.sigwaitinfo(numbers)
        if received.si_code <= 0:  # not of the kernel, as SIGCHLD and a Ctrl-C, which the child gets too
            os.kill(child, received.si_signo)
        pid = -1
        while pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
