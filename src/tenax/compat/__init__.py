"""Redirects TorchElastic's import paths to tenax. Importing this package installs the redirection.

Afterwards ``torch.distributed.elastic.X`` is the module ``tenax.X``, and so are ``torch.distributed.launcher``,
``torch.distributed.run``, ``torch.distributed.argparse_util`` and the older ``torchelastic.X``, with or without torch.
The rest of torch is not changed. This package imports modules of tenax only when the program imports them.

    import tenax.compat
    from torch.distributed.elastic.multiprocessing.errors import record  # tenax's

``python -m tenax.compat train.py`` does this for an unmodified program and its child processes; ``tenax run --compat``
does it for the workers. Both use ``environment``.
"""

from __future__ import annotations

import os

from tenax.compat._finder import CompatFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FOLDER", "VARIABLE", "environment", "install", "target_of", "uninstall"]

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")  # first on PYTHONPATH: Python installs it
VARIABLE = "TENAX_COMPAT"  # 1: enabled, 0: disabled, inherited: enabled by a parent process

_finder = CompatFinder()
install, uninstall, target_of = _finder.install, _finder.uninstall, _finder.target_of


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that install the redirection in a Python process and its child processes."""
    others = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != FOLDER]
    return {"PYTHONPATH": os.pathsep.join([FOLDER, *others]), VARIABLE: "1"}


install()
