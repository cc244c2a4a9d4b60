"""Runs in an interpreter before the user's first line: installs ``tenax.compat``.

The law of this file: it depends on nothing but the standard library and, if it can be had, ``tenax.compat``; and it can
never be the reason that a program fails. PYTHONPATH stays as it is, so that what the program starts is under it too.
"""

import os
import sys


def _install() -> None:
    """Who was asked for by name says when it is not to be had; what a program under it starts may be anything."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != here]
    asked = os.environ.get("TENAX_COMPAT", "1")
    if asked == "0":
        return
    try:
        import tenax.compat  # noqa: F401
    except Exception as error:
        if asked != "inherited" and sys.stderr is not None:
            sys.stderr.write(
                f"tenax: torch.distributed.elastic is torch's own here, because {sys.executable} cannot import "
                f"tenax.compat ({type(error).__name__}: {error}); install tenax for it\n"
            )
    os.environ["TENAX_COMPAT"] = "inherited"


def _run_the_real_one() -> None:
    """We stood in front of the environment's own sitecustomize, if it has one."""
    ours = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


_install()
_run_the_real_one()
