"""The worker of ``worker_main.py``, which also proves that no worker of another generation is alive when it starts.

Each worker holds a lock on its own file until it exits. First it tries to lock the files of all workers of other
generations, and writes those that are locked to the file ``overlaps``. Of two workers that are alive at the same time,
the one that locked its file later sees the other.
"""

from __future__ import annotations

import fcntl
import os
import runpy
from pathlib import Path

ALIVE = Path(os.environ["E2E_NOTES"]) / "alive"
ALIVE.mkdir(exist_ok=True)
generation = os.environ["TENAX_GENERATION"]
name = f"{generation}-{os.environ['RANK']}-{os.getpid()}"
lock = os.open(ALIVE / f".{name}", os.O_CREAT | os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
os.rename(ALIVE / f".{name}", ALIVE / name)  # visible to others only once it is locked
for other in os.listdir(ALIVE):
    if not other.startswith((".", f"{generation}-")):
        descriptor = os.open(ALIVE / other, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            with open(ALIVE.parent / "overlaps", "a") as file:
                file.write(f"{name} starts, and {other} is alive (generation-rank-pid)\n")
        finally:
            os.close(descriptor)
runpy.run_path(str(Path(__file__).parents[1] / "kit" / "worker_main.py"), run_name="__main__")
