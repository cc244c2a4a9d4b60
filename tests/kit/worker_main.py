"""A worker that does what the test's desk tells it, and nothing else. Needs nothing but the standard library.

It says who it is as soon as it lives, then obeys one line after the other:

    exit CODE       end with that code
    raise           end with an exception
    ignore          from now on deaf to SIGTERM
    tell            say so when SIGTERM comes, and go on
    notice          look, as a training loop would at each step, until there is a notice of leaving; say it
    daemon          leave behind a process of the nastiest kind; say its pid
    generation      say the token of the generation
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

SHOWN = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE"
SHOWN += " MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID"
SHOWN += " TENAX_GENERATION TENAX_GENERATION_REASON"

desk = socket.socket(socket.AF_UNIX)
desk.connect("\0" + os.environ["CLUSTER_DESK"])


def say(what: object) -> None:
    desk.sendall(json.dumps(what).encode() + b"\n")


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
            desk.close()
            while True:
                signal.pause()
        os._exit(0)
    os.wait()
    return int(os.read(reader, 100))


say({"pid": os.getpid(), "agent": os.environ["CLUSTER_AGENT"], **{name: os.environ[name] for name in SHOWN.split()}})
for line in desk.makefile():
    match line.split():
        case ["exit", code]:
            sys.exit(int(code))
        case ["raise"]:
            raise RuntimeError("told to fail")
        case ["ignore"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say("deaf")
        case ["tell"]:
            signal.signal(signal.SIGTERM, lambda *_: say("got SIGTERM"))
            say("will tell")
        case ["notice"]:
            say(notice())
        case ["daemon"]:
            say(daemon())
        case ["generation"]:
            from tenax import preemption

            say(preemption.generation())
