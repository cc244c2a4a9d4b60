"""Modules that cannot be forked are not preloaded, with a message; all others are.

One run preloads a module for each reason, with two good ones around them. Every module notes in which process it was
imported: one that was preloaded was imported in the same process for all workers, one that was left out in each worker.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import textwrap
from collections.abc import Callable, Iterator

import pytest

from kit.jobs import Done, Runner

from .family import Family, slow_module

MARKED = "import os\nIMPORTED_IN = os.getpid()\n"

# A module's source, and the expected message.
LEFT_OUT = {
    "thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, name='watcher', daemon=True).start()",
        r"it has started a thread \(watcher\), which a forked process would not have",
    ),
    "threads": (
        """
        import threading
        for name in ("one", "two"):
            threading.Thread(target=threading.Event().wait, name=name, daemon=True).start()
        """,
        r"it has started 2 threads \(one, two\), which a forked process would not have",
    ),
    "file": ("KEPT = open(__file__)", r"it keeps /.*/left_file.py open, which all workers would share"),
    "socket": ("import socket\nKEPT = socket.socket()", r"it keeps socket:\[\d+\] open, which all workers would share"),
    "pipe": ("KEPT = os.pipe()", r"it keeps pipe:\[\d+\] open, which all workers would share"),
    "epoll": ("import select\nKEPT = select.epoll()", r"it keeps anon_inode:\[eventpoll\] open.*"),
    "child": (
        "import subprocess\nKEPT = subprocess.Popen(['sleep', '60'])",
        r"a process that it started is alive \([\w-]+\)",
    ),
    "orphan": (
        """
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", "60"])
        """,
        r"a process that it started is alive \([\w-]+\)",
    ),
    "reads_item": ("KEPT = 'RANK' and os.environ.get('RANK')", r"it reads RANK when it is imported, and only .*"),
    "reads_getenv": ("KEPT = os.getenv('LOCAL_RANK', '0')", r"it reads LOCAL_RANK when it is imported, .*"),
    "reads_in": ("KEPT = 'WORLD_SIZE' in os.environ", r"it reads WORLD_SIZE when it is imported, .*"),
    "reads_error": (
        """
        try:
            KEPT = os.environ['MASTER_ADDR']
        except KeyError:
            KEPT = None
        """,
        r"it reads MASTER_ADDR when it is imported, .*",
    ),
    "sets": ("os.environ['LOCAL_RANK'] = '0'", r"it sets LOCAL_RANK when it is imported, .*"),
    "sets_default": ("os.environ.setdefault('RANK', '0')", r"it (reads|sets) RANK when it is imported, .*"),
    "folder": ("os.chdir('/')", r"it changes the working directory \(to /\)"),
    "mask": ("os.umask(0o27)", r"it changes the umask"),
    "arguments": ("import sys\nsys.argv.append('more')", r"it changes sys.argv"),
    "path": ("import sys\nsys.path.insert(0, '/')", r"it puts a folder before the script's on sys.path"),
    "failing": ("raise ValueError('not today')", r"it cannot be imported \(ValueError: not today\)"),
    "exiting": ("import sys\nsys.exit('enough')", r"it cannot be imported \(SystemExit: enough\)"),
    "ending": ("os._exit(5)", r"the process that imported it exited with code 5"),
    "killed": ("os.kill(os.getpid(), 9)", r"the process that imported it was killed by SIGKILL"),
    "crashing": (
        "import ctypes, faulthandler\nfaulthandler.disable()\nctypes.string_at(0)",
        r"the process that imported it was killed by SIGSEGV",
    ),
    "missing": (None, r"it cannot be imported \(ModuleNotFoundError: No module named 'left_missing'\)"),
}
# What ends the worker that imports it, or what there is not.
NOT_FOR_WORKERS = {"failing", "exiting", "ending", "killed", "crashing", "missing"}

KEPT = {
    "good": "",
    "prints": "import sys\nprint('first line\\nsecond line')\nprint('to stderr', file=sys.stderr)",
    "tidy": """
        import socket, subprocess, tempfile, threading
        with tempfile.TemporaryFile(), socket.socket():
            pass
        subprocess.run(["true"], check=True)
        done = threading.Thread(target=int)
        done.start()
        done.join()
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        QUIET = open("/dev/null")
        """,
    "reads_lasting": "LASTING = os.environ['TORCHELASTIC_RUN_ID'], os.environ.get('PATH'), 'NOT_SET' in os.environ",
    "last": "",
}

# A module, what a worker finds of it, and what that must be: as if the worker had imported it itself.
AS_IF_OWN: dict[str, tuple[str, str, Callable[[int], object]]] = {
    "reads_bytes": ("KEPT = os.fsdecode(os.environb.get(b'RANK', b'none'))", "module.KEPT", str),
    "deletes_a_variable": (
        "try:\n    del os.environ['ROLE_RANK']\nexcept KeyError:\n    pass",
        "os.environ.get('ROLE_RANK')",
        lambda _: None,
    ),
    "reads_the_path": (
        "KEPT = os.environ.get('PYTHONPATH'), os.environ.get('TENAX_RECORD_UNCAUGHT')",
        "module.KEPT",
        lambda _: ["/a/folder", None],
    ),
    "adds_to_the_path": (
        "os.environ['PYTHONPATH'] = os.environ['PYTHONPATH'] + ':/of/the/module'",
        "os.environ['PYTHONPATH']",
        lambda _: "/a/folder:/of/the/module",
    ),
    "changes_variables": (
        "os.environ['NEW_ONE'] = 'new'\nos.environ['CHANGED'] += ':changed'\ndel os.environ['GONE']",
        "[os.environ.get(name) for name in ('NEW_ONE', 'CHANGED', 'GONE')]",
        lambda _: ["new", "a:changed", None],
    ),
    "sets_a_timer": (
        "import signal\nsignal.setitimer(signal.ITIMER_REAL, 3600)",
        "__import__('signal').getitimer(0)[0] > 0",
        lambda _: True,
    ),
    "blocks_a_signal": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])",
        "list(__import__('signal').pthread_sigmask(0, []))",
        lambda _: [signal.SIGUSR2],
    ),
    "handles_a_signal": (
        "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: None)",
        "callable(__import__('signal').getsignal(10))",
        lambda _: True,
    ),
    "seeds": ("import random\nrandom.seed(7)", "__import__('random').random()", lambda _: random.Random(7).random()),
    "seeds_numpy": (
        "import numpy\nnumpy.random.seed(7)",
        "__import__('numpy').random.random()",
        lambda _: __import__("numpy").random.RandomState(7).random(),
    ),
    "changes_streams": (
        "import sys\nsys.stdout.reconfigure(errors='ignore')",
        "[sys.stdout.errors, sys.stderr.errors]",
        lambda _: ["ignore", "backslashreplace"],
    ),
    "changes_a_limit": (
        "import resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
        "__import__('resource').getrlimit(4)[0]",
        lambda _: 0,
    ),
    "adds_a_folder_at_the_end": ("import sys\nsys.path.append('/last')", "sys.path[-1]", lambda _: "/last"),
    "wants_to_be_called_at_the_end": (
        "import atexit\natexit.register(lambda: print('called in', os.getpid()))",
        "__import__('atexit')._ncallbacks() > 0",
        lambda _: True,
    ),
}

SCRIPT = """
    import importlib, json, os, sys
    names = sys.argv[1].split(",")
    finds = {}
    for name, look in json.loads(sys.argv[2]).items():
        module = importlib.import_module(name)
        finds[name] = eval(look)
    found = {}
    for name in names:
        module = importlib.import_module(name)
        found[name] = module.IMPORTED_IN
    sees = {"pid": os.getpid(), "imported": found, "finds": finds}
    with open(os.path.join(os.environ["E2E_NOTES"], os.environ["RANK"]), "w") as file:
        json.dump(sees, file)
    """


class Sight:
    """The result of the run."""

    def __init__(self, done: Done, workers: list[dict[str, object]]) -> None:
        self.done = done
        self.workers = workers
        self.cold = self  # the same run without anything preloaded

    def finds(self, name: str) -> list[object]:
        return [worker["finds"][f"own_{name}"] for worker in self.workers]  # type: ignore[index]

    def places(self, name: str) -> list[int]:
        return [worker["imported"][name] for worker in self.workers]  # type: ignore[index]

    @property
    def pids(self) -> list[object]:
        return [worker["pid"] for worker in self.workers]


def _write(runner: Runner, name: str, source: str) -> None:
    runner.script(MARKED + textwrap.dedent(source), f"{name}.py")


@pytest.fixture(scope="module")
def sight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sight]:
    runner = Runner(tmp_path_factory.mktemp("safety"), "safety")
    for name, (source, _) in LEFT_OUT.items():
        if source is not None:
            _write(runner, f"left_{name}", source)
    for name, source in KEPT.items():
        _write(runner, f"kept_{name}", source)
    for name, (source, _, _) in AS_IF_OWN.items():
        _write(runner, f"own_{name}", source)
    looks = {f"own_{name}": look for name, (_, look, _) in AS_IF_OWN.items()}
    left = [f"left_{name}" for name in LEFT_OUT]
    kept = [f"kept_{name}" for name in KEPT]
    preloaded = [kept[0], *left, *looks, *kept[1:]]
    imported = [*kept, *(f"left_{name}" for name in LEFT_OUT if name not in NOT_FOR_WORKERS)]
    script = runner.script(SCRIPT)
    seen = []
    try:
        for modules in (",".join(preloaded), "none"):
            arguments = ["--nproc-per-node", "2", "--preload", modules, script, ",".join(imported), json.dumps(looks)]
            done = runner.run(*arguments, env={"PYTHONPATH": "/a/folder", "CHANGED": "a", "GONE": "b"})
            assert done.code == 0, done
            seen.append(Sight(done, [json.loads((runner.notes / str(rank)).read_text()) for rank in range(2)]))
        seen[0].cold = seen[1]
        yield seen[0]
    finally:
        runner.close()


@pytest.mark.parametrize("name", LEFT_OUT)
def test_an_unsafe_module_is_left_out_with_a_reason(sight: Sight, name: str) -> None:
    why = LEFT_OUT[name][1]
    begin = f"left_{name} is not preloaded: "
    (message,) = [line for line in sight.done.messages if line.startswith(begin)] or ["no such line"]
    assert re.fullmatch(re.escape(begin) + why + "; each worker imports it itself", message), message


@pytest.mark.parametrize("name", [name for name in LEFT_OUT if name not in NOT_FOR_WORKERS])
def test_each_worker_imports_a_left_out_module_itself(sight: Sight, name: str) -> None:
    assert sight.places(f"left_{name}") == sight.pids


@pytest.mark.parametrize("name", KEPT)
def test_other_modules_are_preloaded(sight: Sight, name: str) -> None:
    places = set(sight.places(f"kept_{name}"))
    assert len(places) == 1
    assert not places & set(sight.pids)
    assert f"kept_{name} is not preloaded" not in sight.done.err


def test_output_of_an_import_is_printed_by_the_agent(sight: Sight) -> None:
    """Once per attempt, and in no worker."""
    assert "tenax: while preloading: first line\n" in sight.done.err
    assert "tenax: while preloading: to stderr\n" in sight.done.err
    assert "first line" not in sight.done.out


@pytest.mark.parametrize("name", AS_IF_OWN)
def test_a_module_looks_as_if_the_worker_had_imported_it(sight: Sight, name: str) -> None:
    """Whether it was preloaded or left out."""
    expected = [AS_IF_OWN[name][2](rank) for rank in range(2)]
    assert sight.cold.finds(name) == expected
    assert sight.finds(name) == expected


def test_exit_handlers_run_only_in_workers(sight: Sight) -> None:
    called = re.findall(r"called in (\d+)", sight.done.out + sight.done.err)
    assert sorted(map(int, called)) == sorted(sight.pids)  # type: ignore[type-var]


# --- what takes a run of its own --------------------------------------------------------------------------------------


def test_a_module_that_initialises_cuda_is_left_out(runner: Runner) -> None:
    """As reported by torch; a real one also opens its device."""
    runner.script("from . import cuda", "torch/__init__.py")
    runner.script("def is_initialized(): return True", "torch/cuda.py")
    done = runner.run("--nproc-per-node", "2", "--preload", "torch", runner.script("import torch"))
    assert done.code == 0
    assert "torch is not preloaded: it has initialised CUDA, which a forked process cannot use" in done.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_hanging_import_does_not_delay_the_end_of_the_run(runner: Runner, number: signal.Signals) -> None:
    slow_module(runner)
    arguments = ["--nproc-per-node", "2", "--max-restarts", "1", "--preload", "slow_kit", "--shutdown-timeout", "5"]
    running = runner.start(*arguments, runner.script("import slow_kit"))
    runner.note("importing")
    running.send(number)
    assert running.wait().code == 128 + number
    assert not runner.alive()


def test_a_killed_trial_leaves_out_one_module(runner: Runner) -> None:
    """As when memory runs out."""
    slow_module(runner)
    runner.script(MARKED, "good_kit.py")
    script = runner.script("import good_kit, os\nfrom worker_kit import note\nnote('place', good_kit.IMPORTED_IN)")
    running = runner.start("--nproc-per-node", "2", "--preload", "good_kit,slow_kit", script)
    family = Family(runner, running)
    pid = int(runner.note("importing"))
    assert pid == family.template
    os.kill(pid, signal.SIGKILL)
    assert running.wait().code == 0
    assert "slow_kit is not preloaded: the process that imported it was killed by SIGKILL" in running.err
    assert runner.note("place") == runner.note("place", 1)


def test_a_module_that_executes_the_program_again_starts_no_extra_worker(runner: Runner) -> None:
    """Some modules do that to change LD_LIBRARY_PATH."""
    runner.script(
        """
        import os, sys
        if "STARTED_ANEW" not in os.environ:
            os.environ["STARTED_ANEW"] = "1"
            os.execv(sys.executable, sys.orig_argv)
        """,
        "anew_kit.py",
    )
    script = runner.script(
        """
        import anew_kit, os
        from pathlib import Path
        Path(os.environ["E2E_NOTES"], f"ran.{os.getpid()}").write_text(os.environ.get("RANK", "none"))
        """
    )
    done = runner.run("--nproc-per-node", "2", "--preload", "anew_kit", script)
    ran = sorted(path.read_text() for path in runner.notes.glob("ran.*"))
    assert done.code == 0
    assert ran == ["0", "1"]


def test_numpy_with_its_threads_is_preloaded_and_works(runner: Runner) -> None:
    """It ends its threads before a fork and restarts them on demand."""
    script = runner.script(
        """
        import os, sys
        import numpy
        from worker_kit import ATTEMPT, note
        one = numpy.ones((600, 600))
        note("sum", f"{numpy.dot(one, one).sum():.0f} {numpy.linalg.det(numpy.eye(300)):.0f}")
        sys.exit(3 if ATTEMPT == 0 else 0)
        """
    )
    env = {"OPENBLAS_NUM_THREADS": "4"}
    done = runner.run("--max-restarts", "1", "--preload", "numpy", script, env=env)
    assert done.code == 0, done
    assert "workers are forked warm: numpy" in done.err
    assert [runner.note("sum", 0, attempt) for attempt in range(2)] == ["216000000 1"] * 2


def test_a_namespace_package_named_like_a_hook_module_is_preloaded(runner: Runner) -> None:
    """Its name begins like those of tenax's modules in a template, and it has no file."""
    runner.script(MARKED, "tenax_plugs/one.py")
    script = runner.script(
        "import tenax_plugs.one\nfrom worker_kit import note\nnote('in', tenax_plugs.one.IMPORTED_IN)"
    )
    done = runner.run("--nproc-per-node", "2", "--preload", "tenax_plugs.one", script)
    assert done.code == 0, done
    assert "Error in sitecustomize" not in done.err
    assert runner.note("in", 0) == runner.note("in", 1)


