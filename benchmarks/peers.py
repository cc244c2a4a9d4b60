"""Peers: other launchers that do the same work on one machine, where they are installed.

`./dev bench` installs them into their own environment, `peers` inside that of tenax, so that their dependencies (for
example a module that every start of Python imports) do not affect tenax and torchrun. A peer that is not installed is
reported as missing, and the rest runs. Peers take part in fewer repetitions than tenax and torchrun, in turns with
them, and only in measures of a whole launcher on one machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Launcher
from benchmarks.running import HERE

EVERY = 5  # for contrast only: they take part in each n-th repetition
CASES = ("launch", "idle", "restart")
NO_RESTART = "does not restart"


def as_torchrun(flags: Sequence[str]) -> list[str]:
    """Return the flags unchanged."""
    return list(flags)


def as_accelerate(flags: Sequence[str]) -> list[str]:
    """Translate torchrun's flags to accelerate's: one machine, and another name for the number of workers."""
    return [flag.replace("--nproc-per-node=", "--num-processes=") for flag in flags if flag != "--standalone"]


@dataclass(frozen=True)
class Peer:
    """A launcher that may be installed: its package, its command, and the cases that it does not support."""

    name: str
    package: str
    command: tuple[str, ...]
    spell: Callable[[Sequence[str]], list[str]] = as_torchrun
    unable: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""

    def found(self, environments: Sequence[Path]) -> Launcher | None:
        """Return the launcher from the first of these environments that has it."""
        program, *command = self.command
        for environment in environments:
            path = environment / "bin" / program
            if path.exists():
                return Launcher(self.name, (str(path), *command), self.spell, EVERY)
        return None

    def version(self, environments: Sequence[Path]) -> str:
        """Return the installed version of its package, without importing it."""
        from importlib.metadata import distributions

        paths = [str(path) for environment in environments for path in environment.glob("lib/python*/site-packages")]
        found = distributions(name=self.package, path=paths)
        return next((f"{self.package} {each.version}" for each in found), self.package)


PEERS = (
    Peer("ft_launcher", "nvidia-resiliency-ext", ("ft_launcher",), remark="its rank monitors run with it"),
    Peer(
        "accelerate",
        "accelerate",
        (
            "accelerate",
            "launch",
            "--multi-gpu",  # requests several processes, with or without a GPU; --cpu starts one
            "--num-machines=1",
            "--main-process-port=0",
            "--mixed-precision=no",
            "--dynamo-backend=no",
        ),
        as_accelerate,
        remark="it calls torch's own agent, after its own imports",
    ),
    Peer(
        "subprocess",
        "",
        ("python", str(HERE / "bare.py")),
        unable={"restart": NO_RESTART, "torch_workers": NO_RESTART},
        remark="the floor: a minimal script that starts the workers and waits, without supervision",
    ),
)
NAMES = tuple(peer.name for peer in PEERS)


def environments() -> tuple[Path, ...]:
    """Return the environments that may contain peers: that of tenax, and their own."""
    return Path(sys.prefix), Path(sys.prefix) / "peers"


def find(names: Sequence[str]) -> tuple[Launcher, ...]:
    """Return those of the named peers that are installed."""
    found = (peer.found(environments()) for peer in PEERS if peer.name in names)
    return tuple(launcher for launcher in found if launcher)


def able(case: str, launchers: Sequence[Launcher]) -> tuple[Launcher, ...]:
    """Return those of these peers that support a case."""
    cannot = unable(case)
    return tuple(launcher for launcher in launchers if case in CASES and launcher.name not in cannot)


def unable(case: str) -> dict[str, str]:
    """Return which peers do not support a case, and why."""
    return {peer.name: peer.unable[case] for peer in PEERS if case in peer.unable}


def notes(names: Sequence[str], launchers: Sequence[Launcher]) -> list[str]:
    """Return the command of each named peer, or that it is not installed."""
    lines = []
    installed = {launcher.name: launcher for launcher in launchers}
    for peer in PEERS:
        if peer.name not in names:
            continue
        if peer.name not in installed:
            lines.append(
                f"{peer.name} was not measured: {peer.package} is not installed; `./dev bench` installs it if possible."
            )
            continue
        command = [Path(word).name if word.startswith("/") else word for word in peer.command]
        command += [*peer.spell(["--standalone", "--nproc-per-node=N"]), "--no-python", "WORKER"]
        which = f", {peer.version(environments())}" if peer.package else ""
        lines.append(f"{peer.name}{which}: `{' '.join(command)}`; {peer.remark}.")
    if installed:
        lines.append(
            f"Peers took part in one of {EVERY} repetitions, with their default settings (a monitor interval of 0.1 "
            "s if they have one); restarts with `--max-restarts`."
        )
    return lines
