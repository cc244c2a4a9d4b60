"""What all commands but ``tenax run`` share: they parse their arguments, and an error is a message and an exit code.

arguments = parse_arguments(argv, switches=("--json",), values=("--why",))  # raises UsageError
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from tenax._engines.tcp.operator import Declined, OperatorError
from tenax._failures.exit_codes import FAILED, WRONG_USAGE
from tenax._node.journal import JournalUnreadable
from tenax.cli.flags import UsageError, suggestion
from tenax.cli.run import print_page, print_stderr


class NoSuchJob(Exception):
    """There is no such run, or it does not answer. The message is for the user."""


class Arguments(msgspec.Struct):
    positional: list[str] = []
    switches: set[str] = set()
    values: dict[str, str] = {}


def parse_arguments(argv: Sequence[str], *, switches: Iterable[str] = (), values: Iterable[str] = ()) -> Arguments:
    """Parse flags at any position. Raises ``UsageError``."""
    arguments = Arguments()
    known_switches, known_values = set(switches), set(values)
    left = iter(argv)
    for arg in left:
        if arg == "--":
            arguments.positional += left
            break
        flag, equals, written = arg.partition("=")
        flag = flag.replace("_", "-")
        if not arg.startswith("-") or arg == "-":
            arguments.positional.append(arg)
        elif flag in known_switches and not equals:
            arguments.switches.add(flag)
        elif flag in known_values:
            value = written if equals else next(left, "")
            if not value:
                raise UsageError(f"{flag} needs a value")
            arguments.values[flag] = value
        elif flag in known_switches:
            raise UsageError(f"{flag} takes no value")
        else:
            raise UsageError(f"unknown flag {arg!r}{suggestion(flag, known_switches | known_values)}")
    return arguments


def run_subcommand(name: str, argv: Sequence[str], usage: str, command: Callable[[Sequence[str]], int]) -> int:
    """Run a command. Errors become a message and an exit code: 2 for wrong usage, 1 for everything else."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    if {"-h", "--help"}.intersection(own):
        from tenax.cli.help import print_help

        return print_help(usage)
    try:
        return command(argv)
    except (UsageError, JournalUnreadable) as error:
        print_stderr(f"tenax {name}: {error}\ntry: tenax {name} --help")
        return WRONG_USAGE
    except (NoSuchJob, Declined) as error:
        print_stderr(f"tenax {name}: {error}")
    except OperatorError as error:
        print_stderr(f"tenax {name}: the run does not respond: {error}")
    return FAILED


def print_json(value: object, indent: int | None = None) -> int:
    """Print a value for programs, in ASCII."""
    import json

    return print_page(json.dumps(msgspec.to_builtins(value), indent=indent) + "\n")
