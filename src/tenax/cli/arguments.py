"""The parser of ``tenax run``: turns the command line and the environment into one frozen value.

1. Flags of tenax end at the script. The first word that is not a flag is the script; everything after it is passed to
   the script unchanged, even if it looks like a flag of tenax.
2. No abbreviations: flags are written in full, with dashes or underscores.
3. The command line overrides ``PET_*`` variables; an empty variable counts as unset.
4. An error is one sentence that quotes the flag as the user wrote it.

The flag table drives this parser directly. ``argparse`` would also classify the words after the script (which is why
torchrun rejects ``train.py --r=16``) and would add milliseconds to every start.
"""

from __future__ import annotations

import msgspec

from tenax.cli.flags import BY_SPELLING, FLAGS, Flag, UsageError, closest_flag, convert
from tenax.cli.options import Options, decide

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


class HelpRequested(Exception):
    """The command line contains ``--help``."""


class Reading(msgspec.Struct):
    """The parsed command line: values are converted but not checked against each other."""

    script: str
    script_args: tuple[str, ...]
    values: dict[str, Any]  # every flag, by dest
    sources: dict[str, str]  # flags that were given: dest -> spelling, such as "--tee" or "PET_TEE"


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Parse and check the words after ``tenax run``. Raises ``UsageError`` and ``HelpRequested``."""
    reading = read(argv, environ)
    return decide(reading.script, reading.script_args, reading.values, reading.sources, environ)


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Reading:
    """Parse the words without checking whether they can be combined."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    script_at = _read_flags(argv, values, sources)
    if script_at == len(argv) or not argv[script_at]:
        raise UsageError("no script was named; write 'tenax run train.py', or '-m' and the name of a module")
    for flag in FLAGS:
        dest = flag.dest
        if dest in values:
            continue
        text = environ.get(flag.variable, "") if flag.from_environment else ""
        if text:
            values[dest] = convert(flag, text, flag.variable)
            sources[dest] = flag.variable
        else:
            values[dest] = flag.default
    return Reading(argv[script_at], tuple(argv[script_at + 1 :]), values, sources)


def _read_flags(argv: Sequence[str], values: dict[str, Any], sources: dict[str, str]) -> int:
    """Parse the flags before the script. Return the script's position."""
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "--":
            return position + 1
        if not word.startswith("-") or word == "-":
            return position
        flag, name, text = _split_flag(word)
        position += 1
        if flag.kind == "switch":
            if text is not None:
                raise UsageError(f"{name} takes no value, but {word!r} gives it one; write it alone or leave it out")
            values[flag.dest] = True
        else:
            if text is None and flag.alone is not None and not _is_address(argv, position):
                text = flag.alone
            elif text is None:
                text = _value_word(flag, name, argv, position)
                position += 1
            values[flag.dest] = convert(flag, text, name)
        sources[flag.dest] = name
    return position


def _split_flag(word: str) -> tuple[Flag, str, str | None]:
    """Return the flag, its spelling, and the value in the same word, if any."""
    if word in ("-h", "--help"):
        raise HelpRequested
    name, equals, text = word.partition("=")
    flag = BY_SPELLING.get(name)
    if flag is not None:
        return flag, name, text if equals else None
    if word[1] != "-":  # -r3
        flag = BY_SPELLING.get(word[:2])
        if flag is not None:
            return flag, word[:2], word[2:]
    raise UsageError(_unknown(name))


def _value_word(flag: Flag, name: str, argv: Sequence[str], position: int) -> str:
    if position < len(argv):
        word = argv[position]
        if not word.startswith("-") or word == "-" or _is_number(word):
            return word
        raise UsageError(
            f"{name} needs a value, but {word!r} follows; if that is the value, write '{name}={word}' in one word"
        )
    raise UsageError(f"{name} needs a value: {name} {flag.value}")


def _is_address(argv: Sequence[str], position: int) -> bool:
    """Return True if the next word is PORT or HOST:PORT. No script has such a name."""
    word = argv[position] if position < len(argv) else ""
    return word.rpartition(":")[2].isdecimal() and not word.startswith("-")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


# Flags of other launchers.
_FOREIGN = {
    "-n": "'--nproc-per-node N' says how many workers to start",
    "-np": "'--nproc-per-node N' says how many workers to start",
    "--np": "'--nproc-per-node N' says how many workers to start",
    "--num-processes": "'--nproc-per-node N' says how many workers to start",
    "--num-gpus": "'--nproc-per-node gpu' starts one worker per visible GPU",
    "--gpus": "'--nproc-per-node gpu' starts one worker per visible GPU",
    "--use-env": "the workers always find their rank in the environment, so leave it out",
    "--local-rank": "each worker finds its own in the variable LOCAL_RANK",
    "--version": "'tenax version' prints it",
}


def _unknown(name: str) -> str:
    dashed = name[:2] + name[2:].replace("_", "-")
    if dashed in _FOREIGN:
        return f"there is no flag {name!r}: {_FOREIGN[dashed]}"
    close = closest_flag(dashed, BY_SPELLING)
    if close.startswith(dashed):
        return f"there is no flag {name!r}, and abbreviations are not guessed at; did you mean {close!r}?"
    if close:
        return f"there is no flag {name!r}; did you mean {close!r}?"
    return f"there is no flag {name!r}; flags of your own script go behind the script's name"
