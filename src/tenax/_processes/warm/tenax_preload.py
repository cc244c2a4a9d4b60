"""Imports modules in a template and checks after each one that the process is still safe to fork.

A module is left out, with a reason, if a worker forked after its import would differ from one that imported it itself:
a missing thread; a shared open file, socket or device; a child process of the template; an initialised accelerator; a
variable that was read (or set) before the worker had its own value; seeded random numbers; a timer; a changed working
directory or import path.
"""

import contextlib
import gc
import importlib.machinery
import os
import random
import signal
import sys
import tempfile
import threading
import time

import tenax_imports  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

# Modules whose import has effects that cannot be observed from here.
_KNOWN_UNSAFE = {
    "mpi4py.MPI": "it initializes MPI when it is imported, and a process can do that only once",
    "horovod.common.basics": "it may start its own runtime when it is imported",
}
# Packages that read LOCAL_RANK after imports of a second and more. Trying them would delay the workers by as much.
_READ_LOCAL_RANK = frozenset({"lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics"})
_SEEDS = "it seeds a random number generator when it is imported"
_HARMLESS = frozenset({"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"})
_MAX_ERROR_LENGTH = 300  # characters
_MAX_EXPLICIT_SEED = 1 << 32  # torch's own random seed has 64 bits
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/habanalabs", "/dev/davinci")


class Trial:
    """The process that tries to import modules. Its children are not watched."""

    pid = 0
    writer = -1  # a pipe to the process that forked it
    name = ""  # the module that it imports now

    @classmethod
    def report(cls, line: str) -> None:
        os.write(cls.writer, f"{line}\0".encode())

    @classmethod
    def leave_out(cls, why: str) -> None:
        cls.report(f"left {cls.name} {why}")
        os._exit(0)


class Selection:
    """The modules to import, by name; ``auto`` stands for what the script imports."""

    def __init__(self, modules: "list[str]") -> None:
        self.names: list[str] = []  # in order
        self.left_out: dict[str, str] = {}
        self._chosen: set[str] = set()  # by ``auto``
        for name in modules:
            if name == "auto":
                with script_folder_first():
                    found, late = tenax_imports.third_party_imports(_script())
                self._chosen.update(found)
                self.left_out.update({name: why for name, why in late.items() if name not in modules})
                for found_name in found:
                    package = found_name.partition(".")[0]
                    if package in _READ_LOCAL_RANK and package not in modules:
                        self.left_out[package] = why_late("reads", "LOCAL_RANK")
                    else:
                        self.names.append(found_name)
            else:
                self.names.append(name)
        self.names = list(dict.fromkeys(self.names))

    def why_not(self, name: str, before: "set[str]") -> str:
        """Reject an ``auto`` module that imported a file of the user, which may change between generations."""
        if name not in self._chosen:
            return ""
        main = sys.modules["__main__"]  # which multiprocessing gives a second name
        for other in [other for other, module in sys.modules.items() if other not in before and module is not main]:
            path = getattr(sys.modules.get(other), "__file__", None)
            if isinstance(path, str) and os.path.isabs(path) and tenax_imports.is_user_file(path):
                return f"it imports {other} ({path}), which is one of your files and may change"
        return ""


@contextlib.contextmanager
def no_collections() -> "Iterator[None]":
    """Import without garbage collections: they take a tenth of the time or more, and find next to nothing.

    The threshold is changed and not ``gc.disable`` called, which a module may do for its own reasons.
    """
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == 0:  # a threshold that a module has set stays
            gc.set_threshold(*before)


def import_module(name: str) -> str:
    """Import a module. Return why that failed, or an empty string."""
    try:
        __import__(name)
    except BaseException as error:  # SystemExit too: the worker that imports it will exit by itself
        text = " ".join(str(error).replace("\0", " ").split())  # some messages are a page long
        return f"it cannot be imported ({type(error).__name__}: {text[:_MAX_ERROR_LENGTH]})"
    return ""


# --- the script -------------------------------------------------------------------------------------------------------


def _script() -> "tuple[str, bool]":
    """Return what the interpreter is going to run, and whether that is a module name."""
    words = sys.orig_argv[1:]
    while words and words[0].startswith("-") and words[0] != "-m":
        words.pop(0)
    if words and words[0] == "-m":
        return words[1], True
    return words[0], False


@contextlib.contextmanager
def script_folder_first() -> "Iterator[None]":
    """Put the script's folder first on the import path, as the interpreter does before it runs the script."""
    name, is_module = _script()
    if is_module:
        folder = os.getcwd()
    elif os.path.isdir(name):
        folder = name
    else:
        folder = os.path.dirname(os.path.abspath(os.path.realpath(name) if os.path.islink(name) else name))
    if getattr(sys.flags, "safe_path", False) and not os.path.isdir(name):
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


