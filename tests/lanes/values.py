"""Values of the types that travel, drawn from a seed: usual ones, ones at their bounds, and absurd ones.

The types say what is allowed (``_core/bounds.py``); what is drawn follows them, so that a new field or message is
covered as it comes. Values are plain data, as JSON has them: only so can an absurd one be written.
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
    """Draws with one generator of random numbers. ``absurdity``: how often a value is not of its type's."""

    def __init__(self, dice: random.Random, absurdity: float = 0.0) -> None:
        self.dice = dice
        self.absurdity = absurdity

    def of(self, kind: Any) -> Any:
        """One value of this type, as plain data."""
        return self._value(_info(kind), "", 0)

    def _value(self, info: Any, name: str, depth: int) -> Any:
        dice = self.dice
        if self.absurdity and dice.random() < self.absurdity:
            return dice.choice(ABSURD)
        usual = USUAL.get(name)
        if usual is not None and not isinstance(info, inspect.StructType) and dice.random() < 0.8:
            return dice.choice(usual)
        match info:
            case inspect.IntType():
                return self._integer(info)
            case inspect.FloatType():
                low, high = _or(info.ge, -1e9), _or(info.le, 1e9)
                return dice.choice((low, high, max(low, 0.0), max(low, 1.0), dice.uniform(max(low, -9), min(high, 99))))
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
                return self._value(dice.choice(info.types), name, depth)
            case inspect.EnumType():
                return dice.choice([each.value for each in info.cls])
            case inspect.StructType():
                return self._struct(info, depth)
            case inspect.BoolType():
                return dice.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.BytesType():
                return "AAAA" * dice.choice((0, 1, 4))
        return dice.choice((None, 1, "x", [], {}))

    def _struct(self, info: Any, depth: int) -> dict[str, Any]:
        drawn: dict[str, Any] = {}
        if info.tag_field is not None:
            drawn[info.tag_field] = info.tag
        for field in info.fields:
            if field.required or self.dice.random() < (0.6 if depth < 3 else 0.2):
                drawn[field.encode_name] = self._value(field.type, field.encode_name, depth + 1)
        return drawn

    def _integer(self, info: Any) -> int:
        low = _or(info.ge, _or(info.gt, -(1 << 62)))
        high = _or(info.le, _or(info.lt, 1 << 62) - 1)
        near = [each for each in (0, 1, 2, 3, 7) if low <= each <= high]
        return self.dice.choice((low, high, low + 1, high - 1, *near, *near))

    def _text(self, info: Any) -> str:
        texts = ["x", "why", "RuntimeError: boom", "ünïcödé", "-", "0,1-3", "start"]
        if not info.pattern:
            texts += ["two\nlines", "\x1b[31mred", "\u202eabc", " " * 50, "Ranks 1, 2 failed to pass monitoredBarrier"]
        if info.max_length is not None and self.dice.random() < 0.01:
            texts = ["x" * info.max_length]
        if not info.min_length:
            texts.append("")
        return self.dice.choice(texts)

    def _count(self, depth: int) -> int:
        return self.dice.choice((0, 1, 1, 2, 3) if depth < 4 else (0, 0, 1))

    def json(self, kind: Any) -> bytes:
        """One value, as JSON that may be damaged."""
        text = json.dumps(self.of(kind)).encode()
        if self.absurdity and self.dice.random() < 0.1:
            return self.damaged(text)
        return text

    def damaged(self, data: bytes) -> bytes:
        """The bytes, torn, doubled, changed or nested."""
        dice, at = self.dice, self.dice.randrange(len(data) + 1)
        match dice.randrange(6):
            case 0:
                return data[:at]
            case 1:
                return data[at:] + data
            case 2:
                return data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]
            case 3:
                return data[:at] + dice.randbytes(dice.randrange(20)) + data[at:]
            case 4:
                return data[:at] + b"[" * dice.choice((10, 900, 5000)) + data[at:]
        return data[:at] + data[dice.randrange(len(data) + 1) :]


@functools.cache
def _info(kind: Any) -> Any:
    return inspect.type_info(kind)


def _or(bound: Any, otherwise: Any) -> Any:
    return otherwise if bound is None else bound
