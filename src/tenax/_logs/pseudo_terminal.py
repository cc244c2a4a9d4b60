"""A pseudo-terminal for the output of a worker that has the console to itself, so that it prints as without a launcher.

Progress bars, colours and prompts depend on whether stdout is a terminal, and how wide it is. The bytes pass unchanged:
the console's own terminal adds what a terminal adds.
"""

from __future__ import annotations

import fcntl
import os
import termios
from contextlib import suppress


def open_pseudo_terminal(terminal: int) -> tuple[int, int]:
    """Return the end to read from and the worker's end, with the size of this terminal. Raises OSError."""
    read_end, write_end = os.openpty()
    mode = termios.tcgetattr(write_end)
    mode[1] &= ~termios.OPOST  # no carriage return before newlines
    mode[3] &= ~termios.ECHO
    termios.tcsetattr(write_end, termios.TCSANOW, mode)
    copy_size(terminal, read_end)
    return read_end, write_end


def copy_size(terminal: int, pseudo_terminal: int) -> None:
    with suppress(OSError):  # the terminal is gone
        size = fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8))
        if size != fcntl.ioctl(pseudo_terminal, termios.TIOCGWINSZ, bytes(8)):
            fcntl.ioctl(pseudo_terminal, termios.TIOCSWINSZ, size)
