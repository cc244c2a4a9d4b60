"""A worker that prints what the test requests. Needs only the standard library.

It sends its identity when it starts, then executes one line of JSON after the other, and confirms each:

    {"print": TEXT, "to": 1}   write this text (latin-1: any byte) to stdout (1) or stderr (2)
    {"exit": CODE}             exit
    {"stubborn": true}         ignore SIGTERM
"""

from __future__ import annotations

import json
import os
import signal
import socket

hub = socket.socket(socket.AF_UNIX)
hub.connect("\0" + os.environ["CLUSTER_HUB"])
names = ("RANK", "WORLD_SIZE", "TENAX_GENERATION")
hello = {"pid": os.getpid(), "agent": os.environ["CLUSTER_AGENT"], **{name: os.environ[name] for name in names}}
hub.sendall(json.dumps(hello).encode() + b"\n")
for line in hub.makefile():
    request = json.loads(line)
    if "exit" in request:
        os._exit(request["exit"])
    if "stubborn" in request:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hub.sendall(b'"done"\n')
        continue
    data = memoryview(request["print"].encode("latin-1"))
    while data:
        data = data[os.write(request["to"], data) :]
    hub.sendall(b'"done"\n')
