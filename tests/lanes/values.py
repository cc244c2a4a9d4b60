"""Random values of the message types, from a seed: usual ones, ones at their limits, and absurd ones.

The values follow the types and their limits (``_core/bounds.py``), so that a new field or message is covered at once.
They are plain data as in JSON, because only that can contain absurd ones.
"""

from __future__ import annotations

import functools
import json
import random
from typing import Any

from msgspec import inspect

ABSURD: tuple[Any, ...] = (
    *(-1, 0, -(1 << 63), 1 << 31, 1 << 40, 1 << 50, 1 << 53, 1 << 64, 10**30, 1e300, -1e300, 1.5, 1e-300),
    *(None, True, "", "x", "\n", "\x1b]0;t\x07", "\u202e\u200b", "\ud800", "x" * 70_000, [], {}, [[]], [None] * 5000),
)
USUAL: dict[str, tuple[Any, ...]] = {
    "generation": (0, 1, 1, 1, 2, 2, 3),
    "number": (0, 1, 2),
    "node_id": ("a", "b", "c"),
    "node": ("a", "b", "c"),
    "host": ("h1", "h2"),
    "slots": (1, 2),
    "rank": (-1, -1, 0, 1),
    "group_rank": (-1, 0, 1),
    "group_world_size": (0, 1, 2),
    "local_rank": (0, 0, 1),
    "global_rank": (0, 1, 2),
    "min_nodes": (1,),
    "max_nodes": (3,),
    "restarts_used": (0, 0, 1),
    "sent_at": (0.0, 5.0, 10.0),
    "seen_at": (1.0, 5.0),
    "exit_code": (0, 1, -9, -15),
    "store": ("", "h:1", "h:2"),
    "name": ("", "", "n1"),
    "run_id": ("run",),
    "local_world_size": (2,),
    "format": (3,),
}


class Draw:
    """Draws with one random generator. ``absurdity``: the share of values that do not fit their type."""

    def __init__(self, random_: random.Random, absurdity: float = 0.0) -> None:
        self.random_ = random_
        self.absurdity = absurdity

    def of(self, kind: Any) -> Any:
        """Return a value of this type, as plain data."""
        return self._value(_info(kind), "", 0)

    def _value(self, info: Any, name: str, depth: int) -> Any:
        random_ = self.random_
        if self.absurdity and random_.random() < self.absurdity:
            return random_.choice(ABSURD)
        usual = USUAL.get(name)
        if usual is not None and not isinstance(info, inspect.StructType) and random_.random() < 0.8:
            return random_.choice(usual)
        match info:
            case inspect.IntType():
                return self._integer(info)
            case inspect.FloatType():
                low, high = _or(info.ge, -1e9), _or(info.le, 1e9)
                return random_.choice(
                    (low, high, max(low, 0.0), max(low, 1.0), random_.uniform(max(low, -9), min(high, 99)))
                )
            case inspect.StrType():
                return self._text(info)
            case inspect.VarTupleType() | inspect.ListType() | inspect.SetType():
                return [self._value(info.item_type, "", depth + 1) for _ in range(self._count(depth))]
            case inspect.DictType():
                count = self._count(depth)
                return {
                    str(self._value(info.key_type, "name", depth + 1)): self._value(info.value_type, "", depth + 1)
                    for _ in range(count)
                }
            case inspect.UnionType():
                return self._value(random_.choice(info.types), name, depth)
            case inspect.EnumType():
                return random_.choice([each.value for each in info.cls])
            case inspect.StructType():
                return self._struct(info, depth)
            case inspect.BoolType():
                return random_.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.BytesType():
                return "AAAA" * random_.choice((0, 1, 4))
        return random_.choice((None, 1, "x", [], {}))

    def _struct(self, info: Any, depth: int) -> dict[str, Any]:
        drawn: dict[str, Any] = {}
        if info.tag_field is not None:
            drawn[info.tag_field] = info.tag
        for field in info.fields:
            if field.required or self.random_.random() < (0.6 if depth < 3 else 0.2):
                drawn[field.encode_name] = self._value(field.type, field.encode_name, depth + 1)
        return drawn

    def _integer(self, info: Any) -> int:
        low = _or(info.ge, _or(info.gt, -(1 << 62)))
        high = _or(info.le, _or(info.lt, 1 << 62) - 1)
        near = [each for each in (0, 1, 2, 3, 7) if low <= each <= high]
        return self.random_.choice((low, high, low + 1, high - 1, *near, *near))

    def _text(self, info: Any) -> str:
        texts = ["x", "why", "RuntimeError: boom", "ünïcödé", "-", "0,1-3", "start"]
        if not info.pattern:
            texts += ["two\nlines", "\x1b[31mred", "\u202eabc", " " * 50, "Ranks 1, 2 failed to pass monitoredBarrier"]
        if info.max_length is not None and self.random_.random() < 0.01:
            texts = ["x" * info.max_length]
        if not info.min_length:
            texts.append("")
        return self.random_.choice(texts)

    def _count(self, depth: int) -> int:
        return self.random_.choice((0, 1, 1, 2, 3) if depth < 4 else (0, 0, 1))

    def json(self, kind: Any) -> bytes:
        """Return a value as JSON, which may be damaged."""
        text = json.dumps(self.of(kind)).encode()
        if self.absurdity and self.random_.random() < 0.1:
            return self.damaged(text)
        return text

    def damaged(self, data: bytes) -> bytes:
        """Return the bytes truncated, repeated, changed or nested."""
        random_, at = self.random_, self.random_.randrange(len(data) + 1)
        match random_.randrange(6):
            case 0:
                return data[:at]
            case 1:
                return data[at:] + data
            case 2:
                return data[:at] + bytes([random_.randrange(256)]) + data[at + 1 :]
            case 3:
                return data[:at] + random_.randbytes(random_.randrange(20)) + data[at:]
            case 4:
                return data[:at] + b"[" * random_.choice((10, 900, 5000)) + data[at:]
        return data[:at] + data[random_.randrange(len(data) + 1) :]


@functools.cache
def _info(kind: Any) -> Any:
    return inspect.type_info(kind)


def _or(bound: Any, otherwise: Any) -> Any:
    return otherwise if bound is None else bound
