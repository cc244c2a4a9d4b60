"""Starts the real program as a user would, observes it from outside, and checks that it leaves nothing behind.

Everything that a test starts has a mark in its environment, which every descendant inherits, whatever its session.
After a test there must be no process with the mark, except zombies.

Nothing here sleeps to hide a race: ``until`` polls for a condition, up to a timeout.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kit.processes import TIMEOUT_S

T = TypeVar("T")

MARK = "TENAX_E2E_MARK"
_HERE = Path(__file__).parent
_SCRIPT = Path(sys.executable).parent / "tenax"
TENAX = [str(_SCRIPT)] if _SCRIPT.exists() else [sys.executable, "-m", "tenax"]
_REMOVED_VARIABLES = re.compile(
    "PET_|TORCH|TENAX(?!_PRIVATE_DIR)|OMP_|CUDA_|PYTHON(?!PATH)|NO_COLOR|COLUMNS|LINES|(LOCAL_|GROUP_|ROLE_)?RANK|WORLD_SIZE|MASTER_"
)

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


def until(condition: Callable[[], T], what: str | Callable[[], str], timeout_s: float = TIMEOUT_S) -> T:
    """Poll until the condition is true, and return its value. Fails with a message after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"timed out after {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.003)
    return found


def is_alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Return whether this child exits within the timeout."""
    if process.poll() is not None:
        return True
    handle = os.pidfd_open(process.pid)
    try:
        return bool(select.select([handle], [], [], max(0.0, timeout_s))[0])
    finally:
        os.close(handle)


def holders(port: int, pids: list[int]) -> list[int]:
    """Return those of these processes that hold the socket that listens at this port."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    assert inodes, f"no process listens at port {port}"
    return [pid for pid in pids if any(str(fd.readlink()) in inodes for fd in Path(f"/proc/{pid}/fd").iterdir())]