def test_a_folder_created_later_on_the_path_is_searched(runner: Runner) -> None:
    """The first generation creates a folder on PYTHONPATH, and the second imports from it."""
    script = runner.script(
        """
        import os, sys
        import good_kit
        from worker_kit import ATTEMPT, RANK, note, ready
        folder = os.environ["PYTHONPATH"]
        if ATTEMPT == 0:
            if RANK == 0:
                os.mkdir(folder)
                with open(os.path.join(folder, "later_kit.py"), "w") as file:
                    file.write("VALUE = 1")
            ready()
            sys.exit(3)
        import later_kit
        note("value", later_kit.VALUE)
        """
    )
    runner.script(MARKED, "good_kit.py")
    for modules in ("none", "good_kit"):
        for path in runner.notes.iterdir():
            path.unlink()
        env = {"PYTHONPATH": str(runner.home / f"later_{modules}")}
        done = runner.run("--nproc-per-node", "2", "--max-restarts", "1", "--preload", modules, script, env=env)
        assert done.code == 0, f"{modules}: {done.err}"
    assert "forked warm" in done.err


def test_a_copy_of_the_whole_environment_at_import_is_the_templates(runner: Runner) -> None:
    """A known difference: many modules copy the environment to search it for their own names."""
    runner.script("import os\nKEPT = os.environ.copy()", "copying_kit.py")
    script = runner.script("import copying_kit\nprint(copying_kit.KEPT.get('RANK'))")
    done = runner.run("--nproc-per-node", "2", "--preload", "copying_kit", script)
    assert done.out.split() == ["None", "None"]