class _Arguments(list):  # type: ignore[type-arg]
    """``sys.argv`` if it differs between workers. Only the first, the script, may be read."""

    def __getitem__(self, index: "Any") -> "Any":
        if index != 0:
            self._reject()
        return super().__getitem__(index)

    def __iter__(self) -> "Iterator[Any]":
        self._reject()
        return super().__iter__()

    def __len__(self) -> int:
        self._reject()
        return super().__len__()

    def _reject(self) -> None:
        Trial.leave_out("it reads the arguments when it is imported, and each worker has its own")


@contextlib.contextmanager
def script_as_main(has_own_arguments: bool) -> "Iterator[None]":
    """Give ``__main__`` its file: some libraries take a ``__main__`` without one for an interactive session.

    And watch the arguments, if each worker has its own.
    """
    name, is_module = _script()
    main, arguments = sys.modules["__main__"], sys.argv
    if not is_module:
        main.__file__ = os.path.abspath(name)
    if has_own_arguments:
        sys.argv = _Arguments(arguments)
    try:
        yield
    finally:
        sys.argv = arguments
        if not is_module:
            del main.__file__


# --- the environment --------------------------------------------------------------------------------------------------


_HOOK_MARK = "TENAX_RECORD_UNCAUGHT"  # PYTHONPATH without tenax's hooks: "unset", or "=" and the value


def restore_pythonpath() -> None:
    """Set PYTHONPATH to what the script will see, without tenax's hooks."""
    before = os.environ.pop(_HOOK_MARK, "unset")
    if before == "unset":
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = before[1:]


_changes: "dict[str, str | None]" = {}  # what the imports changed in the environment; None: removed


def apply_environment_changes() -> None:
    """Repeat in a worker what the imports changed."""
    for name, value in _changes.items():
        if name == "PYTHONPATH" and _HOOK_MARK in os.environ:  # the next hook restores it from here
            os.environ[_HOOK_MARK] = "unset" if value is None else f"={value}"
        elif value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def why_late(action: str, name: str) -> str:
    return f"it {action} {name} when it is imported, and only workers have that"


@contextlib.contextmanager
def watched_environment(late: "frozenset[str]") -> "Iterator[None]":
    """Leave out a module that accesses a variable that only a worker has, and record changes to all others.

    ``os.environ`` stays the same object, because modules keep references to it. Iterating over it is not watched: many
    libraries do (tqdm, fsspec) to find their own variables.
    """
    kind = type(os.environ)
    before = dict(os.environ)

    def check(action: str, name: object) -> None:
        text = os.fsdecode(name) if isinstance(name, bytes) else name
        if text in late and os.getpid() == Trial.pid:
            Trial.leave_out(why_late(action, text))

    class Watched(kind):  # type: ignore[valid-type, misc]
        def __getitem__(self, key: "str | bytes") -> "Any":
            check("reads", key)
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            check("reads", key)
            return bool(super().__contains__(key))

        def __setitem__(self, key: "Any", value: "Any") -> None:
            check("sets", key)
            super().__setitem__(key, value)

        def __delitem__(self, key: "Any") -> None:
            check("deletes", key)
            super().__delitem__(key)

    for environ in (os.environ, os.environb):
        environ.__class__ = Watched
    try:
        yield
    finally:
        for environ in (os.environ, os.environb):
            environ.__class__ = kind
        now = dict(os.environ)
        _changes.update({name: now.get(name) for name in (before | now) if before.get(name) != now.get(name)})


@contextlib.contextmanager
def watched_calls() -> "Iterator[None]":
    """Watch calls that leave no observable state. A wrapper kept beyond this context just calls the original."""
    is_watching = True

    def watch(owner: "Any", name: str, why: str, matches: "Callable[..., Any]" = lambda *_, **__: True) -> "Any":
        """Leave out a module that calls this function with arguments that match."""
        function = getattr(owner, name)

        def call(*args: "Any", **options: "Any") -> "Any":
            if is_watching and os.getpid() == Trial.pid and matches(*args, **options):
                Trial.leave_out(why)
            return function(*args, **options)

        setattr(owner, name, call)
        return owner, name, function

    def watch_temporary(name: str, path_of: "Callable[[Any], str]") -> "Any":
        function = getattr(tempfile, name)

        def make(*args: "Any", **options: "Any") -> "Any":
            made = function(*args, **options)
            if is_watching and os.getpid() == Trial.pid:
                _temporary_paths.append(os.fsdecode(path_of(made)))
            return made

        setattr(tempfile, name, make)
        return tempfile, name, function

    anew = "it executes the program again when it is imported"
    replaced = [
        watch(random, "seed", _SEEDS, lambda *args, **options: args or options),
        watch(os, "execv", anew),
        watch(os, "execve", anew),
        watch_temporary("mkdtemp", lambda made: made),
        watch_temporary("mkstemp", lambda made: made[1]),
        watch_temporary("_mkstemp_inner", lambda made: made[1]),
        watch(signal, "pthread_sigmask", "it changes which signals are blocked", lambda _, mask: bool(mask)),
    ]
    try:
        yield
    finally:
        is_watching = False
        for owner, name, function in replaced:
            setattr(owner, name, function)


_temporary_paths: "list[str]" = []  # temporary files and folders


# --- the process ------------------------------------------------------------------------------------------------------


