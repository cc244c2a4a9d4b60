"""A worker of the lane: it sends its identity and start time, then a sign of life every few milliseconds.

Each sign of life contains its time, on the clock that all processes of this host share, so it does not matter when it
is read. Needs only the standard library.
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
VARIABLES = "RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT"
VARIABLES += " TENAX_GENERATION"


def began_at() -> float:
    """Return the latest possible start time of this process: the system counts in ticks and rounds down."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    since_boot = (ticks + 1) / os.sysconf("SC_CLK_TCK")
    return since_boot - (time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic())


if "ignore-sigterm" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
hub = socket.socket(socket.AF_UNIX)
hub.connect("\0" + os.environ["LANE_HUB"])
identity = {"pid": os.getpid(), "agent": os.environ["LANE_AGENT"], "began": began_at()}
hub.sendall(json.dumps({**identity, **{name: os.environ[name] for name in VARIABLES.split()}}).encode() + b"\n")
while True:
    hub.sendall(b"%.6f\n" % time.monotonic())
    if select.select([hub], [], [], EVERY_S)[0]:
        code = hub.recv(100)
        os._exit(int(code) if code else 7)  # exit if the hub is closed
