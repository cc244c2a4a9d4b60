"""A worker that trains nothing and needs nothing: it beats until it is told to finish or to fail.

    plain_worker.py FOLDER [--beat-s 0.02]

Every beat is a ``step`` in its trace. When FOLDER/finish is there, it exits with 0; when FOLDER/fail-RANK is there, it
removes that file and exits with 3.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tracing import RANK, Trace


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--beat-s", type=float, default=0.02)
    args = parser.parse_args()
    trace = Trace(args.folder)
    trace.write("start", 0)
    step = 0
    while not (args.folder / "finish").exists():
        fail = args.folder / f"fail-{RANK}"
        if fail.exists():
            fail.unlink()
            print(f"rank {RANK} fails as it was told", file=sys.stderr)
            return 3
        step += 1
        trace.write("step", step)
        time.sleep(args.beat_s)
    trace.write("end", step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