def test_submodules_of_a_left_out_module_are_not_tried(runner: Runner) -> None:
    count = f"import os\nopen(f'{runner.notes}/{{os.getpid()}}', 'w').close()\n"
    runner.script(f"{count}os.environ.get('RANK')", "pack/__init__.py")
    runner.script("", "pack/inner.py")
    script = runner.script("import pack.inner")
    done = runner.run("--nproc-per-node", "2", "--preload", "pack,pack.inner", script)
    assert done.code == 0
    assert done.err.count("is not preloaded") == 1
    assert len(list(runner.notes.iterdir())) == 3  # one trial, two workers


def test_what_was_good_is_not_imported_again_when_a_module_is_left_out(runner: Runner) -> None:
    """Neither after one bad module nor after the next. Worker death and restart work as with one trial."""
    count = f"import os, time\nopen(f'{runner.notes}/{{__name__}}-{{os.getpid()}}', 'w').close()\n"
    runner.script(f"{count}time.sleep(0.4)", "slow_kit.py")
    runner.script("import os; os.environ.get('RANK')", "reading_kit.py")
    runner.script("raise ImportError('no')", "broken_kit.py")
    runner.script(count, "last_kit.py")
    script = runner.script(
        """
        import os, slow_kit, last_kit
        os._exit(1 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
        """
    )
    modules = "slow_kit,reading_kit,broken_kit,last_kit"
    done = runner.run("--nproc-per-node", "2", "--max-restarts", "1", "--preload", modules, script)
    assert done.code == 0, done.err
    assert "forked warm: slow_kit, last_kit imported once" in done.err
    assert done.err.count("is not preloaded") == 2
    imports = [path.name.partition("-")[0] for path in runner.notes.iterdir()]
    assert sorted(imports) == ["last_kit", "slow_kit"]


