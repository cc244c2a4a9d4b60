"""A worker: counts to STEPS, saves with its fencing token when it is stopped, and continues from the last save.

In a job that Slurm has restarted, it only counts 5 more steps.

train.py FOLDER STEPS [fail | deaf]
"""

import os
import signal
import sys
import time
from pathlib import Path

from tenax import preemption

folder, steps, mood = Path(sys.argv[1]), int(sys.argv[2]), "".join(sys.argv[3:])
rank, host = int(os.environ["RANK"]), os.uname().nodename
folder.mkdir(exist_ok=True)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))


def save(step):
    new = folder / f"new-{rank}"
    new.write_text(str(step))
    new.replace(folder / f"token-{preemption.generation():012d}-step-{step:06d}")


latest = max(folder.glob("token-*"), default=None)
start = int(latest.read_text()) if latest else 0
if preemption.generation() > 1_000_000:
    steps = start + 5
run, size = os.environ["TORCHELASTIC_RUN_ID"], os.environ["WORLD_SIZE"]
print(f"run {run}: rank {rank} of {size} on {host}, token {preemption.generation()}, after step {start}", flush=True)
if mood == "fail" and rank == 1:
    raise RuntimeError("the data is bad")
has_notice = False
for step in range(start + 1, steps + 1):
    time.sleep(0.1)
    notice = preemption.notice()
    if notice is not None and not has_notice and not asked:
        has_notice = True
        print(f"rank {rank}: notice, {notice.seconds_left} s left", flush=True)
    if asked and mood != "deaf":
        if rank == 0:
            save(step)
        print(f"rank {rank}: stopped after step {step}", flush=True)
        sys.exit(0)
if rank == 0:
    save(steps)
print(f"rank {rank}: finished", flush=True)
