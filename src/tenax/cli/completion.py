"""``tenax completion bash|zsh|fish``: prints a script that completes commands and flags in that shell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module

from tenax.cli.command import parse_arguments
from tenax.cli.flags import FLAGS, UsageError
from tenax.cli.main import COMMANDS, SUBCOMMANDS
from tenax.cli.run import print_page

COMPLETION_USAGE = """\
usage: tenax completion bash|zsh|fish

Print a script that completes the commands and flags of tenax in that shell.

  source <(tenax completion bash)                                    for this shell; in ~/.bashrc, for all
  source <(tenax completion zsh)                                     in ~/.zshrc, after compinit
  tenax completion fish > ~/.config/fish/completions/tenax.fish      for all
"""

_BASH = """\
_tenax() {{
    local words
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    [ "$COMP_CWORD" -eq 1 ] && words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _tenax tenax
"""


def completion(argv: Sequence[str]) -> int:
    shell = " ".join(parse_arguments(argv).positional)
    if shell not in ("bash", "zsh", "fish"):
        raise UsageError(f"expected bash, zsh or fish, not {shell or 'nothing'}")
    if shell == "fish":
        return print_page(_fish())
    cases = "\n".join(f'        {command}) words="{" ".join(flags)}" ;;' for command, flags in _flags().items())
    script = _BASH.format(cases=cases, commands=" ".join(COMMANDS))
    return print_page(script if shell == "bash" else f"autoload -Uz bashcompinit && bashcompinit\n{script}")


def _flags() -> dict[str, list[str]]:
    """Return the flags of each command: of ``run`` from the table, of the others from their help pages."""
    found = {"run": [flag.name for flag in FLAGS]}
    for command, module in SUBCOMMANDS.items():
        usage = getattr(import_module(f"tenax.cli.{module}"), f"{command.upper()}_USAGE")
        found[command] = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", usage)))
    found["completion"] = ["bash", "zsh", "fish"]
    found["help"] = list(COMMANDS)
    return found


def _fish() -> str:
    lines = [f"complete -c tenax -n __fish_use_subcommand -f -a '{' '.join(COMMANDS)}'"]
    for command, words in _flags().items():
        seen = f"complete -c tenax -n '__fish_seen_subcommand_from {command}'"
        flags = [word for word in words if word.startswith("--")]
        lines += [f"{seen} -l {flag[2:]}" for flag in flags] or [f"{seen} -f -a '{' '.join(words)}'"]
    return "\n".join(lines) + "\n"