# --- what only ``auto`` must not do -----------------------------------------------------------------------------------


def _installed(runner: Runner, name: str, source: str) -> dict[str, str]:
    """Install a third-party package; return the environment in which it is found."""
    runner.script(textwrap.dedent(source), f"site-packages/{name}.py")
    return {"PYTHONPATH": str(runner.home / "site-packages")}


def _both(runner: Runner, script: str, env: dict[str, str], *arguments: str) -> tuple[Done, Done]:
    flags = ("--nproc-per-node", "2", "--max-restarts", "1")
    cold = runner.run(*flags, "--preload", "none", script, *arguments, env=env)
    warm = runner.run(*flags, "--preload", "auto", script, *arguments, env=env)
    assert (cold.code, warm.code) == (0, 0), (cold, warm)
    return cold, warm


def test_auto_preloads_installed_modules(runner: Runner) -> None:
    env = _installed(runner, "others_kit", "import multiprocessing, os\nIMPORTED_IN = os.getpid()")
    cold, warm = _both(runner, runner.script("import others_kit\nprint(others_kit.IMPORTED_IN)"), env)
    assert len(set(cold.out.split())) == 2
    assert len(set(warm.out.split())) == 1


def test_auto_does_not_try_packages_that_are_known_to_read_the_rank(runner: Runner) -> None:
    """The attempt would delay the workers by a second or more."""
    _installed(runner, "others_kit", "")
    env = _installed(runner, "torchmetrics", f"import os\nopen(f'{runner.notes}/{{os.getpid()}}', 'w').close()")
    script = runner.script("import torchmetrics, others_kit")
    done = runner.run("--nproc-per-node", "2", "--max-restarts", "1", script, env=env)
    assert done.code == 0, done.err
    assert "forked warm: others_kit imported once" in done.err
    assert "torchmetrics is not preloaded: it reads LOCAL_RANK when it is imported, and only workers have" in done.err
    assert len(list(runner.notes.iterdir())) == 2  # two workers, no trial


