"""A script cannot tell whether its worker is warm or cold.

One script notes what it can see of itself, in two workers of two generations, cold and warm, for every way to run a
script; every property is compared. What is known to differ, and meant to, has a test of its own at the end:

    the hash seed            one for all workers, unless PYTHONHASHSEED is set
    /proc/PID/environ        shows what the template was started with
    the start time           is that of the moment when the standby was forked (in test_deaths.py)
    gc.get_freeze_count()    what was preloaded is frozen, and not looked at by collections
    sys.modules              holds what was preloaded before the script's first line
    what an import prints    is printed once, by tenax
    a copy of os.environ     that a module makes when it is imported has no RANK (in test_fork_safety.py)
    what .pth files run      is run once, before a worker has its environment
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.jobs import Done, Runner
from kit.processes import needs_torch

from . import observe_main
from .pairs import ATTEMPTS, WORKERS, Kind, Pair, Seen, pair


def _as_folder(home: Path) -> None:
    (home / "program").mkdir()
    shutil.move(home / "observe_main.py", home / "program" / "__main__.py")
    for name in ("tiny_kit", "late_kit.py"):
        shutil.move(home / name, home / "program")


def _as_link(home: Path) -> None:
    (home / "place").mkdir()
    for name in ("observe_main.py", "tiny_kit", "late_kit.py"):
        shutil.move(home / name, home / "place")
    (home / "link.py").symlink_to("place/observe_main.py")


def _as_submodule(home: Path) -> None:
    (home / "outer").mkdir()
    (home / "outer" / "__init__.py").touch()
    shutil.move(home / "observe_main.py", home / "outer" / "observe_main.py")


KINDS = {
    "plain": Kind("observe_main.py", heavy=True),
    "module": Kind("-m", "outer.observe_main", prepare=_as_submodule, heavy=True),
    "link-terminal": Kind("link.py", prepare=_as_link, terminal=True),
    "folder-placed-redirected": Kind(
        "--redirects",
        "3",
        "--virtual-local-rank",
        "--numa-binding",
        "exclusive",
        "program",
        prepare=_as_folder,
        env={"CUDA_VISIBLE_DEVICES": "4,5", "OMP_NUM_THREADS": "1"},
    ),
    "odd-teed": Kind(
        "--tee",
        "3",
        "observe_main.py",
        env={
            "PYTHONHASHSEED": "7",
            "PYTHONFAULTHANDLER": "0",
            "PYTHONIOENCODING": "latin-1:replace",
            "PYTHONWARNINGS": "error::BytesWarning",
            "PYTHONOPTIMIZE": "1",
            "LC_ALL": "C",
            "TZ": "Asia/Kolkata",
            "EMPTY": "",
            "LINES_IN_IT": "one\ntwo",
            "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
        },
    ),
}


def _pair(name: str, factory: pytest.TempPathFactory) -> Pair:
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    return pair(KINDS[name], name, shared)


@pytest.fixture(params=KINDS, scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return _pair(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return _pair("plain", tmp_path_factory)


def _by_worker(seen: Seen, name: str) -> dict[str, Any]:
    return {
        f"rank {rank}, attempt {attempt}": seen.of(rank, attempt).get(name, "not seen")
        for attempt in range(ATTEMPTS)
        for rank in range(WORKERS)
    }


def _differences(cold: dict[str, Any], warm: dict[str, Any]) -> Iterator[str]:
    for worker, before in cold.items():
        after = warm[worker]
        if isinstance(before, list) and isinstance(after, list):
            only = [each for each in before if each not in after], [each for each in after if each not in before]
            before, after = only if any(only) else (before, after)
        if cold[worker] != warm[worker]:
            yield f"{worker}: cold {before!r}, warm {after!r}"


# --- every property ---------------------------------------------------------------------------------------------------


def test_every_property_is_the_same_as_in_a_cold_worker(runs: Pair) -> None:
    different = [
        f"{name}: {difference}"
        for name in observe_main.SAME
        for difference in _differences(_by_worker(runs.cold, name), _by_worker(runs.warm, name))
    ]
    assert not different, "\n".join(different)


@pytest.mark.parametrize("name", observe_main.OWN)
def test_a_property_differs_between_workers(runs: Pair, name: str) -> None:
    for seen in (runs.cold, runs.warm):
        values = seen.every(name)
        assert len({str(value) for value in values}) == len(values), values


def test_the_run_ends_in_the_same_way(runs: Pair) -> None:
    assert runs.cold.code == runs.warm.code == 0
    assert runs.cold.ended == runs.warm.ended
    assert "ended.0.0" in runs.warm.ended  # functions for the end of a program ran, also after an exception


def test_every_worker_was_warm(runs: Pair) -> None:
    """Otherwise nothing was compared."""
    output = runs.warm.err or runs.warm.out
    assert "workers are forked warm: numpy, json, tiny_kit" in output
    assert len(set(runs.warm.every("imported_in"))) == 1
    assert len(set(runs.cold.every("imported_in"))) == WORKERS * ATTEMPTS


def test_all_have_one_parent(runs: Pair) -> None:
    for seen in (runs.cold, runs.warm):
        assert len(set(seen.every("parent"))) == 1


def test_an_uncaught_exception_is_recorded_in_the_same_way(runs: Pair) -> None:
    (where,) = runs.cold.errors
    assert list(runs.warm.errors) == [where]
    cold, warm = (seen.errors[where]["message"] for seen in (runs.cold, runs.warm))
    assert warm["message"] == cold["message"] == "LookupError: the first attempt is over"
    assert warm["extraInfo"]["py_callstack"] == cold["extraInfo"]["py_callstack"]
    assert set(warm["extraInfo"]) == set(cold["extraInfo"])


def test_the_console_shows_the_same_output_of_workers(runs: Pair) -> None:
    """In any order of the workers."""
    if not runs.warm.err:
        pytest.skip("a terminal shows what is done meanwhile, too")

    def lines(seen: Seen) -> list[str]:
        every = (seen.out + seen.err).replace("\r", "").splitlines()
        ours = [line for line in every if "tiny_kit says hello" not in line and not line.startswith("tenax: ")]
        return sorted(ours)

    assert lines(runs.warm) == lines(runs.cold)


# --- ends -------------------------------------------------------------------------------------------------------------

ENDS = {
    "exit_code": "sys.exit(3)",
    "exit_with_a_text": "sys.exit('that is all')",
    "exception": "raise ValueError('ä text\\nwith two lines')",
    "chained_exception": "exec('try: 1/0\\nexcept ZeroDivisionError as e: raise KeyError(5) from e')",
    "exit_at_once": "os._exit(9)",
    "abort": "os.abort()",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "os.kill(os.getpid(), signal.SIGTERM)",
    "broken_pipe_signal": "signal.signal(signal.SIGPIPE, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGPIPE)",
    "interrupted": "raise KeyboardInterrupt",
    "interrupted_by_signal": "os.kill(os.getpid(), signal.SIGINT); time.sleep(30)",
    "segmentation_fault": "ctypes.string_at(0)",
    "recursion": "(lambda f: f(f))(lambda f: f(f))",
    "exception_in_a_thread_then_exit": "t = threading.Thread(target=lambda: 1/0); t.start(); t.join(); sys.exit(5)",
    "exception_at_exit": "atexit.register(lambda: 1/0); sys.exit(6)",
    "output_is_lost": "sys.stdout.write('half a line'); sys.exit(7)",
    "well": "print('well')",
}


class Ends:
    """One run in which each attempt ends in another way."""

    def __init__(self, runner: Runner, modules: str) -> None:
        source = "import atexit, ctypes, json, os, signal, sys, threading, time\n"
        source += "atexit.register(lambda: print('at exit', flush=True))\n"
        source += "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        for number, code in enumerate(ENDS.values()):
            source += f"def end_{number}():\n    {code}\n"
        source += "globals()[f'end_{attempt}']()\n"
        (runner.home / "ends.py").write_text(source)
        restarts = str(len(ENDS) - 1)
        arguments = ["--max-restarts", restarts, "--redirects", "3", "--log-dir", "logs", "--rdzv-id", "job"]
        done = runner.run(*arguments, "--preload", modules, "ends.py", timeout_s=60)
        assert done.code == 0, done
        folder = runner.run_dir()
        journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
        exits = [line["event"] for line in journal if line.get("event", {}).get("event") == "WorkerExited"]
        self.found = {}
        for number, name in enumerate(ENDS):
            place = folder / f"attempt_{number}" / "0"
            stderr = re.sub("0x[0-9a-f]+", "0xADDRESS", (place / "stderr.log").read_text())
            stderr = re.sub(r"\nExtension modules: .*\n", "", stderr)  # which are loaded: known to differ
            error = place / "error.json"
            message = json.loads(error.read_text())["message"] if error.exists() else None
            if message is not None:
                del message["extraInfo"]["timestamp"], message["extraInfo"]["timestamp_s"]
            text = json.dumps([exits[number]["exit_code"], (place / "stdout.log").read_text(), stderr, message])
            self.found[name] = json.loads(text.replace(str(runner.home), "HOME"))
        self.console = [line for line in done.messages if not line.startswith("workers are forked warm")]
        self.console = [re.sub(r"pid \d+|job_\w+", "N", line) for line in self.console]
        self.was_warm = "workers are forked warm" in done.err


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ends]:
    found = {}
    for temper, modules in (("cold", "none"), ("warm", "json,ctypes")):
        runner = Runner(tmp_path_factory.mktemp(temper), temper)
        try:
            found[temper] = Ends(runner, modules)
        finally:
            runner.close()
    assert found["warm"].was_warm
    return found


@pytest.mark.parametrize("name", ENDS)
def test_a_warm_worker_ends_as_a_cold_one(ends: dict[str, Ends], name: str) -> None:
    """With the same exit code, last output and error file."""
    assert ends["warm"].found[name] == ends["cold"].found[name]


def test_the_console_shows_the_same_messages(ends: dict[str, Ends]) -> None:
    """Except for the durations."""
    consoles = [[line for line in ends[way].console if " was training" not in line] for way in ("warm", "cold")]
    assert consoles[0] == consoles[1]
    assert consoles[0] != ends["warm"].console


# --- what runs at the start of every interpreter ----------------------------------------------------------------------


def _both_ways(runner: Runner, modules: str, *arguments: str, **env: str) -> tuple[Done, Done]:
    """Run cold, then warm; the notes of the warm run are kept."""
    cold = runner.run("--nproc-per-node", "2", "--preload", "none", *arguments, env=env)
    warm = runner.run("--nproc-per-node", "2", "--preload", modules, *arguments, env=env)
    assert cold.code == 0, cold
    assert warm.code == 0, warm
    assert "workers are forked warm" in warm.err
    return cold, warm


def test_a_profiler_started_by_sitecustomize_sees_every_worker(runner: Runner) -> None:
    """As coverage does: it writes its counts at the end of each process."""
    runner.script(
        """
        import atexit, os, sys
        counted = {"main": 0, "kit": 0}
        def count(frame, event, argument):
            name = os.path.basename(frame.f_code.co_filename)
            if event == "call" and name in ("train.py", "counted_kit.py"):
                counted["main" if name == "train.py" else "kit"] += 1
        def write_count():
            print("counted", counted["main"], counted["kit"] > 0)
        if "RANK" in os.environ:
            sys.setprofile(count)
            atexit.register(write_count)
        """,
        "lib/sitecustomize.py",
    )
    runner.script("def work(): return 1", "counted_kit.py")
    script = runner.script("import counted_kit\ndef work(): return 1\nwork()\nwork()\ncounted_kit.work()\n")
    for modules in ("none", "counted_kit"):
        env = {"PYTHONPATH": str(runner.home / "lib")}
        done = runner.run("--nproc-per-node", "2", "--preload", modules, script, env=env)
        assert done.out.splitlines() == ["counted 3 True"] * 2
        why = f"this Python has a sitecustomize ({runner.home}/lib/sitecustomize.py), which must run before any import"
        assert (f"workers start cold: {why}" in done.err) == (modules != "none")


def test_a_folder_that_sitecustomize_puts_first_is_searched_first(runner: Runner) -> None:
    """It chooses between two versions of a module."""
    runner.script("import sys\nsys.path.insert(0, sys.path[0] + '/../new')", "lib/sitecustomize.py")
    runner.script("VERSION = 'old'", "old/chosen_kit.py")
    runner.script("VERSION = 'new'", "new/chosen_kit.py")
    script = runner.script("import chosen_kit\nprint(chosen_kit.VERSION)")
    path = f"{runner.home}/lib{os.pathsep}{runner.home}/old"
    cold = runner.run("--nproc-per-node", "2", "--preload", "none", script, env={"PYTHONPATH": path})
    warm = runner.run("--nproc-per-node", "2", "--preload", "chosen_kit", script, env={"PYTHONPATH": path})
    assert cold.out.split() == ["new", "new"]
    assert warm.out.split() == cold.out.split()


def test_an_import_hook_of_sitecustomize_sees_every_import(runner: Runner) -> None:
    """As tracing tools do, which change modules when they are imported."""
    runner.script(
        """
        import sys
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "plain_kit":
                    sys.seen_by_hook = True
        sys.meta_path.insert(0, Finder())
        """,
        "lib/sitecustomize.py",
    )
    runner.script("", "plain_kit.py")
    script = runner.script("import sys\nimport plain_kit\nprint(getattr(sys, 'seen_by_hook', False))")
    env = {"PYTHONPATH": str(runner.home / "lib")}
    for modules in ("none", "plain_kit"):
        assert runner.run("--nproc-per-node", "2", "--preload", modules, script, env=env).out.split() == ["True"] * 2


@pytest.fixture
def other_python(runner: Runner) -> str:
    """An interpreter in another environment, without tenax, that runs a .pth file at its start."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", runner.home / "venv"], check=True, timeout=60)
    (site,) = (runner.home / "venv").glob("lib/python*/site-packages")
    (site / "at_start.pth").write_text("import at_start_kit\n")
    (site / "at_start_kit.py").write_text("import os, sys\nsys.started = os.environ.get('RANK', 'none'), os.getpid()\n")
    return str(runner.home / "venv" / "bin" / "python")


