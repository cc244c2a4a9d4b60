"""Undo: reverts the effect of one call."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Undo:
    """Reverts once, when called or at the end of a ``with`` block. Later calls do nothing."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo: Callable[[], object] | None = undo

    def __call__(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, *_: object) -> None:
        self()
