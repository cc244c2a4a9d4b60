"""The functions that workers of ``test_function_workers.py`` run.

Not in the module of tests, because a spawned worker would import pytest with it, for 0.2 s.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import types
from typing import Any

from kit.descriptors import descriptors

OPEN_FILES: list[Any] = []


def add(a: int, b: int) -> dict[str, int]:
    return {"sum": a + b}


def do_nothing() -> None: ...


def make_bytes(megabytes: int) -> bytes:
    return bytes(megabytes << 20)


class Callable_:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, other: int) -> int:
        return self.number + other

    def method(self, other: int) -> int:
        return self.number * other


def fail(text: str) -> None:
    raise ValueError(text)


def kill_this_process(number: int) -> None:
    os.kill(os.getpid(), number)
    signal.pause()


def interrupt() -> None:
    raise KeyboardInterrupt


def return_a_lambda() -> object:
    return lambda: 1


def return_an_unknown_class() -> object:
    module = types.ModuleType("only_in_the_worker")
    sys.modules[module.__name__] = module
    exec("class Private: pass", vars(module))
    return module.Private()


def write_half_a_result(then: int) -> None:
    (result,) = (number for number, what in descriptors().items() if "tenax-result" in what)
    os.write(result, b"\x40\0\0")
    if then < 0:
        os.kill(os.getpid(), -then)
    os._exit(then)


def use(queue: Any, lock: Any, total: Any, pipe: Any, event: Any) -> str:
    with lock:
        total.value += 41
    for number in range(100):
        queue.put(number)
    pipe.send("through a pipe")
    event.set()
    return "done"


def read_at_import() -> str:
    import reads_its_environment  # type: ignore[import-not-found]

    return str(reads_its_environment.SEEN)


def environment() -> dict[str, str]:
    return dict(os.environ)


def finish_in_a_thread() -> None:
    started = threading.Event()

    def say_late() -> None:
        started.wait()
        print("late")

    threading.Thread(target=say_late).start()
    atexit.register(print, "at exit")
    started.set()


def print_to(stream: str) -> None:
    print(f"to {stream}", file=getattr(sys, stream), end="")


def leave_files_open(folder: str) -> None:
    """Leave one file of each buffered kind open, with data in its buffer."""
    for name, mode in (("text", "w"), ("bytes", "wb"), ("both", "w+b")):
        file = open(f"{folder}/{name}", mode)  # noqa: SIM115 - stays open
        file.write("last" if mode == "w" else b"last")
        OPEN_FILES.append(file)


def write_to_a_closed_pipe() -> str:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        os.write(writer, b"x")
    except BrokenPipeError:
        return "an exception"
    return "nothing"


def process_state() -> dict[str, Any]:
    return {
        "session": os.getsid(0) == os.getpid() == os.getpgrp(),
        "descriptors": sorted(descriptors()),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "wakeup": signal.set_wakeup_fd(-1),
        "main": threading.current_thread() is threading.main_thread(),
    }