def test_another_interpreter_is_forked_warm(runner: Runner, other_python: str) -> None:
    runner.script("import os\nIMPORTED_IN = os.getpid()", "plain_kit.py")
    script = runner.script(
        "import sys, plain_kit\nprint(plain_kit.IMPORTED_IN, 'tenax' in sys.modules, sys.executable)"
    )
    cold, warm = _both_ways(runner, "plain_kit", script, PYTHON_EXEC=other_python)
    for done in (cold, warm):
        assert [line.split(maxsplit=1)[1] for line in done.out.splitlines()] == [f"False {other_python}"] * 2, done
    assert len(set(warm.out.splitlines())) == 1
    assert len(set(cold.out.splitlines())) == 2


def test_a_pth_file_runs_once(runner: Runner, other_python: str) -> None:
    """A known difference: it runs before the template can stop the interpreter."""
    runner.script("", "plain_kit.py")
    script = runner.script("import os, sys, plain_kit\nprint(sys.started[0], sys.started[1] == os.getpid())")
    env = {"PYTHON_EXEC": other_python}
    for modules, seen in (("none", ["0 True", "1 True"]), ("plain_kit", ["none False", "none False"])):
        done = runner.run("--nproc-per-node", "2", "--preload", modules, script, env=env)
        assert sorted(done.out.splitlines()) == seen, modules


