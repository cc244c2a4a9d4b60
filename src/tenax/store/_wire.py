"""Wire: the numbers and encodings of PyTorch's TCPStore protocol, for the server and for the client.

A request is one command byte and its fields; an answer has no header at all, so both sides must agree on every byte.
Integers are what x86-64 and aarch64 have in memory: little-endian. A string is its length in eight bytes and then its
bytes; a list is its count and then its items. Users' keys begin with a slash on the wire; the protocol's own do not.
"""

from __future__ import annotations

import struct

VALIDATE = 0x00
SET = 0x01
COMPARE_SET = 0x02
GET = 0x03
ADD = 0x04
CHECK = 0x05
WAIT = 0x06
GETNUMKEYS = 0x07
DELETE_KEY = 0x08
APPEND = 0x09
MULTI_GET = 0x0A
MULTI_SET = 0x0B
CANCEL_WAIT = 0x0C
PING = 0x0D
QUEUE_PUSH = 0x0E
QUEUE_POP = 0x0F
QUEUE_LEN = 0x10
LIST_KEYS = 0x11
BARRIER = 0x12

GREETING = b"\x00\xce\xf7\x85\x3c"  # VALIDATE and the number that every client must know
READY, NOT_READY = b"\x00", b"\x01"  # answers to CHECK
STOP_WAITING, WAIT_CANCELED = b"\x00", b"\x01"  # answers to WAIT and BARRIER, and to CANCEL_WAIT

KEY_PREFIX = b"/"
WORKER_COUNT_KEY = b"init/"  # how many clients have come, when a world size was given

U64 = struct.Struct("<Q")
I64 = struct.Struct("<q")
U32 = struct.Struct("<I")


def text(value: bytes) -> bytes:
    """One string, as a field."""
    return U64.pack(len(value)) + value


def texts(values: list[bytes]) -> bytes:
    """A list of strings, as a field."""
    return U64.pack(len(values)) + b"".join([text(value) for value in values])
