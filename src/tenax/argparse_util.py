"""Two argparse actions that take an option's default from the environment, under TorchElastic's names.

``--some-option`` with ``dest="some_option"`` reads ``PET_SOME_OPTION`` when the parser is built; the command line
wins. Our own command line does not use them (see ``tenax.cli.arguments``): they are for parsers that launchers
build themselves, and for ``tenax.run.get_args_parser``.
"""

from __future__ import annotations

import argparse
import os

from tenax.cli.flags import truth

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

__all__ = ["check_env", "env"]


class env(argparse.Action):
    """Store a value; its default is ``PET_<DEST>`` where that is set. A required option is not required then."""

    def __init__(self, dest: str, default: Any = None, required: bool = False, **kwargs: Any) -> None:
        default = os.environ.get(f"PET_{dest.upper()}", default)
        super().__init__(dest=dest, default=default, required=required and not default, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse decides the signature
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        setattr(namespace, self.dest, values)


class check_env(argparse.Action):
    """A switch; ``PET_<DEST>`` of 1, true or yes turns it on by default, and 0, false or no does not."""

    def __init__(self, dest: str, default: bool = False, **kwargs: Any) -> None:
        name = f"PET_{dest.upper()}"
        text = os.environ.get(name, "")
        super().__init__(dest=dest, const=True, default=truth(text, name) if text else default, nargs=0, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,  # noqa: ARG002
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        setattr(namespace, self.dest, self.const)
