"""What a script imports, read and not run: modules of others only.

Files of the user (next to the script, or below the working directory) are looked through for what they import in turn
but are not named: they may be edited between two generations, and a worker must find them as they are then. The
standard library is not named either: it is there in no time.
"""

import ast
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_FILES = 500


def of_others(script: "tuple[str, bool]", folder: str) -> "list[str]":
    """Dotted names, in the order in which they would be imported."""
    name, is_module = script
    found: dict[str, None] = {}
    path = _main_module(name) if is_module else _main_file(name)
    waiting = [(path, name if is_module else "")] if path else []
    seen: set[str] = set()
    own = _own_folders(folder)
    while waiting and len(seen) < _MOST_FILES:
        path, module = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        for imported in _imports(path, module):
            place = _place_of(imported)
            if place is None:
                continue
            if _is_below(place, own):
                inner = _file_of(imported, sys.path)
                if inner is not None and _is_below(inner, own):
                    waiting.append((inner, imported))
            elif _is_module(imported):
                found[imported] = None
    return list(found)


def _main_file(script: str) -> "str | None":
    path = os.path.join(script, "__main__.py") if os.path.isdir(script) else script
    return os.path.abspath(path) if os.path.isfile(path) else None


def _main_module(module: str) -> "str | None":
    return _file_of(f"{module}.__main__", sys.path) or _file_of(module, sys.path)


def _own_folders(folder: str) -> "list[str]":
    return [os.path.join(os.path.realpath(place), "") for place in (folder, os.getcwd())]


def _is_below(path: str, folders: "list[str]") -> bool:
    """The user's own. An environment inside the project's folder is not."""
    real = os.path.realpath(path)
    return any(
        real.startswith(folder) and not {"site-packages", "dist-packages"} & set(real[len(folder) :].split(os.sep))
        for folder in folders
    )


def _imports(path: str, module: str) -> "Iterator[str]":
    """What a file imports when it is run or imported, without what its functions do."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(), path)
    except (OSError, SyntaxError, ValueError, RecursionError):  # the worker will say it
        return
    package = module if os.path.basename(path) == "__init__.py" else module.rpartition(".")[0]
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _imports_from(node, package)
        elif isinstance(node, ast.If) and _is_for_types(node.test):
            waiting[:0] = node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting[:0] = [
                child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.excepthandler))
            ]


def _imports_from(node: ast.ImportFrom, package: str) -> "Iterator[str]":
    base = node.module or ""
    if node.level:
        parts = package.split(".")
        kept = parts[: len(parts) - node.level + 1]
        if not kept or not kept[0]:
            return
        base = ".".join([*kept, *([base] if base else [])])
    yield base
    yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _is_for_types(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return name == "TYPE_CHECKING"


def _place_of(module: str) -> "str | None":
    """Where its outermost package is; None: part of Python, or nowhere to be found."""
    top = module.partition(".")[0]
    if top in sys.builtin_module_names or top in getattr(sys, "stdlib_module_names", ()) or top == "__future__":
        return None
    return next(filter(None, (_in_folder(folder, top) for folder in sys.path)), None)


def _in_folder(folder: str, name: str) -> "str | None":
    base = os.path.join(folder or os.curdir, name)
    if os.path.isdir(base):
        return base
    if os.path.isfile(base + ".py"):
        return base + ".py"
    try:
        entries = os.listdir(folder or os.curdir)
    except OSError:
        return None
    return next(
        (os.path.join(folder, entry) for entry in entries if entry.startswith(name + ".") and entry.endswith(".so")),
        None,
    )


def _file_of(module: str, folders: "list[str]") -> "str | None":
    """The source file of a dotted name, found without importing anything."""
    inside = os.path.join(*module.split("."))
    for folder in folders:
        base = os.path.join(folder or os.curdir, inside)
        for path in (os.path.join(base, "__init__.py"), base + ".py"):
            if os.path.isfile(path):
                return os.path.abspath(path)
    return None


def _is_module(module: str) -> bool:
    """A module or package, and not a name inside one: ``from torch import nn`` and ``from torch import Tensor``."""
    if "." not in module:
        return True
    top, _, rest = module.partition(".")
    inside = os.path.join(*rest.split("."))
    for folder in sys.path:
        base = os.path.join(folder or os.curdir, top, inside)
        if os.path.isfile(os.path.join(base, "__init__.py")) or os.path.isfile(base + ".py"):
            return True
        if os.path.isdir(os.path.join(folder or os.curdir, top)):
            return False
    return False
