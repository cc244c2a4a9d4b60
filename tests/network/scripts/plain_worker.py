"""A worker without torch: it records steps until a file commands it to finish or to fail.

    plain_worker.py FOLDER [--beat-s 0.02] [--reach-master]

It writes a ``step`` to its trace every ``--beat-s``. When FOLDER/finish exists it exits with 0; when FOLDER/fail-RANK
exists it removes that file and exits with 3. With ``--reach-master`` it first connects to the master's address. With
STOP_DELAY_S in its environment it continues for that long after SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path

from tracing import RANK, Trace


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--beat-s", type=float, default=0.02)
    parser.add_argument("--reach-master", action="store_true")
    args = parser.parse_args()
    trace = Trace(args.folder)
    trace.start()
    ends_at = [float("inf")]
    if stop_delay_s := os.environ.get("STOP_DELAY_S"):
        signal.signal(signal.SIGTERM, lambda *_: ends_at.append(time.monotonic() + float(stop_delay_s)))
    if args.reach_master:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=30).close()
    step = 0
    while not (args.folder / "finish").exists():
        fail = args.folder / f"fail-{RANK}"
        if fail.exists():
            fail.unlink()
            print(f"rank {RANK} fails as requested", file=sys.stderr)
            return 3
        if time.monotonic() > ends_at[-1]:
            return 1
        step += 1
        trace.step(step)
        time.sleep(args.beat_s)
    trace.end(step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
