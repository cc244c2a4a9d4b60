"""A worker that executes the commands of the test. It imports as little as possible: tests start hundreds of it.

socket, signal and json would take 20 ms, twice as long as the rest of its start; their core in C takes none.

It sends its identity when it starts, then executes one line after the other:

    exit CODE       exit with that code
    raise           raise an exception
    ignore          ignore SIGTERM
    report          report SIGTERM, and continue
    notice          poll, like a training loop, until there is a notice; send it
    daemon          start a process that is hard to end; send its pid
    generation      send the fencing token of the generation
"""

from __future__ import annotations

import _signal as signal
import _socket as socket
import os
import sys
import time

VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE"
)
VARIABLES += " MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID"
VARIABLES += " TENAX_GENERATION TENAX_GENERATION_REASON"

hub = socket.socket(socket.AF_UNIX)
hub.connect("\0" + os.environ["CLUSTER_HUB"])


def send(what: object) -> None:
    os.write(hub.fileno(), repr(what).encode() + b"\n")


def notice() -> object:
    from tenax import preemption

    while (found := preemption.notice()) is None:
        time.sleep(0.002)  # one step of training
    return {"host": found.host, "is_this_host": found.is_this_host, "why": found.why, "left": found.seconds_left}


def daemon() -> int:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(writer, str(os.getpid()).encode())
            hub.close()
            while True:
                signal.pause()
        os._exit(0)
    os.wait()
    return int(os.read(reader, 100))


send(
    {"pid": os.getpid(), "agent": os.environ["CLUSTER_AGENT"], **{name: os.environ[name] for name in VARIABLES.split()}}
)
for line in open(hub.fileno(), closefd=False):  # noqa: SIM115 - until this process exits
    match line.split():
        case ["exit", code]:
            sys.exit(int(code))
        case ["raise"]:
            raise RuntimeError("requested to fail")
        case ["ignore"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            send("ignoring")
        case ["report"]:
            signal.signal(signal.SIGTERM, lambda *_: send("got SIGTERM"))
            send("will report")
        case ["notice"]:
            send(notice())
        case ["daemon"]:
            send(daemon())
        case ["generation"]:
            from tenax import preemption

            send(preemption.generation())
