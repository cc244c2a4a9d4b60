"""``tenax completion``: the scripts that complete commands and flags."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


def script_of(shell: str) -> str:
    command = [sys.executable, "-m", "tenax", "completion", shell]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_and_flags() -> None:
    script = script_of("bash")
    typed = (["tenax", "sta"], ["tenax", "run", "--nproc"], ["tenax", "logs", "--foll"], ["tenax", "run", "--zzz"])
    tries = [
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _tenax; echo ${{COMPREPLY[@]}}"
        for words in typed
    ]
    shell = subprocess.run(
        ["bash", "-c", "\n".join([script, *tries])], capture_output=True, text=True, check=True, timeout=60
    )
    assert shell.stdout.splitlines() == ["start status stacks", "--nproc-per-node", "--follow", ""]


def test_zsh_uses_the_completion_of_bash() -> None:
    assert script_of("zsh") == "autoload -Uz bashcompinit && bashcompinit\n" + script_of("bash")


def test_fish_completes_the_flags_of_each_command() -> None:
    lines = script_of("fish").splitlines()
    assert "complete -c tenax -n '__fish_seen_subcommand_from run' -l nproc-per-node" in lines
    assert "complete -c tenax -n '__fish_seen_subcommand_from stop' -l why" in lines
    assert "complete -c tenax -n '__fish_seen_subcommand_from completion' -f -a 'bash zsh fish'" in lines


def test_another_shell_is_rejected() -> None:
    command = [sys.executable, "-m", "tenax", "completion", "tcsh"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (
        2,
        "tenax completion: expected bash, zsh or fish, not tcsh\ntry: tenax completion --help\n",
    )
