"""What a script imports, read and not run: modules of others only.

Modules of others are those that were installed: what lies in a folder of packages (``site-packages``, or any with the
``.dist-info`` of one). The user's own files are looked through for what they import in turn but are not named: they may
be edited between two generations, and a worker must find them as they are then. The standard library is not named
either: it is there in no time.
"""

import ast
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_FILES = 500
_WITH_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def of_others(script: "tuple[str, bool]") -> "list[str]":
    """Dotted names, in the order in which they would be imported. The script's folder is first on ``sys.path``."""
    name, is_module = script
    found: dict[str, None] = {}
    waiting = _main_module(name) if is_module else _main_file(name)
    seen: set[str] = set()
    while waiting and len(seen) < _MOST_FILES:
        path, module = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        for imported in _imports(path, module):
            folder = _folder_of(imported)
            if folder is None:
                continue
            if not _holds_packages(folder):
                waiting += _own_files(imported, folder)
            elif "." not in imported or _file_of(imported, folder) or _compiled(imported, folder):
                found[imported] = None
    return list(found)


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


def _holds_packages(folder: str) -> bool:
    """Where packages are installed, and nobody edits."""
    if os.path.basename(folder.rstrip(os.sep)) in ("site-packages", "dist-packages"):
        return True
    return any(entry.endswith(".dist-info") for entry in _entries(folder))


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
            waiting[:0] = [child for child in ast.iter_child_nodes(node) if isinstance(child, _WITH_STATEMENTS)]


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