# --- torch ------------------------------------------------------------------------------------------------------------


@needs_torch
def test_preloaded_torch_works_as_if_each_worker_had_imported_it(runner: Runner) -> None:
    script = runner.script(
        """
        import json, os, sys
        import torch
        import torch.distributed as dist
        from worker_kit import ATTEMPT, RANK, note
        dist.init_process_group("gloo")
        total = torch.ones(3) * (RANK + 1)
        dist.all_reduce(total)
        model = torch.nn.Linear(4, 2)
        model(torch.ones(2, 4)).sum().backward()
        loader = torch.utils.data.DataLoader(list(range(8)), batch_size=4, num_workers=1)
        note("seen", json.dumps({
            "sum": total.tolist(), "threads": torch.get_num_threads(), "interop": torch.get_num_interop_threads(),
            "seed": torch.initial_seed(), "random": torch.rand(2).tolist(), "cuda": torch.cuda.is_initialized(),
            "grad": model.weight.grad.tolist(), "loaded": [batch.tolist() for batch in loader],
            "matmul": torch.matmul(torch.ones(300, 300), torch.ones(300, 300)).sum().item(),
        }))
        dist.destroy_process_group()
        sys.exit(3 if ATTEMPT + 1 < int(sys.argv[1]) and RANK == 0 else 0)
        """
    )
    seen: dict[str, list[Any]] = {}
    short = tempfile.mkdtemp(dir="/tmp")  # torch's loaders make sockets there, whose paths must be short
    for modules, attempts in (("none", 1), ("auto", 2)):
        arguments = ["--nproc-per-node", "2", "--max-restarts", "1", "--preload", modules]
        done = runner.run(*arguments, script, str(attempts), timeout_s=100, env={"TMPDIR": short})
        assert done.code == 0, done
        seen[modules] = [
            json.loads(runner.note("seen", rank, attempt)) for attempt in range(attempts) for rank in (0, 1)
        ]
        assert ("workers are forked warm: torch" in done.err) == (modules == "auto")
        for name in ("seed", "random"):
            drawn = [str(each.pop(name)) for each in seen[modules]]
            assert len(set(drawn)) == len(drawn), (modules, name, drawn)
    assert seen["auto"] == seen["none"] * 2
    shutil.rmtree(short)


