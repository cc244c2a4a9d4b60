"""The meta path finder that maps import paths of TorchElastic to modules of tenax.

It comes before all other finders.

1. Paths are mapped by prefix, not by a list, so new modules of tenax need no change here.
2. The mapped module is tenax's own module object, never a copy under another name.
3. A mapped path is never imported from torch: if tenax has no such module, the import fails with a message.
4. If torch is installed, the rest of it is not changed. If it is not, ``torch`` and ``torch.distributed`` exist only as
   parents of mapped modules, from the first import of one of these. Before that ``import torch`` fails as usual;
   afterwards it returns the empty parent, whose errors explain why it is empty.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# The longest matching prefix counts.
_ROOTS = {
    "torch.distributed.elastic": "tenax",
    "torch.distributed.launcher": "tenax.launcher",
    "torch.distributed.run": "tenax.run",
    "torch.distributed.argparse_util": "tenax.argparse_util",
    "torchelastic.distributed.launch": "tenax.run",
    "torchelastic.distributed.argparse_util": "tenax.argparse_util",
    "torchelastic": "tenax",
}
# Packages that only contain the modules below them.
_OLD_PARENTS = ("torchelastic", "torchelastic.distributed")
_TORCH, _TORCH_PARENT = "torch", "torch.distributed"


class CompatFinder:
    """A meta path finder that can be installed and removed, and the loader of what it finds, also for ``python -m``."""

    def __init__(self) -> None:
        self._aliases: set[str] = set()  # names that this finder added to sys.modules
        self._is_torch_missing = False

    # --- install and remove -------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Install the redirection. Raises ImportError if torch's own modules are already imported."""
        if self in sys.meta_path:
            return
        early = sorted(name for name in sys.modules if self.target_of(name) is not None)
        if early:
            raise ImportError(
                f"{early[0]!r} was imported before tenax.compat; import tenax.compat first, or start the program with: "
                "python -m tenax.compat",
                name=early[0],
            )
        self._is_torch_missing = _TORCH not in sys.modules and self._find_elsewhere(_TORCH) is None
        if self._is_torch_missing:
            # In sys.modules, so that Python does not import torch to find it. `import torch` is not affected.
            self._add_module(_Parent(_TORCH_PARENT))
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Remove the redirection. Modules that were imported through it stay imported."""
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        for name in self._aliases:
            module = sys.modules.pop(name, None)
            parent, _, child = name.rpartition(".")
            above = sys.modules.get(parent)
            # Attributes of tenax's own modules stay: tenax.events is an attribute of tenax in any case.
            if above is not None and parent not in self._aliases and vars(above).get(child) is module:
                delattr(above, child)
        self._aliases.clear()

    # --- import -------------------------------------------------------------------------------------------------------

    def target_of(self, name: str) -> str | None:
        """Return the module that this path maps to, which may not exist; None if it is not a path of TorchElastic."""
        if not name.startswith(_TORCH):
            return None
        root = name
        while root not in _ROOTS:
            root = root.rpartition(".")[0]
            if not root:
                return None
        return _ROOTS[root] + name[len(root) :]

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec of a mapped module. Called by Python's import system."""
        del path, target
        loader: Any = self
        if fullname in _OLD_PARENTS:
            return ModuleSpec(fullname, loader, is_package=True)
        wanted = self.target_of(fullname)
        if wanted is not None:
            if fullname.startswith(_TORCH_PARENT) and self._is_torch_available_now():
                import_module(_TORCH_PARENT)  # the package to which Python adds the module
            return self._alias_spec(fullname, wanted)
        if fullname.partition(".")[0] == _TORCH:
            return self._torch_spec(fullname)
        return None

    def _alias_spec(self, name: str, target: str) -> ModuleSpec:
        from importlib.util import find_spec

        found = find_spec(target)
        if found is None:
            raise ModuleNotFoundError(
                f"no module named {name!r}: tenax.compat redirects it to {target!r}, which does not exist; check the "
                "name, or run the program without tenax.compat",
                name=name,
            )
        loader: Any = self
        spec = ModuleSpec(name, loader, origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create a package that only contains other modules. None: an empty one, which ``exec_module`` replaces."""
        return _Parent(spec.name) if spec.name in _OLD_PARENTS else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        target = self.target_of(name)
        if target is not None and name not in _OLD_PARENTS:
            real = import_module(target)
            if (
                self._is_torch_missing and _TORCH not in sys.modules
            ):  # which `import torch.distributed.elastic` requires
                torch = _Parent(_TORCH)
                vars(torch)["distributed"] = sys.modules[_TORCH_PARENT]
                self._add_module(torch)
            sys.modules[name] = real
        self._aliases.add(name)

    def get_code(self, fullname: str) -> Any:
        """Return the code for ``python -m``, which runs it as ``__main__``."""
        from importlib.util import find_spec

        target = self.target_of(fullname) or fullname
        loader: Any = getattr(find_spec(target), "loader", None)
        return loader.get_code(target)

    # --- without torch ------------------------------------------------------------------------------------------------

    def _torch_spec(self, name: str) -> ModuleSpec | None:
        """Return the spec of a module of torch; None leaves it to the other finders."""
        if self._is_torch_available_now() and name != _TORCH:
            return self._find_elsewhere(name, import_module(name.rpartition(".")[0]).__path__)
        if self._is_torch_missing and name != _TORCH:
            raise ModuleNotFoundError(f"no module named {name!r}: {_why_empty(name)}", name=_TORCH)
        return None

    def _is_torch_available_now(self) -> bool:
        """Return True if torch was missing and can be imported now, because ``sys.path`` has changed."""
        if not self._is_torch_missing or _TORCH in sys.modules or self._find_elsewhere(_TORCH) is None:
            return False
        self._is_torch_missing = False
        self._aliases.discard(_TORCH_PARENT)
        del sys.modules[_TORCH_PARENT]
        return True

    def _find_elsewhere(self, name: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(name, path) if find_spec is not None else None
            if spec is not None:
                return spec
        return None

    def _add_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = module
        self._aliases.add(module.__name__)


class _Parent(ModuleType):
    """A package that contains only the modules below it that were imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "The parent of modules that are redirected to tenax; see tenax.compat.")
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"module {self.__name__!r} has no {name!r}: {_why_empty(self.__name__)}")


def _why_empty(name: str) -> str:
    if name.startswith(tuple(_OLD_PARENTS)):
        return "it only contains modules that are redirected to tenax; import the one that you need"
    return (
        "torch is not installed, and tenax.compat only provides torch.distributed.elastic, "
        "torch.distributed.launcher and torch.distributed.run; install torch for everything else"
    )
