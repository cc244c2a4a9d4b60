"""Installs ``tenax.compat`` in an interpreter before the user's first line runs.

It requires only the standard library, imports ``tenax.compat`` if possible, and never makes a program fail. PYTHONPATH
is not changed, so that child processes get it too.
"""

import os
import sys


def _install() -> None:
    """Print a message if it fails, except in child processes, which may be any program."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    setting = os.environ.get("TENAX_COMPAT", "1")
    if setting == "0":
        return
    try:
        import tenax.compat  # noqa: F401
    except Exception as error:
        if setting != "inherited" and sys.stderr is not None:
            sys.stderr.write(
                f"tenax: torch.distributed.elastic is not redirected to tenax, because {sys.executable} could not "
                f"import tenax.compat ({type(error).__name__}: {error}); install tenax for this Python\n"
            )
    os.environ["TENAX_COMPAT"] = "inherited"


def _run_next_sitecustomize() -> None:
    """Import the environment's own sitecustomize, which this one hides, if there is one."""
    this = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this


_install()
_run_next_sitecustomize()
