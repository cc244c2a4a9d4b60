"""How a process ended, in words a tired person understands. Pure: numbers in, words out."""

from __future__ import annotations

import signal

_SIGNALS = {
    "SIGHUP": "its terminal or session went away",
    "SIGINT": "interrupted",
    "SIGQUIT": "asked to quit",
    "SIGILL": "illegal instruction",
    "SIGTRAP": "debugger trap",
    "SIGABRT": "aborted itself",
    "SIGBUS": "memory that is mapped but not there, such as full shared memory",
    "SIGFPE": "arithmetic error",
    "SIGKILL": "killed",
    "SIGUSR1": "user signal 1",
    "SIGUSR2": "user signal 2",
    "SIGSEGV": "invalid memory access",
    "SIGPIPE": "wrote to a pipe that nobody reads",
    "SIGALRM": "alarm clock",
    "SIGTERM": "asked to end",
    "SIGXCPU": "CPU time limit",
    "SIGXFSZ": "file size limit",
    "SIGSYS": "forbidden system call",
}

_EXIT_CODES = {
    120: "Python could not write out its last output",
    126: "found but not executable",
    127: "command not found",
}


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 77`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        first, last = getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", 0)
        return f"SIGRTMIN+{number - first}" if first < number < last else f"signal {number}"


def signal_in_words(number: int) -> str:
    """``SIGKILL (killed)``."""
    name = signal_name(number)
    words = _SIGNALS.get(name)
    return f"{name} ({words})" if words else name


def ended_in_words(exit_code: int) -> str:
    """``exited with code 1``, ``ended by SIGKILL (killed)``. Negative codes are signals."""
    if exit_code < 0:
        return f"ended by {signal_in_words(-exit_code)}"
    words = _EXIT_CODES.get(exit_code, "")
    if 128 < exit_code <= 128 + 64 and (name := signal_name(exit_code - 128)).startswith("SIG"):
        words = f"how a shell says that its command was ended by {name}"
    return f"exited with code {exit_code}" + (f" ({words})" if words else "")
