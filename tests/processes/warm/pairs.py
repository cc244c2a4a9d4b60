"""The same job twice, cold and warm, with what its workers observed of their process.

Each kind of job runs once; its observations are in a folder that all processes of a parallel test run share.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.jobs import Done, Runner, Running

HERE = Path(__file__).parent
WORKERS = 2
ATTEMPTS = 2
PRELOADED = "numpy,json,tiny_kit"

# Modules that are next to the script.
_KIT = {
    "tiny_kit/__init__.py": """
        import os, sys
        from . import inner
        TOUCHED = inner.VALUE + 1
        IMPORTED_IN = os.getpid()
        os.environ["TINY_KIT_WAS_HERE"] = "yes"
        print("tiny_kit says hello")
        """,
    "tiny_kit/inner.py": "VALUE = 41",
    "late_kit.py": "VALUE = 'late'",
    "lib/on_the_path.py": "",
}


class Kind:
    """A way to run the script."""

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        prepare: Callable[[Path], None] = lambda _: None,
        terminal: bool = False,
        heavy: bool = False,
    ) -> None:
        """``arguments``: the arguments between ``tenax run`` and the script's arguments."""
        self.arguments = arguments
        self.env = {**({"SIGHT_HEAVY": "1"} if heavy else {}), **(env or {})}
        self.prepare = prepare
        self.terminal = terminal


class Seen:
    """The result of one run."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.code: int = data["code"]
        self.out: str = data["out"]
        self.err: str = data["err"]
        self._workers: dict[str, dict[str, Any]] = data["workers"]
        self.ended: list[str] = data["ended"]
        self.errors: dict[str, Any] = data["errors"]

    def of(self, rank: int, attempt: int) -> dict[str, Any]:
        return self._workers[f"{rank}.{attempt}"]

    def every(self, name: str) -> list[Any]:
        return [self.of(rank, attempt)[name] for attempt in range(ATTEMPTS) for rank in range(WORKERS)]


class Pair:
    def __init__(self, data: dict[str, Any]) -> None:
        self.cold = Seen(data["cold"])
        self.warm = Seen(data["warm"])


def pair(kind: Kind, name: str, shared: Path) -> Pair:
    """Run it, or read the observations of the process that ran it."""
    found = shared / f"warm-pair-{name}.json"
    with open(shared / f"warm-pair-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            place = shared / f"warm-pair-{name}"
            shutil.rmtree(place, ignore_errors=True)
            found.write_text(json.dumps(_run_both(kind, place)))
    return Pair(json.loads(found.read_text()))


def _run_both(kind: Kind, place: Path) -> dict[str, Any]:
    runners, begun = {}, {}
    try:
        for temper, modules in (("cold", "none"), ("warm", PRELOADED)):
            home = place / temper
            home.mkdir(parents=True)
            runner = runners[temper] = Runner(home, f"{os.urandom(4).hex()}")
            _furnish(home)
            kind.prepare(home)
            begun[temper] = _begin(runner, kind, modules)
        return {temper: _findings(runners[temper], begun[temper]) for temper in runners}
    finally:
        for runner in runners.values():
            runner.close()


def _furnish(home: Path) -> None:
    for name, source in _KIT.items():
        path = home / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(source))
    shutil.copy(HERE / "observe_main.py", home)
    (home / "seen").mkdir()
    (home / "input").write_text("what stands in the file\n")


def _begin(runner: Runner, kind: Kind, modules: str) -> Any:
    arguments = ["--nproc-per-node", str(WORKERS), "--max-restarts", "1", "--rdzv-id", "job", "--log-dir", "logs"]
    arguments += ["--preload", modules, *kind.arguments, "seen", "--local-rank=${local_rank}", "two words", ""]
    env = {"PYTHONPATH": f"{runner.home}/lib", **kind.env}
    if kind.terminal:
        terminal = runner.terminal(*arguments, env=env)
        terminal.type(b"what is typed\n\x04" * ATTEMPTS)  # each attempt reads as far as the next end of input
        return terminal
    with open(runner.home / "input") as file:
        return runner.start(*arguments, env=env, stdin=file)


def _findings(runner: Runner, begun: Any) -> dict[str, Any]:
    done = begun.wait(60) if isinstance(begun, Running) else Done(begun.wait(60), begun.seen, "")
    home = runner.home
    data = {
        "code": done.code,
        "out": done.out,
        "err": done.err,
        "workers": {path.stem: json.loads(path.read_text()) for path in (home / "seen").glob("*.json")},
        "ended": sorted(path.name for path in (home / "seen").glob("ended.*")),
        "errors": {
            str(path.relative_to(runner.run_dir())): json.loads(path.read_text())
            for path in runner.run_dir().glob("attempt_*/*/error.json")
        },
    }
    return json.loads(_alike(json.dumps(data), home, runner))  # type: ignore[no-any-return]


def _alike(text: str, home: Path, runner: Runner) -> str:
    """Return the value without what differs between two runs: paths, marks, ports and pids."""
    text = text.replace(str(home), "HOME").replace(runner.mark, "MARK")
    text = re.sub(r"logs/job_[0-9a-f]+", "logs/job", text)
    text = re.sub(r"(TENAX_KEEPER\W{1,9})[0-9a-f]{16}", r"\1KEEPER", text)
    text = re.sub(r"(MASTER_PORT\W{1,9})\d+", r"\1PORT", text)
    text = re.sub(r"(TORCHELASTIC_TIMER_FILE\W{1,9})[\w/.-]+", r"\1PIPE", text)
    text = re.sub(r"/dev/pts/\d+", "/dev/pts/N", text)
    return re.sub(r"pid \d+", "pid PID", text)
