"""A cluster: one run of agents on the hosts of a lab, and what its workers tell of it.

Everything is started as people start it, with ``python -m tenax run``. A test waits for a generation to be at work,
does something to the hosts or the agents, and waits for the next one. At the end ``check`` holds the whole history
against what must always be true.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kit.jobs import Done

from .changes import PATIENCE_S
from .history import Generation, History
from .lab import Host, Lab
from .running import Running

T = TypeVar("T")


def in_one_line(text: str) -> str:
    """What was said, whatever the width of the page."""
    return " ".join(text.split())


SCRIPTS = Path(__file__).parent / "scripts"
PORT = 29400
BEAT_S = "0.05"
# Half of the default lease: a node that is cut off is missed sooner, and a busy machine may still pause for 2 s.
LEASE_S = 2.5
LEASE = {"keep_alive_interval": LEASE_S / 5, "keep_alive_max_attempt": 5}


class Cluster:
    """``nnodes`` as on the command line. node0 serves the endpoint unless ``endpoint`` says otherwise."""

    def __init__(
        self,
        lab: Lab,
        nnodes: str | int = 3,
        *,
        nproc: int = 1,
        run_id: str = "job",
        endpoint: str | None = None,
        max_restarts: int = 3,
        conf: Mapping[str, object] | None = None,
        options: Sequence[str] = (),
        script: str = "plain_worker.py",
        words: Sequence[str] = ("--beat-s", BEAT_S, "--reach-master"),
        folder: Path | None = None,
    ) -> None:
        self.lab = lab
        self.nnodes = str(nnodes)
        self.max_restarts = max_restarts
        self.run_id = run_id
        self.endpoint = lab[0].endpoint(PORT) if endpoint is None else endpoint
        self.folder = lab.shared if folder is None else folder
        self.history = History(self.folder)
        self.agents: list[Running] = []
        self._nproc = nproc
        self._conf = {**LEASE, **(conf or {})}
        self._options = options
        self._program = [str(SCRIPTS / script), str(self.folder), *words]

    # --- agents -------------------------------------------------------------------------------------------------------

    def start(
        self,
        *hosts: Host,
        conf: Mapping[str, object] | None = None,
        options: Sequence[str] = (),
        wrapper: Sequence[str] = (),
        **how: Any,
    ) -> list[Running]:
        """Start an agent on each of these hosts. ``how`` is for ``Host.run``."""
        argv = [*wrapper, *self._argv({**self._conf, **(conf or {})}, options)]
        started = [host.run(argv, **how) for host in hosts]
        self.agents += started
        return started

    def _argv(self, conf: Mapping[str, object], options: Sequence[str]) -> list[str]:
        told = ",".join(f"{key}={value}" for key, value in conf.items())
        return [
            *(sys.executable, "-m", "tenax", "run"),
            *("--nnodes", self.nnodes, "--nproc-per-node", str(self._nproc)),
            *("--rdzv-backend", "tcp", "--rdzv-endpoint", self.endpoint, "--rdzv-id", self.run_id),
            *("--max-restarts", str(self.max_restarts)),
            *(("--rdzv-conf", told) if told else ()),
            *self._options,
            *options,
            *self._program,
        ]

    # --- facts --------------------------------------------------------------------------------------------------------

    def until(self, fact: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
        """Wait for a fact about the history or the agents."""

        def updated() -> T:
            self.history.update()
            return fact()

        return self.lab.until(updated, lambda: f"{what}\n{self.tell()}", timeout_s)

    def until_at_work(
        self, world_size: int, *, after: Generation | None = None, timeout_s: float = PATIENCE_S
    ) -> Generation:
        """Until all ranks of a generation of this size beat; a later one than ``after``, if that is given."""
        least = after.number if after is not None else 0

        def found() -> Generation | None:
            latest = self.history.latest()
            if latest is None or latest.number <= least or not latest.is_at_work or latest.world_size != world_size:
                return None
            return latest

        return self._known(self.until(found, f"a generation of {world_size} after {least}", timeout_s))

    @staticmethod
    def _known(generation: Generation | None) -> Generation:
        assert generation is not None
        return generation

    def until_said(self, agent: Running, text: str, timeout_s: float = PATIENCE_S) -> None:
        def said() -> bool:
            is_over = agent.is_over
            found = text in agent.err
            assert found or not is_over, f"{agent.name} was to say {text!r}\n{self.tell()}"
            return found

        self.until(said, f"{agent.name} was to say {text!r}", timeout_s)

    def until_it_worked_for(self, generation: Generation, seconds: float, *, pids: set[int] | None = None) -> None:
        """Until every worker of it (or these) has beaten for so long. Fails if another generation comes instead."""
        self.history.update()
        workers = [worker for worker in generation.by_rank() if pids is None or worker.pid in pids]
        least = max(worker.last_at for worker in workers) + seconds

        def worked() -> bool:
            assert self.history.latest() is generation, f"{generation} was to stay\n{self.tell()}"
            return all(worker.last_at >= least for worker in workers)

        self.until(worked, f"{generation} was to work for {seconds:g} s", seconds + PATIENCE_S)

    def tell(self) -> str:
        """Everything that is known, for the reader of a failed test."""
        generations = "\n".join(map(repr, self.history.in_order()))
        return f"{generations}\n\n{self.lab.tell()}"

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self, *agents: Running) -> list[Done]:
        """The workers are told to finish: these agents (all that were started, if not said) succeed. Then check."""
        (self.folder / "finish").touch()
        done = self.over(*agents)
        codes = {agent.name: result.code for agent, result in zip(agents or self.agents, done, strict=True)}
        assert not any(codes.values()), f"not all succeeded: {codes}\n{self.tell()}"
        self.check()
        return done

    def over(self, *agents: Running) -> list[Done]:
        """Wait for the end of these agents, or of all."""
        for agent in agents or self.agents:
            self.until(lambda agent=agent: agent.is_over, f"the end of {agent.name}")  # type: ignore[misc]
        return [agent.wait() for agent in agents or self.agents]

    def check(self) -> None:
        """The whole history so far is as it must be."""
        self.history.update()
        violations = self.history.violations(self.max_restarts)
        assert not violations, "\n".join([*violations, "", self.tell()])