class Done:
    """A finished run: its exit code, its output, and the report in it."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def messages(self) -> list[str]:
        """tenax's own lines, without their prefix."""
        return [line[7:] for line in self.err.splitlines() if line.startswith("tenax: ")]

    @property
    def report(self) -> str:
        """The block at the end; empty if there is none."""
        ruler = "\n" + "=" * 80 + "\n"
        text = "\n" + self.err
        return text[text.index(ruler) + 1 :] if ruler in text else ""

    def field(self, name: str) -> str:
        """Return a field of the report by its name, in one line."""
        match = re.search(rf"^  {re.escape(name)} +(.*(?:\n {{13}}\S.*)*)$", self.report, re.MULTILINE)
        return re.sub(r"\n +", " ", match.group(1)) if match else ""

    def __repr__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Running:
    """A process with its output in two files, so that no unread pipe can block it."""

    def __init__(self, runner: Runner, process: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self._runner = runner
        self.process = process
        self.pid = process.pid
        self._out = out
        self._err = err

    @property
    def out(self) -> str:
        return self._out.read_text(errors="backslashreplace") if self._out.exists() else ""

    @property
    def err(self) -> str:
        return self._err.read_text(errors="backslashreplace") if self._err.exists() else ""

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def until_printed(self, text: str, timeout_s: float = TIMEOUT_S) -> None:
        until(lambda: text in self.err, lambda: f"{text!r} on stderr, which is:\n{self.err}", timeout_s)

    def wait(self, timeout_s: float = TIMEOUT_S) -> Done:
        if not ended(self.process, timeout_s):
            pytest.fail(f"still running after {timeout_s:g} s\n--- stdout\n{self.out}\n--- stderr\n{self.err}")
        done = Done(self.process.wait(), self.out, self.err)
        if done.code == 2 or done.code < 0:
            # Rejected, or killed before it could clean up: its helpers exit by themselves.
            self._runner.leaves_within_s = 1.0
        return done


class Runner:
    """A folder, a clean environment, and everything that one test started in it."""

    def __init__(self, home: Path, name: str) -> None:
        self.home = home
        self.notes = home / "notes"
        self.notes.mkdir()
        (home / "tmp").mkdir()
        self.mark = f"{os.getpid()}-{name}"
        clean = {key: value for key, value in os.environ.items() if not _REMOVED_VARIABLES.match(key)}
        self.environ = {
            **clean,
            MARK: self.mark,
            "E2E_NOTES": str(self.notes),
            "TMPDIR": str(home / "tmp"),
            "TERM": "xterm-256color",
        }
        self.leaves_within_s = 0.0  # how long processes may take to exit after the test; for agents that were killed
        self._started: list[Running] = []
        self._terminals: list[Terminal] = []
        shutil.copy(_HERE / "worker_kit.py", home)

    # --- scripts and notes --------------------------------------------------------------------------------------------

    def script(self, source: str, name: str = "train.py") -> str:
        """Write a script; return its name, relative to the folder."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return name

    def note(self, name: str, rank: int = 0, attempt: int = 0, timeout_s: float = TIMEOUT_S) -> str:
        """Wait for a worker's note and read it."""
        path = self.notes / f"{name}.{rank}.{attempt}"
        begun = [running for running in self._started if running.process.poll() is None]

        def missing() -> str:
            console = begun[-1].err if begun else ""
            return f"the note {path.name}; there are {sorted(os.listdir(self.notes))}; stderr is:\n{console}"

        def is_over() -> bool:
            return bool(begun) and all(running.process.poll() is not None for running in begun)

        until(lambda: path.exists() or is_over(), missing, timeout_s)
        if not path.exists():
            pytest.fail(f"the program ended without {missing()}")
        return path.read_text()

    def noted(self, name: str, rank: int = 0, attempt: int = 0) -> bool:
        return (self.notes / f"{name}.{rank}.{attempt}").exists()

    def pids(self, workers: int, attempt: int = 0) -> list[int]:
        """Return the pids of the workers of an attempt, when all of them are ready."""
        return [int(self.note("ready", rank, attempt)) for rank in range(workers)]

    def leave_note(self, name: str, rank: int = 0, attempt: int = 0) -> None:
        """Leave a note for a worker."""
        (self.notes / f"{name}.{rank}.{attempt}").touch()

    # --- running ------------------------------------------------------------------------------------------------------

    def start(
        self, *arguments: str, program: list[str] | None = None, env: Mapping[str, str] | None = None, **options: Any
    ) -> Running:
        """Start ``tenax run ARGUMENTS`` (or another program) in the folder."""
        number = len(self._started)
        out, err = self.home / f"stdout.{number}", self.home / f"stderr.{number}"
        with out.open("wb") as out_file, err.open("wb") as err_file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out_file, "stderr": err_file, "cwd": self.home, **options}
            command = [*([*TENAX, "run"] if program is None else program), *arguments]
            process = subprocess.Popen(command, env={**self.environ, **(env or {})}, **streams)
        running = Running(self, process, out, err)
        self._started.append(running)
        return running

    def run(self, *arguments: str, timeout_s: float = TIMEOUT_S, **options: Any) -> Done:
        return self.start(*arguments, **options).wait(timeout_s)

    def terminal(self, *arguments: str, **options: Any) -> Terminal:
        """Start ``tenax run ARGUMENTS`` in its own terminal."""
        terminal = Terminal([*TENAX, "run", *arguments], self, **options)
        self._terminals.append(terminal)
        return terminal

    # --- processes and files ------------------------------------------------------------------------------------------

    def alive(self) -> dict[int, str]:
        """Return every live process with this test's mark, with its command."""
        mark = f"{MARK}={self.mark}".encode()
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):  # exited meanwhile
                    variables = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                    if mark in variables and is_alive(int(entry)):
                        command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ")
                        found[int(entry)] = command.decode(errors="replace")
        return found

    def store_pids(self) -> list[int]:
        """Return the processes that serve the workers' store."""
        return [pid for pid, command in self.alive().items() if "tenax-store" in command]

    def run_dir(self, log_dir: str = "logs") -> Path:
        """Return the folder of the only run in a log folder."""
        (folder,) = (self.home / log_dir).iterdir()
        return folder

    def close(self) -> None:
        """Kill what the test has left, by pid, and fail if there was something."""
        unfinished = [running for running in self._started if running.process.poll() is None]
        for running in unfinished:
            running.process.kill()
            running.process.wait()
        for terminal in self._terminals:
            terminal.close()
        deadline = time.monotonic() + (1.0 if unfinished else self.leaves_within_s)
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.003)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not unfinished, f"the test left {len(unfinished)} programs running"
        assert not left, f"processes were left: {left}"


