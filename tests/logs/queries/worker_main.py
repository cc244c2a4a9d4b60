"""A worker that prints what the test tells it, and nothing else. Needs nothing but the standard library.

It says who it is as soon as it lives, then obeys one line of JSON after the other, and says when it is done:

    {"print": TEXT, "to": 1}   write this text, as it is (latin-1: any byte can be told), to stdout (1) or stderr (2)
    {"exit": CODE}             end
    {"stubborn": true}         do not end on SIGTERM
"""

from __future__ import annotations

import json
import os
import signal
import socket

desk = socket.socket(socket.AF_UNIX)
desk.connect("\0" + os.environ["CLUSTER_DESK"])
names = ("RANK", "WORLD_SIZE", "TENAX_GENERATION")
hello = {"pid": os.getpid(), "agent": os.environ["CLUSTER_AGENT"], **{name: os.environ[name] for name in names}}
desk.sendall(json.dumps(hello).encode() + b"\n")
for line in desk.makefile():
    told = json.loads(line)
    if "exit" in told:
        os._exit(told["exit"])
    if "stubborn" in told:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        desk.sendall(b'"done"\n')
        continue
    data = memoryview(told["print"].encode("latin-1"))
    while data:
        data = data[os.write(told["to"], data) :]
    desk.sendall(b'"done"\n')
