"""What the ranks must agree on: the parts of a training state, and their form on the wire.

On the wire a state is JSON, in which tensors, arrays and bytes are replaced by their number, and these buffers. Nothing
is pickled: a received state is data, not code.
"""

from __future__ import annotations

import sys
from typing import Any

from tenax.elastic import _torch

_cuts = 0  # how often an exception has cut an update in this process
_cuts_agreed = 0  # of these, before the last agreement


def cut() -> None:
    """An exception has cut an update: every state that exists may be a mixture of two steps."""
    global _cuts  # noqa: PLW0603 - which states an update changes is not known
    _cuts += 1


class State:
    """The state of the training, by name: ``State(model=model, optimizer=optimizer, step=0)``.

    The parts are attributes: ``state.step += 1``. A part is an object with ``state_dict`` and ``load_state_dict``, a
    tensor, an array, or a plain value: None, a number, a string, bytes, or a list, tuple or dict of these. ``step`` is
    the number of completed steps. Use the model itself, not ``DistributedDataParallel``, which belongs to a generation.

    ``sharded``: every rank has a part of the state that no other rank has. Then the state in memory is used only if all
    ranks still have theirs, at the same step; otherwise all ranks restore the checkpoint.
    """

    def __init__(self, *, step: int = 0, sharded: bool = False, **parts: Any) -> None:
        for name in parts:
            if name.startswith("_"):
                raise ValueError(f"the name of a part does not begin with an underscore: {name}")
        self.step = step
        self._names = tuple(parts)
        self._is_sharded = sharded
        self._place: tuple[int, int] | None = None  # rank and world size at the last agreement
        # The number of cuts when it was whole; None: it is being replaced. The parts of a state that is made after a
        # cut may be those that were cut, unless there was an agreement in between.
        self._whole_at: int | None = _cuts_agreed
        self._kept: Any = None  # what a step that is not completed may have changed
        for name, part in parts.items():
            setattr(self, name, part)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the state has no part {name!r}; its parts: step, {', '.join(self._names)}")

    def _parts(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self._names]

    @property
    def _is_torn(self) -> bool:
        """Whether an exception has cut an update, or the replacement, of this state since it was whole."""
        return self._whole_at != _cuts

    def _begin_replacement(self) -> None:
        self._whole_at = None

    def _end_agreement(self, place: tuple[int, int]) -> None:
        global _cuts_agreed  # noqa: PLW0603 - as above
        self._place = place
        self._whole_at = _cuts_agreed = _cuts

    def _encode(self) -> tuple[Any, list[Any]]:
        """Return the state as JSON, and its buffers."""
        buffers: list[Any] = []
        parts = [[name, _encode(_content(name, part), buffers, name)] for name, part in self._parts()]
        return {"step": self.step, "parts": parts}, buffers

    def _load(self, encoded: Any, buffers: list[Any]) -> None:
        """Replace the parts by those that another rank has encoded."""
        names = [name for name, _ in encoded["parts"]]
        if names != list(self._names):
            raise ValueError(f"the state has the parts {list(self._names)} here and {names} on another rank")
        for name, content in encoded["parts"]:
            part, new = getattr(self, name), _decode(content, buffers)
            if hasattr(part, "load_state_dict"):
                part.load_state_dict(new)
            elif not _torch.copied(part, new):
                setattr(self, name, new)
        self.step = encoded["step"]


def _content(name: str, part: Any) -> Any:
    if type(part).__name__ == "DistributedDataParallel":
        raise TypeError(f"state.{name} is DistributedDataParallel, which belongs to a generation: use the model itself")
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return part.state_dict()
    return part


def _encode(value: Any, buffers: list[Any], path: str) -> Any:
    """JSON objects occur only as marks: of a dict, a tuple, or a buffer."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        encoded = [
            [_encode(key, buffers, path), _encode(each, buffers, f"{path}[{key!r}]")] for key, each in value.items()
        ]
        return {"dict": encoded}
    if isinstance(value, list | tuple):
        items = [_encode(each, buffers, f"{path}[{at}]") for at, each in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, bytes | bytearray):
        return _mark(buffers, value, "bytes", len(value))
    if _torch.is_tensor(value):
        return _mark(buffers, *_torch.described(value, path))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
        return value.item()
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        whole = numpy.ascontiguousarray(value)
        flat = whole.reshape(-1).view("u1").data
        return _mark(buffers, flat, "array", whole.nbytes, whole.dtype.str, list(value.shape))
    raise TypeError(
        f"state.{path} is of the type {type(value).__name__}, which cannot be sent to another rank: use plain values, "
        "tensors, arrays, or an object with state_dict and load_state_dict"
    )


def _mark(buffers: list[Any], buffer: Any, kind: str, *details: Any) -> dict[str, Any]:
    """``details``: the number of bytes, and what the buffer is made of."""
    buffers.append(buffer)
    return {"buffer": len(buffers) - 1, "kind": kind, "details": details}


def _decode(value: Any, buffers: list[Any]) -> Any:
    if isinstance(value, list):
        return [_decode(each, buffers) for each in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {_decode(key, buffers): _decode(each, buffers) for key, each in value["dict"]}
    if "tuple" in value:
        return tuple(_decode(each, buffers) for each in value["tuple"])
    buffer = buffers[value["buffer"]]
    if value["kind"] == "array":
        from importlib import import_module

        numpy = import_module("numpy")  # the script's, of the rank that has sent an array
        _, kind, shape = value["details"]
        return numpy.frombuffer(bytes(buffer), kind).reshape(shape).copy()
    return buffer.to(value["details"][3]) if value["kind"] == "tensor" else bytes(buffer)  # on a device of its kind