class Terminal:
    """A program that controls a pseudo-terminal."""

    def __init__(
        self,
        command: list[str],
        runner: Runner,
        *,
        columns: int = 100,
        rows: int = 30,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._seen = bytearray()

        def take_control() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=runner.home,
            env={**runner.environ, **(env or {})},
            start_new_session=True,
            preexec_fn=take_control,
        )
        os.close(slave)

    @property
    def seen(self) -> str:
        """Everything that was written to it, including escape codes."""
        return self._seen.decode(errors="backslashreplace")

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def hang_up(self) -> None:
        """Close the terminal."""
        os.close(self._master)
        self._master = -1

    def until(self, text: str, timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.seen:
            if not self._read(deadline - time.monotonic()):
                pytest.fail(f"timed out waiting for {text!r}; the terminal has {self.seen!r}")

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Read until the program is gone; its exit code."""
        deadline = time.monotonic() + timeout_s
        while self._read(deadline - time.monotonic()):
            pass
        if not ended(self.process, deadline - time.monotonic()):
            pytest.fail(f"still running; the terminal has {self.seen!r}")
        return self.process.wait()

    def _read(self, timeout_s: float) -> bool:
        """Read what comes next. Return whether something came before the end or the deadline."""
        if self._master < 0 or timeout_s <= 0 or not select.select([self._master], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self._seen += data
        return bool(data)

    def close(self) -> None:
        if self._master >= 0:
            os.close(self._master)
            self._master = -1
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Screen:
    """A terminal with its rows of text, drawn by tmux."""

    def __init__(self, runner: Runner, command: list[str], columns: int = 100, rows: int = 30) -> None:
        self._tmux = ["tmux", "-L", f"tenax-e2e-{runner.mark}"]
        self._runner = runner
        size = ["-x", str(columns), "-y", str(rows)]
        self._do("-f", "/dev/null", "new-session", "-d", *size, "-c", str(runner.home), *command)

    def _do(self, *arguments: str) -> str:
        done = subprocess.run([*self._tmux, *arguments], env=self._runner.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def rows(self) -> list[str]:
        return self._do("capture-pane", "-p").rstrip("\n").split("\n")

    def until(self, text: str) -> list[str]:
        def shown() -> list[str] | None:
            rows = self.rows()
            return rows if any(text in row for row in rows) else None

        return until(shown, f"{text!r} on the screen")

    def type(self, *keys: str) -> None:
        self._do("send-keys", *keys)

    def close(self) -> None:
        pids = [int(pid) for pid in self._do("display-message", "-p", "#{pid} #{pane_pid}").split()]
        self._do("kill-server")
        until(lambda: not any(map(is_alive, pids)), "the end of tmux and of the program in it")


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this size. Needs root."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"could not mount a file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def control_group(controller: str, limit: str, value: int) -> Iterator[list[str]]:
    """Create a control group (version 1) with a limit; yield the command prefix that uses it. Needs root."""
    group = Path(f"/sys/fs/cgroup/{controller}/tenax-e2e-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs control groups of version 1: {error}")
    try:
        (group / limit).write_text(str(value))
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()