def test_auto_stops_at_a_script_that_changes_its_import_path(runner: Runner) -> None:
    """The installed module is not the one that the script imports."""
    env = _installed(runner, "others_kit", "WHO = 'installed'")
    runner.script("WHO = 'vendored'", "vendored/others_kit.py")
    script = runner.script("import sys\nsys.path.insert(0, 'vendored')\nimport others_kit\nprint(others_kit.WHO)")
    cold, warm = _both(runner, script, env)
    assert cold.out.split() == warm.out.split() == ["vendored"] * 2
    why = "others_kit is not preloaded: train.py, line 2, runs before its import and may affect it"
    assert f"{why}; --preload others_kit preloads it anyway" in warm.err


def test_a_variable_that_the_script_sets_is_set_before_its_imports(runner: Runner) -> None:
    env = _installed(runner, "others_kit", "import os\nLEVEL = os.environ.get('LEVEL')")
    script = runner.script("import os\nos.environ['LEVEL'] = '9'\nimport others_kit\nprint(others_kit.LEVEL)")
    cold, warm = _both(runner, script, env)
    assert cold.out.split() == warm.out.split() == ["9", "9"]


def test_third_party_modules_that_import_user_files_are_not_preloaded(runner: Runner) -> None:
    env = _installed(runner, "others_kit", "import own_settings")
    runner.script("import os\nIMPORTED_IN = os.getpid()", "own_settings.py")
    script = runner.script("import os, others_kit, own_settings\nprint(own_settings.IMPORTED_IN == os.getpid())")
    cold, warm = _both(runner, script, env)
    assert cold.out.split() == warm.out.split() == ["True", "True"]
    assert (
        f"it imports own_settings ({runner.home}/own_settings.py), which is one of your files and may change"
        in warm.err
    )


def test_modules_that_read_arguments_are_left_out_if_arguments_differ(runner: Runner) -> None:
    env = _installed(runner, "others_kit", "import sys\nKEPT = sys.argv[1:]")
    script = runner.script("import sys, others_kit\nprint(others_kit.KEPT == sys.argv[1:])")
    cold, warm = _both(runner, script, env, "--local-rank=${local_rank}")
    assert cold.out.split() == warm.out.split() == ["True", "True"]
    assert "it reads the arguments when it is imported, and each worker has its own" in warm.err


def test_modules_that_create_temporary_folders_are_left_out(runner: Runner) -> None:
    source = "import atexit, shutil, tempfile\nPLACE = tempfile.mkdtemp()\natexit.register(shutil.rmtree, PLACE)"
    env = _installed(runner, "others_kit", source)
    cold, warm = _both(runner, runner.script("import others_kit\nprint(others_kit.PLACE)"), env)
    assert len(set(cold.out.splitlines())) == len(set(warm.out.splitlines())) == 2
    assert "it creates a temporary file or folder when it is imported" in warm.err
