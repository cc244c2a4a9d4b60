"""A replaced ``sys.stdout`` or ``sys.stderr``: teed lines go to the object that the program put there.

The log writer writes to descriptors, so it gets a pipe, and a thread of this process writes the lines to the object.
This module is imported only if a stream was replaced; otherwise the log writer writes to the terminal itself.
"""

from __future__ import annotations

import os
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

_READ_BYTES = 1 << 16


class ReplacedStream:
    """Writes whole lines to the object, in order. If it raises, the log writer counts the rest as lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._read_end, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._copy_lines, name="tenax replaced stream", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Wait until the object has all lines, or for ``timeout_s``. Call this after the log writer has exited."""
        os.close(self.descriptor)
        self._thread.join(timeout_s)

    def _copy_lines(self) -> None:
        try:
            rest = b""
            while data := os.read(self._read_end, _READ_BYTES):
                lines, newline, rest = (rest + data).rpartition(b"\n")
                self._write(lines + newline)
            self._write(rest)
        except Exception as error:
            import sys

            if sys.__stderr__ is not None:
                name = type(self._stream).__name__
                message = f"tenax: could not write to the {name} that replaces sys.stdout or sys.stderr: {error}"
                print(message, file=sys.__stderr__)
        finally:
            os.close(self._read_end)

    def _write(self, lines: bytes) -> None:
        if lines:
            self._stream.write(lines.decode("utf-8", "replace"))
            self._stream.flush()
