"""A cluster: the agents of one run on the hosts of a lab, and the history that its workers record.

Agents are started with ``python -m tenax run``. A test waits until a generation is working, causes a fault, and waits
for the next generation. At the end ``check`` checks the whole history against the invariants.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kit.jobs import Done

from .file_watch import TIMEOUT_S
from .history import Generation, History
from .lab import Host, Lab
from .running import Running

T = TypeVar("T")


def in_one_line(text: str) -> str:
    """Return the text without line breaks, whatever the width of the terminal."""
    return " ".join(text.split())


SCRIPTS = Path(__file__).parent / "scripts"
PORT = 29400
BEAT_S = "0.05"
# Half of the default lease: a lost node is detected sooner, and a busy machine may still pause for 2 s.
LEASE_S = 2.5
LEASE = {"keep_alive_interval": LEASE_S / 5, "keep_alive_max_attempt": 5}


class Cluster:
    """``nnodes`` as on the command line. node0 serves the endpoint unless ``endpoint`` is given."""

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
        arguments: Sequence[str] = ("--beat-s", BEAT_S, "--reach-master"),
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
        self._program = [str(SCRIPTS / script), str(self.folder), *arguments]

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
        options_text = ",".join(f"{key}={value}" for key, value in conf.items())
        return [
            *(sys.executable, "-m", "tenax", "run"),
            *("--nnodes", self.nnodes, "--nproc-per-node", str(self._nproc)),
            *("--rdzv-backend", "tcp", "--rdzv-endpoint", self.endpoint, "--rdzv-id", self.run_id),
            *("--max-restarts", str(self.max_restarts)),
            *(("--rdzv-conf", options_text) if options_text else ()),
            *self._options,
            *options,
            *self._program,
        ]

    # --- waiting ------------------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], T], what: str, timeout_s: float = TIMEOUT_S) -> T:
        """Wait until a condition of the history or the agents is true."""

        def updated() -> T:
            self.history.update()
            return condition()

        return self.lab.until(updated, lambda: f"{what}\n{self.describe()}", timeout_s)

    def until_at_work(
        self, world_size: int, *, after: Generation | None = None, timeout_s: float = TIMEOUT_S
    ) -> Generation:
        """Wait until all ranks of a generation of this size work; of a later one than ``after``, if given."""
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

    def until_printed(self, agent: Running, text: str, timeout_s: float = TIMEOUT_S) -> None:
        def is_printed() -> bool:
            is_over = agent.is_over
            found = text in agent.err
            assert found or not is_over, f"{agent.name} exited without printing {text!r}\n{self.describe()}"
            return found

        self.until(is_printed, f"{agent.name} to print {text!r}", timeout_s)

    def until_worked_for(self, generation: Generation, seconds: float, *, pids: set[int] | None = None) -> None:
        """Wait until every worker of it (or of these) has worked for that long. Fails if another generation forms."""
        self.history.update()
        workers = [worker for worker in generation.by_rank() if pids is None or worker.pid in pids]
        least = max(worker.last_at for worker in workers) + seconds

        def worked() -> bool:
            assert self.history.latest() is generation, f"{generation} was replaced\n{self.describe()}"
            return all(worker.last_at >= least for worker in workers)

        self.until(worked, f"{generation} to work for {seconds:g} s", seconds + TIMEOUT_S)

    def describe(self) -> str:
        """Return everything that is known, for the output of a failed test."""
        generations = "\n".join(map(repr, self.history.in_order()))
        return f"{generations}\n\n{self.lab.describe()}"

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self, *agents: Running) -> list[Done]:
        """Make the workers finish. These agents (by default all) must succeed. Then check the history."""
        (self.folder / "finish").touch()
        done = self.over(*agents)
        codes = {agent.name: result.code for agent, result in zip(agents or self.agents, done, strict=True)}
        assert not any(codes.values()), f"not all succeeded: {codes}\n{self.describe()}"
        self.check()
        return done

    def over(self, *agents: Running) -> list[Done]:
        """Wait until these agents, or all, have exited."""
        for agent in agents or self.agents:
            self.until(lambda agent=agent: agent.is_over, f"{agent.name} to exit")  # type: ignore[misc]
        return [agent.wait() for agent in agents or self.agents]

    def check(self) -> None:
        """Check the whole history against the invariants."""
        self.history.update()
        violations = self.history.violations(self.max_restarts)
        assert not violations, "\n".join([*violations, "", self.describe()])
