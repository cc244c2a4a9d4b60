"""A worker that opts in and can be held. It uses the channel by hand, and needs only the standard library.

In each generation it connects to the test and sends its identity, then executes one line after the other:

    exit CODE       exit with that code
    child           start a process that stays; send its pid
    deaf            read nothing from the channel any more
    ignore          ignore SIGTERM
    garbage         send an invalid message to the agent

When its generation ends it sends "held" to the test and acknowledges the end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys

VARIABLES = "RANK WORLD_SIZE GROUP_RANK MASTER_PORT TORCHELASTIC_RESTART_COUNT TENAX_GENERATION TENAX_GENERATION_REASON"
channel = socket.socket(fileno=int(os.environ["TENAX_ELASTIC_FD"]))
os.set_inheritable(channel.fileno(), False)
from_agent = channel.makefile("rb", buffering=0)
generation = int(os.environ["TENAX_GENERATION"])


def send(to: socket.socket, what: object) -> None:
    to.sendall(json.dumps(what).encode() + b"\n")


def connect() -> socket.socket:
    hub = socket.socket(socket.AF_UNIX)
    hub.connect("\0" + os.environ["CLUSTER_HUB"])
    variables = {name: os.environ[name] for name in VARIABLES.split()}
    send(hub, {"pid": os.getpid(), "agent": os.environ["CLUSTER_AGENT"], **variables})
    return hub


def child() -> int:
    pid = os.fork()
    if pid == 0:
        hub.close()
        channel.close()
        while True:
            signal.pause()
    return pid


def execute(line: str) -> None:
    match line.split():
        case ["exit", code]:
            sys.exit(int(code))
        case ["child"]:
            send(hub, child())
        case ["deaf"]:
            watched.remove(channel)
            send(hub, "deaf")
        case ["ignore"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            send(hub, "ignoring")
        case ["garbage"]:
            channel.sendall(b"garbage\n")
            send(hub, "sent")


while True:
    timeout_s = float(os.environ.get("HOLD_TIMEOUT", "20"))
    send(channel, {"type": "opt_in", "generation": generation, "timeout_s": timeout_s})
    hub = connect()
    watched, has_ended = [hub, channel], False
    while not has_ended:
        ready, _, _ = select.select(watched, [], [])
        if hub in ready:
            for line in hub.recv(4096).decode().splitlines():
                execute(line)
        if channel in ready and channel in watched:
            message = json.loads(from_agent.readline())
            assert (message["type"], message["generation"]) == ("end", generation), message
            has_ended = True
    send(hub, "held")
    send(channel, {"type": "held", "generation": generation, "step": 7})
    message = json.loads(from_agent.readline())
    assert message["type"] == "begin", message
    generation = message["generation"]
    os.environ.update(message["env"])
    hub.close()
