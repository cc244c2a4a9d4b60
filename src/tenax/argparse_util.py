"""Two argparse actions that take an option's default from the environment, under TorchElastic's names.

``--some-option`` with ``dest="some_option"`` reads ``PET_SOME_OPTION`` when the parser is built; the command line takes
precedence. They are for third-party parsers and ``tenax.run.get_args_parser``; the ``tenax`` command parses its own
arguments (``tenax.cli.arguments``).
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from tenax.cli.flags import truth

__all__ = ["check_env", "env"]


class _Setting(argparse.Action):
    def __call__(self, _parser: Any, namespace: Any, values: Any, _option_string: Any = None) -> None:
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)


class env(_Setting):
    """Store a value. If ``PET_<DEST>`` is set, it is the default, and a required option becomes optional."""

    def __init__(self, dest: str, default: Any = None, required: bool = False, **kwargs: Any) -> None:
        default = os.environ.get(f"PET_{dest.upper()}", default)
        super().__init__(dest=dest, default=default, required=required and not default, **kwargs)


class check_env(_Setting):
    """A switch. ``PET_<DEST>`` of 1, true or yes turns it on by default; 0, false or no does not."""

    def __init__(self, dest: str, default: bool = False, **kwargs: Any) -> None:
        name = f"PET_{dest.upper()}"
        text = os.environ.get(name, "")
        super().__init__(dest=dest, const=True, default=truth(text, name) if text else default, nargs=0, **kwargs)
