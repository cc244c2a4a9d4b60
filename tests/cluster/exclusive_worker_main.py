"""The worker of ``worker_main.py``, which also proves that no worker of another generation is alive when it starts.

Each worker holds a lock on its own file until it exits. First it tries to lock the files of all workers of other
generations, and writes those that are locked to the file ``overlaps``. Of two workers that are alive at the same time,
the one that locked its file later sees the other.
"""

from __future__ import annotations

import fcntl
import os

NOTES = os.environ["E2E_NOTES"]
ALIVE = f"{NOTES}/alive"
os.makedirs(ALIVE, exist_ok=True)
generation = os.environ["TENAX_GENERATION"]
name = f"{generation}-{os.environ['RANK']}-{os.getpid()}"
lock = os.open(f"{ALIVE}/.{name}", os.O_CREAT | os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
os.rename(f"{ALIVE}/.{name}", f"{ALIVE}/{name}")  # visible to others only once it is locked
for other in os.listdir(ALIVE):
    if not other.startswith((".", f"{generation}-")):
        descriptor = os.open(f"{ALIVE}/{other}", os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            with open(f"{NOTES}/overlaps", "a") as file:
                file.write(f"{name} starts, and {other} is alive (generation-rank-pid)\n")
        finally:
            os.close(descriptor)
_worker = os.path.join(os.path.dirname(__file__), "..", "kit", "worker_main.py")
with open(_worker) as _file:
    exec(compile(_file.read(), _worker, "exec"))
