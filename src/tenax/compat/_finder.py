"""The finder: which module of tenax stands for a path of TorchElastic, told to Python's import system.

One finder in front of all others. Its rules:

1. A path is mapped by its beginning, not by a list: what tenax gets later is found without a change here.
2. The module object is tenax's own. There is never a second copy of a module under another name.
3. A path that is mapped is never answered by torch: if tenax has no such module, a sentence says so.
4. Where torch is installed, nothing else of it is touched. Where it is not, ``torch`` and ``torch.distributed``
   come into being only as parents of mapped modules, when the first of these is imported. Until then ``import torch``
   fails as it should; afterwards it gives the parent, which has nothing in it and says why.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType
    from typing import Any

# The longest beginning that fits decides.
_ROOTS = {
    "torch.distributed.elastic": "tenax",
    "torch.distributed.launcher": "tenax.launcher",
    "torch.distributed.run": "tenax.run",
    "torch.distributed.argparse_util": "tenax.argparse_util",
    "torchelastic.distributed.launch": "tenax.run",
    "torchelastic.distributed.argparse_util": "tenax.argparse_util",
    "torchelastic": "tenax",
}
# Packages that exist for the modules below them alone.
_OLD_PARENTS = ("torchelastic", "torchelastic.distributed")
_TORCH, _TORCH_PARENT = "torch", "torch.distributed"


class CompatFinder:
    """A meta path finder that can be put into place and taken away again."""

    def __init__(self) -> None:
        self._aliases: set[str] = set()  # in sys.modules because of us
        self._is_torch_missing = False

    # --- in place or not ----------------------------------------------------------------------------------------------

    def install(self) -> None:
        if self in sys.meta_path:
            return
        early = sorted(name for name in sys.modules if self.is_ours(name))
        if early:
            raise ImportError(
                f"{early[0]!r} was imported before tenax.compat, and what was imported from it stays as it is; import "
                "tenax.compat first, or start the program with: python -m tenax.compat",
                name=early[0],
            )
        self._is_torch_missing = _TORCH not in sys.modules and self._elsewhere(_TORCH) is None
        if self._is_torch_missing:
            # Found here, it is not looked for below a torch that is not there. `import torch` does not see it.
            self._hold(_Parent(_TORCH_PARENT))
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        for name in self._aliases:
            module = sys.modules.pop(name, None)
            parent, _, child = name.rpartition(".")
            above = sys.modules.get(parent)
            # tenax's own modules keep what is theirs: tenax.events is an attribute of tenax anyway.
            if above is not None and parent not in self._aliases and vars(above).get(child) is module:
                delattr(above, child)
        self._aliases.clear()

    # --- what Python asks ---------------------------------------------------------------------------------------------

    def is_ours(self, name: str) -> bool:
        """Whether we answer for this path."""
        return self.target_of(name) is not None

    def target_of(self, name: str) -> str | None:
        """The module that stands for this path, whether or not there is one; None: it is none of TorchElastic's."""
        if not name.startswith(_TORCH):
            return None
        root = name
        while root not in _ROOTS:
            root = root.rpartition(".")[0]
            if not root:
                return None
        return _ROOTS[root] + name[len(root) :]

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """How Python asks for a module. ``path`` is that of its parent; the name says all that we need."""
        del path, target
        if fullname in _OLD_PARENTS:
            parent: Any = _ParentLoader(self)
            return ModuleSpec(fullname, parent, is_package=True)
        wanted = self.target_of(fullname)
        if wanted is not None:
            if fullname.startswith(_TORCH_PARENT) and self._has_torch_come():
                import_module(_TORCH_PARENT)  # where Python is going to put it
            return self._alias_spec(fullname, wanted)
        if fullname.partition(".")[0] == _TORCH:
            return self._torchs_own_spec(fullname)
        return None

    def _alias_spec(self, name: str, target: str) -> ModuleSpec:
        from importlib.util import find_spec

        found = find_spec(target)
        if found is None:
            raise ModuleNotFoundError(
                f"no module named {name!r}: tenax.compat answers for it with {target!r}, which tenax does not have; "
                "check the name, or run this program without tenax.compat",
                name=name,
            )
        loader: Any = _AliasLoader(self, target)
        spec = ModuleSpec(name, loader, origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    # --- without torch ------------------------------------------------------------------------------------------------

    def _torchs_own_spec(self, name: str) -> ModuleSpec | None:
        """None: the other finders find it, or not."""
        if self._has_torch_come() and name != _TORCH:
            return self._elsewhere(name, import_module(name.rpartition(".")[0]).__path__)
        if self._is_torch_missing and name != _TORCH:
            raise ModuleNotFoundError(f"no module named {name!r}: {_why_empty(name)}", name=_TORCH)
        return None

    def _has_torch_come(self) -> bool:
        """Whether it can be imported now, because ``sys.path`` has changed, and could not before."""
        if not self._is_torch_missing or _TORCH in sys.modules or self._elsewhere(_TORCH) is None:
            return False
        self._is_torch_missing = False
        self._aliases.discard(_TORCH_PARENT)
        del sys.modules[_TORCH_PARENT]
        return True

    def stand_in_for_torch(self) -> None:
        """Now that a mapped module is imported, ``import torch.distributed.elastic`` must find what is above it."""
        if not self._is_torch_missing or _TORCH in sys.modules:
            return
        torch = _Parent(_TORCH)
        vars(torch)["distributed"] = sys.modules[_TORCH_PARENT]
        self._hold(torch)

    def _elsewhere(self, name: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
        """What the other finders say."""
        for finder in sys.meta_path:
            ask = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = ask(name, path) if ask is not None else None
            if spec is not None:
                return spec
        return None

    def _hold(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = module
        self._aliases.add(module.__name__)

    def note(self, name: str) -> None:
        """A module is about to stand in ``sys.modules`` under this name because of us."""
        self._aliases.add(name)


class _AliasLoader:
    """Loads a module of tenax for another name. Also what ``python -m`` needs to run it."""

    def __init__(self, finder: CompatFinder, target: str) -> None:
        self._finder = finder
        self._target = target

    def create_module(self, spec: ModuleSpec) -> None:
        """A new, empty one, that is thrown away: Python takes what stands in ``sys.modules`` afterwards."""
        del spec

    def exec_module(self, module: ModuleType) -> None:
        real = import_module(self._target)
        self._finder.stand_in_for_torch()
        self._finder.note(module.__name__)
        sys.modules[module.__name__] = real

    def get_code(self, fullname: str) -> CodeType | None:
        """For ``python -m``, which runs the code under the name ``__main__``."""
        from importlib.util import find_spec

        del fullname
        loader: Any = getattr(find_spec(self._target), "loader", None)
        code: CodeType | None = loader.get_code(self._target)
        return code


class _ParentLoader:
    """Makes the packages of the old torchelastic that have nothing of their own."""

    def __init__(self, finder: CompatFinder) -> None:
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Parent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        self._finder.note(module.__name__)


class _Parent(ModuleType):
    """A package that contains only the modules below it that were imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "Stands above modules that tenax answers for; see tenax.compat.")
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"module {self.__name__!r} has no {name!r}: {_why_empty(self.__name__)}")


def _why_empty(name: str) -> str:
    if name.startswith(tuple(_OLD_PARENTS)):
        return "tenax.compat only knows the modules below it; import the one that you need"
    return (
        "torch is not installed here, and tenax.compat only answers for torch.distributed.elastic, "
        "torch.distributed.launcher and torch.distributed.run; install torch for everything else"
    )
