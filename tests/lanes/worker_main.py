"""A worker of the lane: it says who it is and since when it lives, then every few milliseconds that it lives still.

Each sign of life carries the moment at which it was made, on the clock that all processes of this host share: so what
it proves does not depend on when somebody reads it. Needs nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time

EVERY_S = 0.025
SHOWN = "RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT"
SHOWN += " TENAX_GENERATION"


def began_at() -> float:
    """When this process was made, at the latest: the system counts in ticks, and drops what is left of one."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    since_boot = (ticks + 1) / os.sysconf("SC_CLK_TCK")
    return since_boot - (time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic())


if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
desk = socket.socket(socket.AF_UNIX)
desk.connect("\0" + os.environ["LANE_DESK"])
who = {"pid": os.getpid(), "agent": os.environ["LANE_AGENT"], "began": began_at()}
desk.sendall(json.dumps({**who, **{name: os.environ[name] for name in SHOWN.split()}}).encode() + b"\n")
while True:
    desk.sendall(b"%.6f\n" % time.monotonic())
    if select.select([desk], [], [], EVERY_S)[0]:
        told = desk.recv(100)
        os._exit(int(told) if told else 7)  # without a desk there is nothing to live for