class Condition:
    """The state of this process before the imports, with the script's folder on the import path."""

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._mask = _umask()
        self._arguments = sys.argv, list.copy(sys.argv)
        self._first_on_path = sys.path[:1]
        self._descriptors = _descriptors()

    def reasons_not_to_fork(self) -> "Iterator[str]":
        yield from (why for name, why in _KNOWN_UNSAFE.items() if name in sys.modules)
        opened = [path for number, path in _descriptors().items() if self._descriptors.get(number) != path]
        for path in opened:
            if path.startswith(_ACCELERATORS):
                yield f"it has initialised an accelerator ({path} is open), which a forked process cannot use"
        yield from (f"it keeps {path} open, which all workers would share" for path in opened if path not in _HARMLESS)
        torch_cuda = sys.modules.get("torch.cuda")
        if torch_cuda is not None and torch_cuda.is_initialized():
            yield "it has initialised CUDA, which a forked process cannot use"
        yield from _processes_and_threads()
        if _is_seeded():
            yield _SEEDS
        for path in _temporary_paths:
            if os.path.exists(path):
                made = f"it creates a temporary file or folder when it is imported ({path})"
                yield f"{made}, which every worker would remove"
        if os.getcwd() != self._folder:
            yield f"it changes the working directory (to {os.getcwd()})"
        if _umask() != self._mask:
            yield "it changes the umask"
        if sys.argv is not self._arguments[0] or list.copy(sys.argv) != self._arguments[1]:
            yield "it changes sys.argv"
        if sys.path[:1] != self._first_on_path:
            yield "it puts a folder before the script's on sys.path"
        if any(signal.getitimer(kind)[0] for kind in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)):
            yield "it sets a timer, which a forked process does not have"


def reasons_against_template(own: "set[int]") -> "Iterator[str]":
    """Yield why not even an empty template is safe to fork: .pth files run code in every interpreter."""
    library = os.path.dirname(os.__file__)
    for name in ("sitecustomize", "usercustomize"):  # the environment's own
        spec = importlib.machinery.PathFinder.find_spec(name, [entry for entry in sys.path if not _is_hook(entry)])
        path = getattr(spec, "origin", None)
        real = os.path.realpath(path or "")
        # /etc/python3: the crash reporter of a Linux distribution
        if path and os.path.dirname(real) != os.path.realpath(library) and not real.startswith("/etc/python3"):
            yield f"this Python has a {name} ({path}), which must run before any import"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:  # a container may forbid it
        yield f"this system does not support pidfd_open ({error.strerror})"
    found = _descriptors().items()
    foreign = [f"it keeps {path} open" for number, path in found if number not in own and path not in _HARMLESS]
    for why in (*_processes_and_threads(), *foreign):
        yield f"this Python's startup code cannot be forked: {why}"


def _is_hook(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "sitecustomize.py")) and os.path.basename(folder) in ("hook", "warm")


def _is_seeded() -> bool:
    """Return whether there are explicit seeds: ``reset_process_state`` reseeds every worker and would undo them."""
    numpy_random = sys.modules.get("numpy.random.mtrand")
    torch = sys.modules.get("torch")
    return (
        numpy_random is not None and getattr(numpy_random._rand._bit_generator, "_seed_seq", "unknown") is None
    ) or (torch is not None and hasattr(torch, "initial_seed") and torch.initial_seed() < _MAX_EXPLICIT_SEED)


def _processes_and_threads() -> "Iterator[str]":
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = file.read().split()
    if children:
        yield f"a process that it started is alive ({', '.join(map(_name_of, children[:3]))})"
    if len(os.listdir("/proc/self/task")) == 1:
        return
    # Only threads that survive a trial fork: some libraries end theirs before a fork and restart them on demand.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = [entry for entry in os.listdir("/proc/self/task") if int(entry) != os.getpid()]
    if threads:
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        shown = ", ".join((names or [_name_of(f"self/task/{thread}") for thread in threads])[:3])
        count = "a thread" if len(threads) == 1 else f"{len(threads)} threads"
        yield f"it has started {count} ({shown}), which a forked process would not have"


def _name_of(process: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{process}/comm") as file:
        return file.read().strip()
    return "?"  # it has exited


def _descriptors() -> "dict[int, str]":
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
    return found


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# --- in the worker ----------------------------------------------------------------------------------------------------


def reset_process_state() -> None:
    """Renew state that must differ between processes. (``random`` reseeds itself after a fork.)"""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "default_generator"):
        torch.default_generator.seed()
    for folder in [folder for folder, finder in sys.path_importer_cache.items() if finder is None]:
        del sys.path_importer_cache[folder]  # it did not exist then, but may now
    main_thread = threading.main_thread()
    if hasattr(main_thread, "_set_native_id"):
        main_thread._set_native_id()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
    logging = sys.modules.get("logging")
    if logging is not None:  # what relativeCreated counts from
        name = "_startTime"
        is_ns = isinstance(getattr(logging, name), int)
        setattr(logging, name, time.time_ns() if is_ns else time.time())
