"""Timers: a block of code that must be left in time, or its process is ended.

    from tenax import timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=60):
        train_one_step()

With ``TORCHELASTIC_ENABLE_FILE_TIMER=1`` the agent itself watches: it takes the stacks of a worker that hangs, ends it
and starts the workers again as after any failure. The servers here are for programs that watch processes of their own.
"""

from tenax.timer.api import TimerClient, TimerRequest, TimerServer, configure, expires
from tenax.timer.file_based_local_timer import FileTimerClient, FileTimerRequest, FileTimerServer
from tenax.timer.local_timer import LocalTimerClient, LocalTimerServer

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]
