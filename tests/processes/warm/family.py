"""The processes of an agent with warm workers, read from the process table."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from kit.jobs import Runner, Running, is_alive, until

# A script whose workers note where a module was imported and stay until they are stopped.
STAYING = """
    import os, sys
    import marked_kit
    from worker_kit import note, ready, stay
    note("imported_in", marked_kit.IMPORTED_IN)
    ready()
    stay()
    """
MARKED_KIT = "import os\nIMPORTED_IN = os.getpid()\n"


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def started_at(pid: int) -> int:
    """Return the start time of a process, in clock ticks."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, number)


class Family:
    """The processes of one agent."""

    def __init__(self, runner: Runner, running: Running) -> None:
        self._runner = runner
        self.running = running
        self.keeper = until(lambda: self._children_of(running.pid, "tenax-keeper"), "a keeper")[0]

    def _children_of(self, parent: int, name: str) -> list[int]:
        try:
            listing = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        except OSError:
            return []
        found = [int(word) for word in listing.split()]
        return [pid for pid in found if is_alive(pid) and self._is_called(pid, name)]

    @staticmethod
    def _is_called(pid: int, name: str) -> bool:
        if name_of(pid) == name:
            return True
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] == name.encode()
        return False

    @property
    def root(self) -> int:
        """The interpreter that the keeper started as the template."""
        return until(lambda: self._children_of(self.keeper, "tenax-template"), "a template")[0]

    @property
    def template(self) -> int:
        """The process that has imported everything and forks."""
        return until(lambda: self._children_of(self.root, "tenax-template"), "a template that imports")[0]

    @property
    def forkers(self) -> list[int]:
        return self._children_of(self.template, "tenax-template")

    @property
    def standbys(self) -> set[int]:
        return set(self._children_of(self.keeper, "tenax-standby"))

    def until_standbys(
        self, count: int, *, without: set[int] | None = None, but_for: set[int] | None = None
    ) -> set[int]:
        """Wait for ``count`` standbys, none of ``without``. ``but_for``: not standbys, despite their name."""

        def there() -> set[int]:
            found = self.standbys - (but_for or set())
            return found if len(found) == count and not found & (without or set()) else set()

        return until(there, lambda: f"{count} standbys; there are {self.standbys}, stderr is\n{self.running.err}")


def slow_module(runner: Runner) -> None:
    """Write slow_kit.py: its import notes ``importing``, and waits for ``go_on``. It reads no variable of a worker,
    and several processes may import it at once.
    """
    runner.script(
        f"""
        import os, time
        draft = "{runner.notes}/draft.%d" % os.getpid()
        with open(draft, "w") as file:
            file.write(str(os.getpid()))
        os.rename(draft, "{runner.notes}/importing.0.0")
        while not os.path.exists("{runner.notes}/go_on.0.0"):
            time.sleep(0.005)
        """,
        "slow_kit.py",
    )
