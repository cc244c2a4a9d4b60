"""What a template imports, and whether it can be forked afterwards: looked at, not hoped for.

A module is left out, with a sentence that says why, when a worker forked after its import would differ from one that
imported it itself: a thread that would be missing, an open file, socket or device that would be shared, a process that
would be somebody else's child, an accelerator that was initialised, a variable that was read (or set) before the
worker had its own, a working directory or an import path that is not the script's any more.
"""

import contextlib
import os
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# Modules that do at import what leaves no trace that we could see.
_KNOWN = {
    "mpi4py.MPI": "it joins MPI when it is imported, and a process can do that only once",
    "horovod.common.basics": "it may start its own runtime when it is imported",
}
_HARMLESS = frozenset({"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"})
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/habanalabs", "/dev/davinci")


def wanted(modules: "list[str]") -> "list[str]":
    """The modules by name, in order; what the script imports itself where ``auto`` stands."""
    names: list[str] = []
    for name in modules:
        if name == "auto":
            import tenax_imports  # type: ignore[import-not-found]

            with script_folder_first():
                names += tenax_imports.of_others(_script())
        else:
            names.append(name)
    return list(dict.fromkeys(names))


def bring_in(name: str) -> str:
    """Import it. Returns why that was not possible."""
    try:
        __import__(name)
    except BaseException as error:  # SystemExit too: the worker that imports it will end by itself
        return f"it cannot be imported ({type(error).__name__}: {error})".replace("\0", " ")
    return ""


# --- where the script is ----------------------------------------------------------------------------------------------


def _script() -> "tuple[str, bool]":
    """What the interpreter is going to run, and whether that is the name of a module."""
    words = sys.orig_argv[1:]
    while words and words[0].startswith("-") and words[0] != "-m":
        words.pop(0)
    if words and words[0] == "-m":
        return words[1], True
    return words[0], False


@contextlib.contextmanager
def script_folder_first() -> "Iterator[None]":
    """The import path as the script will find it. The interpreter puts that folder there itself, later."""
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


# --- the environment --------------------------------------------------------------------------------------------------


class Environment:
    """Which variables were read or set that only a worker can know, and what was changed otherwise."""

    def __init__(self, late: "frozenset[str]") -> None:
        self._late = late
        self._before = dict(os.environ)
        self.touched: list[tuple[str, str]] = []  # what was done, to which variable

    def note(self, deed: str, name: object) -> None:
        if name in self._late:
            self.touched.append((deed, str(name)))

    def changes(self) -> "list[tuple[str, str | None]]":
        """What is different now; None: it is not set any more."""
        now = dict(os.environ)
        gone: list[tuple[str, str | None]] = [(name, None) for name in self._before if name not in now]
        return gone + [(name, value) for name, value in now.items() if self._before.get(name) != value]


@contextlib.contextmanager
def watched_environment(late: "frozenset[str]") -> "Iterator[Environment]":
    """``os.environ`` stays the object that it is: modules keep references to it."""
    seen = Environment(late)
    kind = type(os.environ)

    class Watched(kind):  # type: ignore[valid-type, misc]
        def __getitem__(self, key: str) -> str:
            seen.note("reads", key)
            return super().__getitem__(key)  # type: ignore[no-any-return]

        def __contains__(self, key: object) -> bool:
            seen.note("reads", key)
            return bool(super().__contains__(key))

        def __setitem__(self, key: str, value: str) -> None:
            seen.note("sets", key)
            super().__setitem__(key, value)

    os.environ.__class__ = Watched
    try:
        yield seen
    finally:
        os.environ.__class__ = kind


# --- the process ------------------------------------------------------------------------------------------------------


class Condition:
    """How this process was before anything was imported, with the script's folder on the import path."""

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._mask = _umask()
        self._arguments = list(sys.argv)
        self._first_on_path = sys.path[:1]
        self._descriptors = _descriptors()

    def why_it_cannot_be_forked(self, environment: Environment) -> str:
        """A sentence, or nothing."""
        return (
            _by_reputation()
            or self._by_environment(environment)
            or self._by_descriptors()
            or _by_accelerator()
            or _by_children()
            or _by_threads()
            or self._by_surroundings()
        )

    @staticmethod
    def _by_environment(environment: Environment) -> str:
        if not environment.touched:
            return ""
        deed, name = environment.touched[0]
        return f"it {deed} {name} when it is imported, and only a worker knows that"

    def _by_descriptors(self) -> str:
        opened = {number: path for number, path in _descriptors().items() if self._descriptors.get(number) != path}
        for path in opened.values():
            if path.startswith(_ACCELERATORS):
                return f"it has initialised an accelerator ({path} is open), which a forked process cannot use"
        for path in opened.values():
            if path not in _HARMLESS:
                return f"it keeps {path} open, which all workers would share"
        return ""

    def _by_surroundings(self) -> str:
        if os.getcwd() != self._folder:
            return f"it changes the working directory (to {os.getcwd()})"
        if _umask() != self._mask:
            return "it changes the file mode creation mask"
        if sys.argv != self._arguments:
            return "it changes sys.argv"
        if sys.path[:1] != self._first_on_path:
            return "it puts a folder in front of the script's on the import path"
        return ""


def why_no_template(own: "set[int]") -> str:
    """What runs at the start of every interpreter here (.pth files) may have done what cannot be forked already."""
    strange = [path for number, path in _descriptors().items() if number not in own and path not in _HARMLESS]
    why = _by_threads() or _by_children() or (f"it keeps {strange[0]} open" if strange else "")
    return f"of what this Python runs at its start: {why}" if why else ""


def _by_reputation() -> str:
    return next((why for name, why in _KNOWN.items() if name in sys.modules), "")


def _by_accelerator() -> str:
    torch_cuda = sys.modules.get("torch.cuda")
    if torch_cuda is not None and torch_cuda.is_initialized():
        return "it has initialised CUDA, which a forked process cannot use"
    return ""


def _by_children() -> str:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = file.read().split()
    if not children:
        return ""
    return f"a process that it started is alive ({', '.join(map(_name_of, children[:3]))})"


def _by_threads() -> str:
    """Some libraries end their threads before a fork and start them again when they need them: so try."""
    if len(os.listdir("/proc/self/task")) == 1:
        return ""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = [entry for entry in os.listdir("/proc/self/task") if int(entry) != os.getpid()]
    if not threads:
        return ""
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    told = names or [_name_of(f"self/task/{thread}") for thread in threads]
    is_one = len(threads) == 1
    return (
        f"it has started {'a thread' if is_one else f'{len(threads)} threads'} ({', '.join(told[:3])}), "
        f"which a forked process would not have"
    )


def _name_of(place: str) -> str:
    try:
        with open(f"/proc/{place}/comm") as file:
            return file.read().strip()
    except OSError:  # gone meanwhile
        return "?"


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


def begin_anew() -> None:
    """What is a process's own and was made while it was the template. (``random`` sees to itself at a fork.)"""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
    logging = sys.modules.get("logging")
    if logging is not None:  # what relativeCreated counts from
        name = "_startTime"
        is_ns = isinstance(getattr(logging, name), int)
        setattr(logging, name, time.time_ns() if is_ns else time.time())