# --- what is known to differ ------------------------------------------------------------------------------------------


def test_the_hash_seed_is_shared(plain: Pair) -> None:
    assert len(set(plain.warm.every("hash_of_text"))) == 1
    assert len(set(plain.cold.every("hash_of_text"))) == WORKERS * ATTEMPTS


def test_the_hash_seed_of_the_environment_holds(tmp_path_factory: pytest.TempPathFactory) -> None:
    runs = _pair("odd-teed", tmp_path_factory)
    assert set(runs.warm.every("hash_of_text")) == set(runs.cold.every("hash_of_text"))
    assert len(set(runs.warm.every("hash_of_text"))) == 1


def test_the_environment_at_the_start_is_the_templates(plain: Pair) -> None:
    assert all("RANK" in names for names in plain.cold.every("environment_at_start"))
    assert all("RANK" not in names for names in plain.warm.every("environment_at_start"))


def test_preloaded_objects_are_frozen(plain: Pair) -> None:
    assert set(plain.cold.every("frozen_objects")) == {0}
    assert all(count > 1000 for count in plain.warm.every("frozen_objects"))


def test_preloaded_modules_are_loaded_before_the_first_line(plain: Pair) -> None:
    for names in plain.cold.every("loaded_at_first"):
        assert not {"numpy", "tiny_kit"} & set(names)
    for names in plain.warm.every("loaded_at_first"):
        assert {"numpy", "tiny_kit", "tiny_kit.inner"} <= set(names)


def test_output_of_an_import_is_printed_once(plain: Pair) -> None:
    assert plain.cold.out.count("tiny_kit says hello") == WORKERS * ATTEMPTS
    assert plain.warm.out.count("tiny_kit says hello") == 0
    assert plain.warm.err.count("tenax: while preloading: tiny_kit says hello") == 1
