"""What a script imports first, read and not run: modules of others only.

1. Modules of others are those that were installed: what lies in a folder of packages (``site-packages``, or any with
   the ``.dist-info`` of one). The user's own files are looked through for what they import in turn but are not named:
   they may be edited between two generations, and a worker must find them as they are then. The standard library is
   not named either: it is there in no time.
2. Only what is certainly imported, and before anything else could have changed what an import means: reading goes in
   the order of execution and ends at the first statement that may set a variable, the import path, a module or a hook.
   That is a call whose value nobody wants, or an assignment to anything but a name.
"""

import ast
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_FILES = 500
_HARMLESS_CALLS = ("warnings", "logging")  # modules whose functions change no import


def of_others(script: "tuple[str, bool]") -> "tuple[list[str], dict[str, str]]":
    """Dotted names, in the order in which they are imported. The script's folder is first on ``sys.path``.

    And the first module that is imported too late for us to know what it will be, with the reason.
    """
    reading = _Reading(script)
    further = _Reading(script, to_the_end=True)
    missed = [name for name in further.found if name not in reading.found]
    why = f"{reading.end}, comes before its import and may change it; --preload {','.join(missed[:1])} does it anyway"
    return list(reading.found), dict.fromkeys(missed[:1], why)


class _Reading:
    """One look through a script and its own files."""

    def __init__(self, script: "tuple[str, bool]", *, to_the_end: bool = False) -> None:
        self.found: dict[str, None] = {}
        self.end = ""  # the place at which it had to end; empty: all was read
        self._seen: set[str] = set()
        self._goes_on = to_the_end
        name, is_module = script
        for path, module in _main_module(name) if is_module else _main_file(name):
            self._read(path, module)

    def _read(self, path: str, module: str) -> None:
        if path in self._seen or len(self._seen) >= _MAX_FILES or self.end:
            return
        self._seen.add(path)
        for node in _statements(path):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for name in _names(node, module, path):
                    self._import(name)
            elif not _is_harmless(node) and not self._goes_on:
                self.end = f"{os.path.basename(path)}, line {node.lineno}"
            if self.end:
                return

    def _import(self, name: str) -> None:
        folder = _folder_of(name)
        if folder is None:
            return
        if not _holds_packages(folder):
            for path, module in _own_files(name, folder):
                self._read(path, module)
        elif not self.end and ("." not in name or _file_of(name, folder) or _compiled(name, folder)):
            self.found[name] = None


def _main_file(script: str) -> "list[tuple[str, str]]":
    """With the name of its module, for relative imports: a script has none."""
    path = os.path.join(script, "__main__.py") if os.path.isdir(script) else script
    return [(os.path.abspath(path), "")] if os.path.isfile(path) else []


def _main_module(module: str) -> "list[tuple[str, str]]":
    folder = _folder_of(module)
    if folder is None:
        return []
    path = _file_of(f"{module}.__main__", folder)
    inside = _own_files(module, folder)
    return [*inside, (path, f"{module}.__main__")] if path else inside


def _own_files(module: str, folder: str) -> "list[tuple[str, str]]":
    """What is run when it is imported: its packages, then itself."""
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return [(path, name) for name in names if (path := _file_of(name, folder)) is not None]


# --- statements -------------------------------------------------------------------------------------------------------


def _statements(path: str) -> "Iterator[ast.stmt]":
    """What is certainly executed, one after the other; a block that may be is given as a whole."""
    try:
        with open(path, "rb") as file:
            waiting: list[ast.stmt] = ast.parse(file.read(), path).body
    except (OSError, SyntaxError, ValueError, RecursionError):  # the worker will say it
        return
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.If):
            certain = node.body if _is_main_guard(node.test) else node.orelse if _is_for_types(node.test) else None
            waiting[:0] = [_Doubtful(node)] if certain is None else certain
        elif isinstance(node, ast.Try):
            doubtful = [_Doubtful(handler) for handler in node.handlers]
            waiting[:0] = [*node.body, *doubtful, *node.orelse, *node.finalbody]
        elif isinstance(node, ast.With):
            waiting[:0] = node.body
        else:
            yield node


