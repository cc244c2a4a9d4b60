"""The parser of ``tenax run``: turns the command line and the environment into one frozen value.

1. Flags of tenax end at the script. The first argument that is not a flag is the script; everything after it is passed
   to the script unchanged, even if it looks like a flag of tenax.
2. No abbreviations: flags are written in full, with dashes or underscores.
3. The command line overrides ``PET_*`` variables; an empty variable counts as unset.
4. An error is one message that quotes the flag as the user wrote it.

The flag table drives this parser directly. ``argparse`` would also classify the arguments after the script (which is
why torchrun rejects ``train.py --r=16``) and would add milliseconds to every start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenax.cli.flags import BY_SPELLING, FLAGS, Flag, UsageError, closest_flag, convert, suggestion, usage_errors
from tenax.cli.options import FlagValues, Options, decide

# One of these is set where a scheduler may have started this process: those of ``tenax.scheduler``.
_SCHEDULER_VARIABLES = (
    *("TENAX_SCHEDULER", "TENAX_START", "SLURM_JOB_ID", "LWS_LEADER_ADDRESS", "JOB_COMPLETION_INDEX", "LSB_JOBID"),
    *("PBS_NODEFILE", "MASTER_ADDR"),
)


class HelpRequested(Exception):
    """The command line contains ``--help``."""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Parse and check the arguments of ``tenax run``. Raises ``UsageError`` and ``HelpRequested``."""
    flags = read(argv, environ)
    allocation = None
    if any(variable in environ for variable in _SCHEDULER_VARIABLES):
        from tenax.scheduler import find_scheduler

        with usage_errors():
            scheduler = find_scheduler(environ)
        if scheduler is not None:
            from tenax.cli.scheduled_run import find_allocation

            allocation = find_allocation(scheduler, flags, environ)
    return decide(flags, environ, allocation)


def read(argv: Sequence[str], environ: Mapping[str, str]) -> FlagValues:
    """Parse the arguments without checking whether they can be combined."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    script_at = _read_flags(argv, values, sources)
    if script_at == len(argv) or not argv[script_at]:
        raise UsageError("no script given; write 'tenax run train.py' or 'tenax run -m MODULE'")
    for flag in FLAGS:
        if flag.dest in values:
            continue
        text = environ.get(flag.variable, "")
        values[flag.dest] = convert(flag, text, flag.variable) if text else flag.default
        if text:
            sources[flag.dest] = flag.variable
    return FlagValues(argv[script_at], tuple(argv[script_at + 1 :]), values, sources)


def _read_flags(argv: Sequence[str], values: dict[str, Any], sources: dict[str, str]) -> int:
    """Parse the flags before the script. Return the script's position."""
    position = 0
    while position < len(argv):
        arg = argv[position]
        if arg == "--":
            return position + 1
        if not arg.startswith("-") or arg == "-":
            return position
        flag, name, text = _split_flag(arg)
        position += 1
        if flag.kind == "switch":
            if text is not None:
                raise UsageError(f"{name} takes no value, but {arg!r} has one")
            values[flag.dest] = True
        else:
            if text is None and flag.alone is not None and not _is_address(argv, position):
                text = flag.alone
            elif text is None:
                text = _next_value(flag, name, argv, position)
                position += 1
            values[flag.dest] = convert(flag, text, name)
        sources[flag.dest] = name
    return position


def _split_flag(arg: str) -> tuple[Flag, str, str | None]:
    """Return the flag, its spelling, and the value in the same argument, if any."""
    if arg in ("-h", "--help"):
        raise HelpRequested
    name, equals, text = arg.partition("=")
    if (flag := BY_SPELLING.get(name)) is not None:
        return flag, name, text if equals else None
    if arg[1] != "-" and (flag := BY_SPELLING.get(arg[:2])) is not None:  # -r3
        return flag, arg[:2], arg[2:]
    raise UsageError(_unknown(name))


def _next_value(flag: Flag, name: str, argv: Sequence[str], position: int) -> str:
    if position == len(argv):
        raise UsageError(f"{name} needs a value: {name} {flag.value}")
    arg = argv[position]
    if arg.startswith("-") and arg != "-" and not _is_number(arg):
        raise UsageError(f"{name} needs a value, but {arg!r} follows; if that is the value, write '{name}={arg}'")
    return arg


def _is_address(argv: Sequence[str], position: int) -> bool:
    """Return True if the next argument is PORT or HOST:PORT. No script has such a name."""
    arg = argv[position] if position < len(argv) else ""
    return arg.rpartition(":")[2].isdecimal() and not arg.startswith("-")


def _is_number(arg: str) -> bool:
    try:
        float(arg)
    except ValueError:
        return False
    return True


# Flags of other launchers.
_FOREIGN = {
    "-n": "use '--nproc-per-node N'",
    "-np": "use '--nproc-per-node N'",
    "--np": "use '--nproc-per-node N'",
    "--num-processes": "use '--nproc-per-node N'",
    "--num-gpus": "use '--nproc-per-node gpu' for one worker per visible GPU",
    "--gpus": "use '--nproc-per-node gpu' for one worker per visible GPU",
    "--use-env": "remove it: workers always get their rank in the environment",
    "--local-rank": "each worker gets it in the variable LOCAL_RANK",
    "--version": "use 'tenax version'",
}


def _unknown(name: str) -> str:
    dashed = name[:2] + name[2:].replace("_", "-")
    if dashed in _FOREIGN:
        return f"unknown flag {name!r}; {_FOREIGN[dashed]}"
    remark = " (flags cannot be abbreviated)" if closest_flag(dashed, BY_SPELLING).startswith(dashed) else ""
    advice = suggestion(dashed, BY_SPELLING) or "; flags of your script go after the script's name"
    return f"unknown flag {name!r}{remark}{advice}"
