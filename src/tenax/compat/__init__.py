"""TorchElastic's import paths, answered by tenax: installed when this package is imported.

Afterwards ``torch.distributed.elastic.X`` is ``tenax.X``, the same module object, and so are
``torch.distributed.launcher``, ``torch.distributed.run``, ``torch.distributed.argparse_util`` and the older
``torchelastic.X``; with or without torch. Nothing else of torch is touched. The law of this package: it imports
nothing of tenax but what is asked for, and only when it is asked for.

    import tenax.compat
    from torch.distributed.elastic.multiprocessing.errors import record  # tenax's

``python -m tenax.compat train.py`` runs an unmodified program like that, and what it starts in turn; ``tenax run
--compat`` does it for the workers. Both use ``environment``.
"""

from __future__ import annotations

import os

from tenax.compat._finder import CompatFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FOLDER", "VARIABLE", "environment", "install", "target_of", "uninstall"]

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")  # first on PYTHONPATH: Python installs it
VARIABLE = "TENAX_COMPAT"  # 1: asked for, 0: not here; what a process under it starts sees "inherited"

_finder = CompatFinder()
target_of = _finder.target_of


def install() -> None:
    """Answer these paths from now on. Raises ImportError if torch's own modules have been imported already."""
    _finder.install()


def uninstall() -> None:
    """Give the paths back. What has been imported through them stays what it is."""
    _finder.uninstall()


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with which every Python process is under it from its first line on, and all that it starts."""
    others = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != FOLDER]
    return {"PYTHONPATH": os.pathsep.join([FOLDER, *others]), VARIABLE: "1"}


install()
