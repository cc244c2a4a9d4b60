"""``python -m tenax.compat``: runs a program and its child processes with ``tenax.compat``.

Replaces this process with another Python, whose environment installs ``tenax.compat``, so that the program is
``__main__`` with its own arguments.
"""

from __future__ import annotations

import os
import sys

from tenax.compat import FOLDER, environment, target_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_WRONG_USAGE = 2
_HELP = """\
usage: python -m tenax.compat SCRIPT [ARGUMENTS ...]
       python -m tenax.compat -m MODULE [ARGUMENTS ...]
       python -m tenax.compat -c CODE [ARGUMENTS ...]
       python -m tenax.compat --path

Run a program that was written for TorchElastic. In it and in its child processes, torch.distributed.elastic,
torch.distributed.launcher, torch.distributed.run and torchelastic import tenax's modules.
If another launcher starts the program, put the folder that --path prints first on its PYTHONPATH:

  PYTHONPATH="$(python -m tenax.compat --path)"
"""


def main(args: Sequence[str]) -> int:
    """Run the program. Returns only if there is none to run."""
    if not args or args[0] in ("-h", "--help"):
        (sys.stdout if args else sys.stderr).write(_HELP)
        return 0 if args else _WRONG_USAGE
    if args[0] == "--path":
        sys.stdout.write(f"{FOLDER}\n")
        return 0
    if sys.flags.ignore_environment:
        sys.stderr.write("python -m tenax.compat: Python ignores PYTHONPATH with -E or -I; remove that flag\n")
        return _WRONG_USAGE
    from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]

    own = list(args)
    if own[0] == "-m" and len(own) > 1:
        own[1] = target_of(own[1]) or own[1]  # otherwise Python would import torch to find the module
    command = [sys.executable, *_args_from_interpreter_flags(), *own]
    return os.execve(sys.executable, command, {**os.environ, **environment(os.environ)})


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
