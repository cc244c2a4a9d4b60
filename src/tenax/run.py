"""The names of torchrun's module, for launchers that build, parse or extend its command line from Python.

``python -m tenax.run …`` is ``tenax run …``. Called as a function, ``main`` returns None when the job succeeds and
raises ``ChildFailedError`` when it fails, or ValueError when its description is invalid. ``tenax.cli`` defines the
flags; this module only translates between them and an ``argparse.Namespace``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from tenax._failures.error_handler import record
from tenax.cli.arguments import HelpRequested, read
from tenax.cli.flags import FLAGS, Flag, OutOfRange, UsageError, convert
from tenax.cli.main import main as cli_main
from tenax.cli.options import FlagValues, Options, decide
from tenax.cli.run import check, launch_arguments, print_dry_run, print_usage_error, resolve
from tenax.cli.script import Entrypoint, run_script_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from tenax.launcher.api import LaunchConfig

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "get_rdzv_endpoint",
    "get_use_env",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]

_DEFAULT_MASTER_PORT = 29500


def get_args_parser() -> argparse.ArgumentParser:
    """Return an ``argparse`` parser of the same flags, to extend with other flags.

    ``parse_args`` below does not use it, because argparse also parses arguments that belong to the script.
    """
    import argparse

    from tenax.argparse_util import check_env, env

    parser = argparse.ArgumentParser(
        prog="tenax run", description="Run a script in one or more worker processes.", allow_abbrev=False
    )
    for flag in FLAGS:
        text = flag.help.replace("%", "%%")
        if flag.kind == "switch":
            on: Any = check_env if flag.from_environment else "store_true"
            parser.add_argument(*flag.spellings, action=on, help=text)
            continue
        store: Any = env if flag.from_environment else "store"
        default = list(flag.default) if flag.kind == "list" else flag.default
        more: dict[str, Any] = {"choices": flag.choices or None}
        if flag.alone is not None:
            more = {"nargs": "?", "const": flag.alone}
        kind = partial(_argparse_value, flag)
        parser.add_argument(*flag.spellings, action=store, type=kind, default=default, help=text, **more)
    parser.add_argument("training_script", type=str, help="The script, module or program to run.")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="Its arguments.")
    return parser


def _argparse_value(flag: Flag, text: str) -> Any:
    import argparse

    try:
        return convert(flag, text, flag.name)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Return torchrun's namespace for these arguments. Exits with code 2 if they cannot be parsed.

    Raises ValueError for a number out of range, as torchrun does.
    """
    import argparse

    try:
        reading = read(sys.argv[1:] if args is None else list(args), os.environ)
    except HelpRequested:
        raise SystemExit(cli_main(["help", "run"])) from None
    except OutOfRange:
        raise
    except UsageError as error:
        raise SystemExit(print_usage_error(error)) from None
    values = {dest: list(value) if isinstance(value, tuple) else value for dest, value in reading.values.items()}
    return argparse.Namespace(**values, training_script=reading.script, training_script_args=list(reading.script_args))


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Return (minimum, maximum): (2, 2) for ``"2"``, (1, 4) for ``"1:4"``."""
    parts = nnodes.split(":")
    if len(parts) > 2:
        raise RuntimeError(f"nnodes must be N or MIN:MAX, not {nnodes!r}")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"nnodes must be N or MIN:MAX in whole numbers, not {nnodes!r}")
    return int(parts[0]), int(parts[-1])


def determine_local_world_size(nproc_per_node: str) -> int:
    """Return the number of workers that ``auto``, ``cpu``, ``gpu`` or a number means on this machine."""
    from tenax._processes.devices import parse_nproc

    return parse_nproc(str(nproc_per_node), os.environ)


def get_rdzv_endpoint(args: argparse.Namespace) -> str:
    """Return the rendezvous endpoint; for the static rendezvous without one, the master's address."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return f"{args.master_addr}:{_DEFAULT_MASTER_PORT if args.master_port is None else args.master_port}"
    return str(args.rdzv_endpoint)


def get_use_env(args: argparse.Namespace) -> bool:
    """Return whether workers get their local rank only from the environment; True unless ``args`` has ``use_env``."""
    return bool(getattr(args, "use_env", True))


def config_from_args(args: argparse.Namespace) -> tuple[LaunchConfig, Entrypoint, list[str]]:
    """Return the launch config, the entrypoint of the workers, and its arguments.

    Raises ValueError if the namespace contradicts itself.
    """
    return launch_arguments(_options(args), sys.executable)


def _options(args: argparse.Namespace) -> Options:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for flag in FLAGS:
        # Third-party parsers of torchrun's flags do not have tenax's own, or have None.
        value = getattr(args, flag.dest, None)
        value = values[flag.dest] = flag.default if value is None else value
        if value != flag.default and not (flag.kind == "list" and not value):
            sources[flag.dest] = flag.name
    flags = FlagValues(args.training_script, tuple(args.training_script_args), values, sources)
    options = decide(flags, os.environ)
    if get_use_env(args):
        return options
    if options.no_python:
        raise UsageError("--no-python needs --use-env: a program gets its rank only in the environment")
    import msgspec

    return msgspec.structs.replace(options, local_rank_argument=True)


def run(args: argparse.Namespace) -> None:
    """Run the job that a namespace describes. Raises ``ChildFailedError`` when it fails."""
    from tenax.launcher.api import run_job

    options = _options(args)
    check(options, os.environ)
    if options.report:
        raise UsageError("--report works only on the command line; in Python, catch ChildFailedError")
    if options.dry_run:
        print_dry_run(options, os.environ)
        return
    run_job(resolve(options, sys.executable))


def main(args: Sequence[str] | None = None) -> None:
    """Run the job that the arguments describe (default: ``sys.argv``). Raises ``ChildFailedError`` when it fails.

    As torchrun does, exits with code 2 if an argument cannot be parsed, and raises ValueError for an invalid job.
    """
    record(run)(parse_args(args))  # a failure is written to the error file of the parent process, if there is one


if __name__ == "__main__":
    raise SystemExit(cli_main(["run", *sys.argv[1:]]))
