"""Finds the third-party modules that a script imports first, by parsing it, not by running it.

1. Third-party modules are installed ones: those in a folder of packages (``site-packages``, or any folder that holds a
   ``.dist-info``). The user's own files are parsed for their imports but not returned: they may be edited between two
   generations, and a worker must import them as they are then. The standard library is not returned either: it imports
   quickly.
2. Only imports that certainly run, before other code could change their meaning: parsing follows the order of
   execution and ends at the first statement that may set a variable, the import path, a module or a hook. That is a
   call whose value is unused, or an assignment to anything but a name.
"""

import ast
import os
import sys
from itertools import accumulate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_FILES = 500
# Packages that others import and that import none of those. A module that must be left out often imports one of these
# before that is found: if it is imported already, its import is not lost.
_FOUNDATIONS = frozenset({"jax", "jaxlib", "numpy", "pandas", "scipy", "tensorflow", "torch"})
# torch imports this when the first optimizer is made, in over a second: each worker would do so again.
_BY_OPTIMIZERS = "torch._dynamo"
_HARMLESS_CALLS = ("warnings", "logging")  # modules whose functions change no import


def third_party_imports(script: "tuple[str, bool]") -> "tuple[list[str], dict[str, str]]":
    """Return dotted names; the script's folder is first on ``sys.path``.

    They are in the order of import, except that torch and other foundations come first. Also return the first module
    whose import comes too late to be predicted, with the reason.
    """
    reading = _Scan(script)
    further = _Scan(script, to_the_end=True)
    missed = [name for name in further.found if name not in reading.found]
    why = (
        f"{reading.end}, runs before its import and may affect it; --preload {','.join(missed[:1])} preloads it anyway"
    )
    found = sorted(reading.found, key=lambda name: name.partition(".")[0] not in _FOUNDATIONS)
    if further.has_optimizers and "torch" in (name.partition(".")[0] for name in found):
        folder = _folder_of(_BY_OPTIMIZERS)
        found += [_BY_OPTIMIZERS] if folder is not None and _file_of(_BY_OPTIMIZERS, folder) else []
    return found, dict.fromkeys(missed[:1], why)


class _Scan:
    def __init__(self, script: "tuple[str, bool]", *, to_the_end: bool = False) -> None:
        self.found: dict[str, None] = {}
        self.end = ""  # file and line where the scan had to end; empty: it was complete
        self.has_optimizers = False  # of torch
        self._seen: set[str] = set()
        self._is_full = to_the_end
        for path, module in _main_files(*script):
            self._read(path, module)

    def _read(self, path: str, module: str) -> None:
        if path in self._seen or len(self._seen) >= _MAX_FILES or self.end:
            return
        self._seen.add(path)
        try:
            with open(path, "rb") as file:
                body = ast.parse(file.read(), path).body
        except (OSError, SyntaxError, ValueError, RecursionError):  # the worker will report it
            return
        self.has_optimizers |= any(_is_optimizers(node) for statement in body for node in ast.walk(statement))
        for node in _statements(body):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for name in _names(node, module, path):
                    self._import(name)
            elif not _is_harmless(node) and not self._is_full:
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


def _main_files(name: str, is_module: bool) -> "list[tuple[str, str]]":
    """Return the files that run first, with the names of their modules, for relative imports: a script has none."""
    if is_module:
        folder = _folder_of(name)
        return [] if folder is None else _own_files(f"{name}.__main__", folder)
    path = os.path.join(name, "__main__.py") if os.path.isdir(name) else name
    return [(os.path.abspath(path), "")] if os.path.isfile(path) else []


def _own_files(module: str, folder: str) -> "list[tuple[str, str]]":
    """Return the files that its import runs: those of its packages, then its own."""
    names = accumulate(module.split("."), lambda package, name: f"{package}.{name}")
    return [(path, name) for name in names if (path := _file_of(name, folder)) is not None]


