"""Formatting for Prometheus's text format (version 0.0.4). Pure."""

from __future__ import annotations

import math

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({'"': '\\"', "\\": "\\\\", "\n": "\\n"})


def plain(name: str) -> str:
    text = "".join(each if each.isascii() and (each.isalnum() or each == "_") else "_" for each in name)
    return f"_{text}" if text[:1].isdigit() else text


def in_braces(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = (f'{plain(name)}="{escaped(str(value))}"' for name, value in sorted(labels.items()))
    return f"{{{','.join(pairs)}}}"


def escaped(value: str) -> str:
    """Escape a label's value."""
    return value.translate(_ESCAPES) if '"' in value or "\\" in value or "\n" in value else value


def in_text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