def _Doubtful(node: "ast.If | ast.ExceptHandler") -> ast.stmt:
    """A block of which nobody knows whether it is run: nothing is imported for it, but it may change something."""
    return ast.While(
        test=ast.Constant(value=True), body=[*node.body, *getattr(node, "orelse", [])], orelse=[], lineno=node.lineno
    )


def _is_harmless(node: ast.AST) -> bool:
    """Whether it cannot change what an import means, as far as one can see."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _is_harmless_call(node.value)
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
        targets = [node.target]
    if not all(isinstance(name, (ast.Name, ast.Tuple, ast.List)) for name in targets):
        return False
    return all(_is_harmless(child) for child in ast.iter_child_nodes(node) if isinstance(child, _WITH_STATEMENTS))


_WITH_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def _is_harmless_call(node: ast.expr) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    while isinstance(function, ast.Attribute):
        function = function.value
    return isinstance(function, ast.Name) and function.id in _HARMLESS_CALLS


def _is_for_types(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return name == "TYPE_CHECKING"


def _is_main_guard(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and test.left.id == "__name__"
        and isinstance(test.ops[0], ast.Eq)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value == "__main__"
    )


def _names(node: "ast.Import | ast.ImportFrom", module: str, path: str) -> "Iterator[str]":
    """What it imports; ``from a import b`` may mean a module ``a.b``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        package = module if os.path.basename(path) == "__init__.py" else module.rpartition(".")[0]
        parts = package.split(".")
        kept = parts[: len(parts) - node.level + 1]
        if not kept or not kept[0]:
            return
        base = ".".join([*kept, *([base] if base else [])])
    yield base
    yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


# --- places -----------------------------------------------------------------------------------------------------------


def is_own(path: str) -> bool:
    """Whether a file that was imported is the user's: found on the import path, and neither installed nor Python's."""
    library = os.path.join(os.path.dirname(os.__file__), "")
    folders = [os.path.join(os.path.abspath(folder), "") for folder in sys.path]
    holding = [folder for folder in folders if path.startswith(folder)]
    if not holding or (path.startswith(library) and max(holding, key=len) == library):
        return False
    return not _holds_packages(max(holding, key=len))


def _folder_of(module: str) -> "str | None":
    """The folder of the import path that has it; None: part of Python, or nowhere to be found."""
    top = module.partition(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return None
    for folder in sys.path:
        base = os.path.join(folder or os.curdir, top)
        if os.path.isdir(base) or os.path.isfile(base + ".py"):
            return folder or os.curdir
        if _compiled(top, folder or os.curdir):
            return folder or os.curdir
    return None


def _holds_packages(folder: str) -> bool:
    """Where packages are installed, and nobody edits. The script's own folder, the first, never is such a place."""
    if sys.path and os.path.abspath(folder) == os.path.abspath(sys.path[0]):
        return False
    if os.path.basename(folder.rstrip(os.sep)) in ("site-packages", "dist-packages", "lib-dynload"):
        return True
    return any(entry.endswith(".dist-info") for entry in _entries(folder))


def _entries(folder: str) -> "list[str]":
    try:
        return os.listdir(folder)
    except OSError:  # the path may name what is not there, or an archive
        return []


def _file_of(module: str, folder: str) -> "str | None":
    """The source file of a dotted name, found without importing anything."""
    base = os.path.join(folder, *module.split("."))
    for path in (os.path.join(base, "__init__.py"), base + ".py"):
        if os.path.isfile(path):
            return os.path.abspath(path)
    return None


def _compiled(module: str, folder: str) -> bool:
    """``from package import name``: is the name a compiled module?"""
    *packages, name = module.split(".")
    return any(
        entry.startswith(f"{name}.") and entry.endswith(".so") for entry in _entries(os.path.join(folder, *packages))
    )
