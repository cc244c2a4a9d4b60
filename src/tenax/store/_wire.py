"""The commands and encodings of PyTorch's TCPStore protocol, for the server and the client.

A request is a command byte and its fields. An answer has no header. Integers are little-endian. A string is its length
in eight bytes, then its bytes; a list is its count, then its items. Users' keys start with a slash on the wire; the
protocol's own keys do not.
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

GREETING = b"\x00\xce\xf7\x85\x3c"  # VALIDATE and the magic number
READY, NOT_READY = b"\x00", b"\x01"  # answers to CHECK
STOP_WAITING, WAIT_CANCELED = b"\x00", b"\x01"  # answers to WAIT and BARRIER, and to CANCEL_WAIT

KEY_PREFIX = b"/"
WORKER_COUNT_KEY = b"init/"  # the number of registered clients, if a world size was given

U64 = struct.Struct("<Q")
I64 = struct.Struct("<q")
U32 = struct.Struct("<I")


def text(value: bytes) -> bytes:
    return U64.pack(len(value)) + value


def texts(values: list[bytes]) -> bytes:
    return U64.pack(len(values)) + b"".join([text(value) for value in values])
