"""A worker without torch: it records steps until a file commands it to finish or to fail.

    plain_worker.py FOLDER [--beat-s 0.02] [--reach-master]

It writes a ``step`` to its trace every ``--beat-s``. When FOLDER/finish exists it exits with 0; when FOLDER/fail-RANK
exists it removes that file and exits with 3. With ``--reach-master`` it first connects to the master's address. With
STOP_DELAY_S in its environment it continues for that long after SIGTERM. It imports as little as possible: each test
starts it many times.
"""

from __future__ import annotations

import os
import sys
import time

from tracing import RANK, Trace


def main() -> int:
    folder, *options = sys.argv[1:]
    beat_s = float(options[options.index("--beat-s") + 1]) if "--beat-s" in options else 0.02
    trace = Trace(folder)
    trace.start()
    ends_at = [float("inf")]
    if stop_delay_s := os.environ.get("STOP_DELAY_S"):
        import signal

        signal.signal(signal.SIGTERM, lambda *_: ends_at.append(time.monotonic() + float(stop_delay_s)))
    if "--reach-master" in options:
        import socket

        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=30).close()
    step = 0
    while not os.path.exists(f"{folder}/finish"):
        fail = f"{folder}/fail-{RANK}"
        if os.path.exists(fail):
            os.unlink(fail)
            print(f"rank {RANK} fails as requested", file=sys.stderr)
            return 3
        if time.monotonic() > ends_at[-1]:
            return 1
        step += 1
        trace.step(step)
        time.sleep(beat_s)
    trace.end(step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
