"""Arguments: the command line and the environment of ``tenax run``, read once, become one frozen value.

This is the only place that looks at them. Its rules:

1. Our flags end at the script. The first word that is not a flag is the script, and everything behind it is the
   script's own, untouched, even if it looks like ours.
2. No abbreviations: a flag is written in full, with dashes or with underscores.
3. The command line wins over ``PET_*``; an empty variable counts as unset.
4. A mistake is one sentence that names what was written, in the user's own spelling.

The table of flags drives this parser directly. ``argparse`` would classify the words behind the script too, which
is how torchrun comes to refuse ``train.py --r=16``; and it would cost the start of every job some milliseconds.
"""

from __future__ import annotations

import msgspec

from tenax.cli.flags import BY_SPELLING, FLAGS, Flag, UsageError, convert
from tenax.cli.options import Options, decide

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


class HelpRequested(Exception):
    """``--help`` was asked for."""


class Reading(msgspec.Struct):
    """What was written, converted but not yet judged."""

    script: str
    script_args: tuple[str, ...]
    values: dict[str, Any]  # every flag, by its dest
    sources: dict[str, str]  # only what was given: dest -> as the user wrote it, "--tee" or "PET_TEE"


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """The words after ``tenax run`` and the environment, as one value. Raises ``UsageError`` and ``HelpRequested``."""
    reading = read(argv, environ)
    return decide(reading.script, reading.script_args, reading.values, reading.sources, environ)


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Reading:
    """Read the words without judging whether they fit together."""
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
    """Take the flags in front of the script; returns where the script is."""
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "--":
            return position + 1
        if not word.startswith("-") or word == "-":
            return position
        flag, name, text = _recognise(word)
        position += 1
        if flag.kind == "switch":
            if text is not None:
                raise UsageError(f"{name} takes no value, but {word!r} gives it one; write it alone or leave it out")
            values[flag.dest] = True
        else:
            if text is None and flag.alone is not None and not _is_place(argv, position):
                text = flag.alone
            elif text is None:
                text = _value_word(flag, name, argv, position)
                position += 1
            values[flag.dest] = convert(flag, text, name)
        sources[flag.dest] = name
    return position


def _recognise(word: str) -> tuple[Flag, str, str | None]:
    """Which flag a word is, how it was spelt, and the value that is glued to it, if one is."""
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


def _is_place(argv: Sequence[str], position: int) -> bool:
    """Whether the next word is a port, or a host and a port: no script is called so."""
    word = argv[position] if position < len(argv) else ""
    return word.rpartition(":")[2].isdecimal() and not word.startswith("-")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


# What people write who come from another launcher.
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
    from tenax.cli.near_names import near_flag

    near = near_flag(dashed, BY_SPELLING)
    if near.startswith(dashed):
        return f"there is no flag {name!r}, and abbreviations are not guessed at; did you mean {near!r}?"
    if near:
        return f"there is no flag {name!r}; did you mean {near!r}?"
    return f"there is no flag {name!r}; flags of your own script go behind the script's name"
