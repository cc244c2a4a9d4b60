"""Describes exit codes and signals in plain text. Pure: numbers in, text out."""

from __future__ import annotations

import signal

_SIGNALS = {  # what the name does not explain
    "SIGHUP": "terminal or session closed",
    "SIGILL": "illegal instruction",
    "SIGTRAP": "debugger trap",
    "SIGABRT": "aborted by itself",
    "SIGBUS": "missing mapped memory, such as full /dev/shm",
    "SIGFPE": "arithmetic error",
    "SIGSEGV": "invalid memory access",
    "SIGPIPE": "wrote to a closed pipe",
    "SIGALRM": "alarm timer",
    "SIGXCPU": "CPU time limit",
    "SIGXFSZ": "file size limit",
    "SIGSYS": "forbidden system call",
}

_EXIT_CODES = {120: "Python could not flush its output", 126: "found but not executable", 127: "command not found"}


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9; ``signal 77`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        first, last = getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", 0)
        return f"SIGRTMIN+{number - first}" if first < number < last else f"signal {number}"


def describe_signal(number: int) -> str:
    """Return ``SIGKILL`` or ``SIGSEGV (invalid memory access)``."""
    name = signal_name(number)
    meaning = _SIGNALS.get(name)
    return f"{name} ({meaning})" if meaning else name


def describe_exit(exit_code: int) -> str:
    """Return ``exited with code 1`` or ``was killed by SIGKILL``. Negative codes are signals."""
    if exit_code < 0:
        return f"was killed by {describe_signal(-exit_code)}"
    meaning = _EXIT_CODES.get(exit_code, "")
    if 128 < exit_code <= 128 + 64 and (name := signal_name(exit_code - 128)).startswith("SIG"):
        meaning = f"a shell's code for a command killed by {name}"
    return f"exited with code {exit_code}" + (f" ({meaning})" if meaning else "")
