"""A worker that trains nothing and needs nothing: it beats until it is told to finish or to fail.

    plain_worker.py FOLDER [--beat-s 0.02] [--reach-master]

Every beat is a ``step`` in its trace. When FOLDER/finish is there, it exits with 0; when FOLDER/fail-RANK is there, it
removes that file and exits with 3. With ``--reach-master`` it beats only if somebody listens at the master's address.
If GOODBYE_S is in its environment, it goes on beating for that long when it is asked to end.
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
    if goodbye_s := os.environ.get("GOODBYE_S"):
        signal.signal(signal.SIGTERM, lambda *_: ends_at.append(time.monotonic() + float(goodbye_s)))
    if args.reach_master:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=30).close()
    step = 0
    while not (args.folder / "finish").exists():
        fail = args.folder / f"fail-{RANK}"
        if fail.exists():
            fail.unlink()
            print(f"rank {RANK} fails as it was told", file=sys.stderr)
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