# --- statements -------------------------------------------------------------------------------------------------------


def _is_optimizers(node: ast.AST) -> bool:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return "torch.optim" in _names(node, "", "")
    return isinstance(node, ast.Attribute) and node.attr == "optim" and ast.unparse(node) == "torch.optim"


def _statements(body: "list[ast.stmt]") -> "Iterator[ast.stmt]":
    """Yield the statements that certainly run, in order; a block that may run is yielded as one statement."""
    waiting = list(body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.If):
            is_main_guard = ast.unparse(node.test) == "__name__ == '__main__'"
            name = getattr(node.test, "attr", getattr(node.test, "id", ""))
            certain = node.body if is_main_guard else node.orelse if name == "TYPE_CHECKING" else None
            waiting[:0] = [_uncertain(node)] if certain is None else certain
        elif isinstance(node, ast.Try):
            doubtful = [_uncertain(handler) for handler in node.handlers]
            waiting[:0] = [*node.body, *doubtful, *node.orelse, *node.finalbody]
        elif isinstance(node, ast.With):
            waiting[:0] = node.body
        else:
            yield node


def _uncertain(node: "ast.If | ast.ExceptHandler") -> ast.stmt:
    """Wrap a block that may or may not run: its imports are ignored, but it may change something."""
    return ast.While(
        test=ast.Constant(value=True), body=[*node.body, *getattr(node, "orelse", [])], orelse=[], lineno=node.lineno
    )


def _is_harmless(node: ast.AST) -> bool:
    """Return whether a statement cannot change the meaning of an import, as far as the syntax shows."""
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


def _names(node: "ast.Import | ast.ImportFrom", module: str, path: str) -> "Iterator[str]":
    """Yield what a statement imports; ``from a import b`` may mean a module ``a.b``."""
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


# --- files ------------------------------------------------------------------------------------------------------------

_TENAX = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "")


def is_user_file(path: str) -> bool:
    """Return whether an imported file is the user's: on the import path, neither installed nor part of Python.

    tenax is never the user's, also where it runs from its source.
    """
    library = os.path.join(os.path.dirname(os.__file__), "")
    folders = [os.path.join(os.path.abspath(folder), "") for folder in sys.path]
    holding = [folder for folder in folders if path.startswith(folder)]
    if not holding or path.startswith(_TENAX) or (path.startswith(library) and max(holding, key=len) == library):
        return False
    return not _holds_packages(max(holding, key=len))


def _folder_of(module: str) -> "str | None":
    """Return the folder of the import path that holds a module; None if it is part of Python or not found."""
    top = module.partition(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return None
    for folder in (entry or os.curdir for entry in sys.path):
        base = os.path.join(folder, top)
        if os.path.isdir(base) or os.path.isfile(base + ".py") or _compiled(top, folder):
            return folder
    return None


def _holds_packages(folder: str) -> bool:
    """Return whether packages are installed in a folder. The script's own folder, the first, does not count."""
    if sys.path and os.path.abspath(folder) == os.path.abspath(sys.path[0]):
        return False
    if os.path.basename(folder.rstrip(os.sep)) in ("site-packages", "dist-packages", "lib-dynload"):
        return True
    return any(entry.endswith(".dist-info") for entry in _entries(folder))


def _entries(folder: str) -> "list[str]":
    try:
        return os.listdir(folder)
    except OSError:  # the import path may name missing folders and archives
        return []


def _file_of(module: str, folder: str) -> "str | None":
    """Return the source file of a dotted name, without importing anything."""
    base = os.path.join(folder, *module.split("."))
    paths = (os.path.join(base, "__init__.py"), base + ".py")
    return next((os.path.abspath(path) for path in paths if os.path.isfile(path)), None)


def _compiled(module: str, folder: str) -> bool:
    *packages, name = module.split(".")
    return any(
        entry.startswith(f"{name}.") and entry.endswith(".so") for entry in _entries(os.path.join(folder, *packages))
    )
