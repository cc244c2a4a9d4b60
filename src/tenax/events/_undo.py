"""Undo: takes back what one call did. Call it, or use it in a ``with``."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Undo:
    """Takes it back once; a second time does nothing."""

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
