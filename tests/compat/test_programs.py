"""Unmodified programs for TorchElastic: workers, launchers, and their child processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kit.jobs import Runner
from kit.processes import needs_torch

from .conftest import Python

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="requires /proc")

# Uses names of all packages as TorchElastic's documentation shows.
WORKER = """
    import datetime, json, os, sys, tempfile
    {first}
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.events import Event, EventSource
    import torch.distributed.elastic.events as events
    import torch.distributed.elastic.metrics as metrics
    from torch.distributed.elastic.metrics import prof
    from torch.distributed.elastic.multiprocessing.errors import record
    import torch.distributed.elastic.rendezvous as rdzv
    import torch.distributed.elastic.timer as timer
    from torch.distributed.elastic.utils import get_env_variable_or_raise, macros
    from torch.distributed.elastic.utils.data import CyclingIterator
    from torch.distributed.elastic.utils.logging import get_logger
    from torch.distributed.elastic.utils.store import barrier, synchronize
    import torch.distributed.launcher as launcher

    log = get_logger(__name__)

    class Sink(metrics.MetricHandler):
        names = []
        def emit(self, metric_data):
            self.names.append(metric_data.name)

    @prof
    def step(number):
        return number * 2

    @record
    def main():
        rank = int(get_env_variable_or_raise("RANK"))
        metrics.configure(Sink())
        events.record(Event(name="began", source=EventSource.WORKER, metadata={{"rank": rank}}))
        total = sum(step(number) for number in CyclingIterator(2, lambda epoch: iter([epoch, rank])))
        metrics.put_metric("total", total)
        {work}
        things = (record, Event, prof, WorkerSpec, timer.expires, launcher.LaunchConfig)
        homes = {{thing.__module__ for thing in things}}
        print(json.dumps([rank, all(home.startswith("tenax.") for home in homes), sorted(set(Sink.names))]), flush=True)
        if len(sys.argv) > 1:
            raise rdzv.RendezvousClosedError(sys.argv[1])

    if __name__ == "__main__":
        main()
"""
MEASURED = ["__main__.step.duration.ms", "__main__.step.success", "total"]


def worker(work: str, first: str = "") -> str:
    return WORKER.format(work=work.strip(), first=first)


SYNCHRONIZE = """
        import tenax.store
        store = tenax.store.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        assert synchronize(store, str(rank).encode(), rank, 2, "here/") == [b"0", b"1"]
        barrier(store, 2, "gate", rank=rank)
        store.close()
"""
TRAIN = """
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        value = torch.tensor([float(rank)])
        dist.all_reduce(value)
        assert value.item() == 1.0
        store = dist.distributed_c10d._get_default_store()
        assert synchronize(store, str(rank).encode(), rank, 2, "here/") == [b"0", b"1"]
        barrier(store, 2, "gate", rank=rank)
        assert dist.is_torchelastic_launched()
        dist.destroy_process_group()
"""


def printed(out: str) -> list[object]:
    return sorted(json.loads(line) for line in out.splitlines() if line.startswith("["))


@needs_torch
def test_a_training_script_runs_with_torch(runner: Runner) -> None:
    """It uses torch's collectives and tenax's modules for elastic, which can be preloaded like torch's."""
    script = runner.script(worker(TRAIN, "import torch, torch.distributed as dist"))
    done = runner.run("--compat", "--nproc-per-node", "2", script, timeout_s=100)
    assert done.code == 0, done
    assert "is not preloaded" not in done.err
    assert printed(done.out) == [[0, True, MEASURED], [1, True, MEASURED]]


def test_a_training_script_runs_without_torch(runner: Runner, bare: Python) -> None:
    args = ("--compat", "--nproc-per-node", "2", runner.script(worker(SYNCHRONIZE)))
    done = runner.run(*args, program=[bare.path, "-m", "tenax", "run"])
    assert done.code == 0, done
    assert printed(done.out) == [[0, True, MEASURED], [1, True, MEASURED]]


def test_the_variable_enables_compat_like_the_flag(runner: Runner, bare: Python) -> None:
    args = ("--nproc-per-node", "2", runner.script(worker(SYNCHRONIZE)))
    done = runner.run(*args, program=[bare.path, "-m", "tenax", "run"], env={"PET_COMPAT": "1"})
    assert done.code == 0, done


def test_the_exception_of_a_script_is_reported(runner: Runner, bare: Python) -> None:
    """By ``record``, imported from torch's path."""
    script = runner.script(worker("pass"))
    done = runner.run("--compat", script, "out of time", program=[bare.path, "-m", "tenax", "run"])
    assert done.code == 1
    assert done.field("error") == "RendezvousClosedError: out of time"


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_scripts_run_with_run_path(runner: Runner, bare: Python, method: str) -> None:
    """With every start method."""
    args = ("--compat", "--run-path", "--start-method", method, runner.script(worker("pass")))
    done = runner.run(*args, program=[bare.path, "-m", "tenax", "run"])
    assert done.code == 0, done
    assert printed(done.out) == [[0, True, MEASURED]]


LAUNCHER = """
    import json, os, sys
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    def trainer(factor):
        from torch.distributed.elastic.utils import get_env_variable_or_raise
        return int(get_env_variable_or_raise("RANK")) * factor, get_env_variable_or_raise.__module__

    def config():
        return LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=int(os.environ["WORKERS"]), run_id="mine",
                            rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, start_method=sys.argv[1],
                            logs_specs=DefaultLogsSpecs(log_dir="logs", redirects=Std.NONE, tee=Std.NONE))

    if __name__ == "__main__":
        results = elastic_launch(config(), trainer)(21)
        print(json.dumps([results[rank] for rank in sorted(results)]), flush=True)
        if len(sys.argv) > 2:
            elastic_launch(config(), sys.executable)("-c", sys.argv[2])
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_launcher_starts_functions_and_programs(runner: Runner, bare: Python, method: str) -> None:
    """In both, torch's paths are redirected."""
    script = runner.script(LAUNCHER, "launcher.py")
    look = "import torch.distributed.elastic as e; print('worker', e.__name__)"
    done = runner.run(script, method, look, program=[bare.path, "-m", "tenax.compat"], env={"WORKERS": "2"})
    assert done.code == 0, done
    assert done.out.splitlines() == [
        '[[0, "tenax.utils.api"], [21, "tenax.utils.api"]]',
        *["worker tenax"] * 2,
    ]


@needs_torch
def test_a_launcher_runs_with_torch(runner: Runner) -> None:
    script = runner.script(LAUNCHER, "launcher.py")
    program = [sys.executable, "-m", "tenax.compat"]
    done = runner.run(script, "spawn", program=program, env={"WORKERS": "1"}, timeout_s=100)
    assert done.code == 0, done
    assert done.out == '[[0, "tenax.utils.api"]]\n'


def test_python_m_torch_distributed_run_is_tenax_run(runner: Runner, bare: Python) -> None:
    script = runner.script("import torch.distributed.elastic as e, os; print(e.__name__, os.environ['RANK'])")
    args = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    done = runner.run(*args, program=[bare.path, "-m", "tenax.compat"])
    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == ["tenax 0", "tenax 1"]


@needs_torch
def test_torch_distributed_launch_uses_tenax_run(runner: Runner) -> None:
    """The module itself is torch's."""
    script = runner.script("import sys; print(sys.argv[1:])")
    args = ("-W", "ignore", "-m", "torch.distributed.launch", "--nproc-per-node", "2", script, "--own")
    done = runner.run(*args, program=[sys.executable, "-m", "tenax.compat"], timeout_s=100)
    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == ["['--local-rank=0', '--own']", "['--local-rank=1', '--own']"]


def test_a_program_runs_as_without_compat(runner: Runner, bare: Python) -> None:
    """With the same name, arguments, ``sys.path``, exit code and flags of Python."""
    script = runner.script(
        """
        import sys
        import __main__
        print(__name__, sys.argv, __main__.__file__, sys.path[0], sys.flags.dev_mode, __main__.__spec__)
        sys.exit(7)
        """,
        "below/program.py",
    )
    plain = runner.run("-X", "dev", script, "--path", "-m", program=[bare.path])
    under = runner.run(script, "--path", "-m", program=[bare.path, "-X", "dev", "-m", "tenax.compat"])
    assert (under.code, under.out) == (plain.code, plain.out)
    assert under.code == 7


def test_the_printed_folder_on_pythonpath_enables_compat(bare: Python) -> None:
    folder = bare.run("-m", "tenax.compat", "--path").stdout.strip()
    assert bare.output("import torch.distributed.run as r; print(r.__name__)", PYTHONPATH=folder) == "tenax.run"


def test_child_processes_of_a_worker_inherit_compat_unless_the_variable_is_0(runner: Runner, bare: Python) -> None:
    script = runner.script(
        """
        import os, subprocess, sys
        look = "import importlib.util as u; print(u.find_spec('torch.distributed.elastic').origin is not None)"
        for value in (None, "0"):
            env = dict(os.environ) if value is None else dict(os.environ, TENAX_COMPAT=value)
            done = subprocess.run([sys.executable, "-c", look], env=env, capture_output=True, text=True)
            print(done.stdout.strip() or done.stderr.splitlines()[-1], flush=True)
        """
    )
    done = runner.run("--compat", script, program=[bare.path, "-m", "tenax", "run"])
    assert done.out.splitlines() == ["True", "ModuleNotFoundError: No module named 'torch'"]


def test_a_worker_without_tenax_prints_a_message_and_continues(runner: Runner, without_tenax: Python) -> None:
    """In one line; its child processes print nothing."""
    script = runner.script(
        """
        import os, subprocess, sys
        child = subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True)
        print("continued", child.stdout.strip(), repr(child.stderr))
        """
    )
    done = runner.run("--compat", script, env={"PYTHON_EXEC": without_tenax.path})
    assert done.code == 0, done
    assert done.out == "continued child ''\n"
    messages = [line for line in done.messages if "could not import tenax.compat" in line]
    assert len(messages) == 1
    assert "install tenax for this Python" in messages[0]


def test_without_the_flag_nothing_is_redirected(runner: Runner, bare: Python) -> None:
    script = runner.script("import torch.distributed.elastic")
    done = runner.run(script, program=[bare.path, "-m", "tenax", "run"])
    assert done.code == 1
    assert done.field("error") == "ModuleNotFoundError: No module named 'torch'"


def test_the_sitecustomize_of_the_environment_still_runs(runner: Runner, bare: Python) -> None:
    (runner.home / "lib").mkdir()
    (runner.home / "lib" / "sitecustomize.py").write_text("import sys\nsys.customized = True\n")
    script = runner.script(
        r"import sitecustomize, sys; print(sys.customized, sitecustomize.__file__, sys.path[1], sep='\n')"
    )
    lib = str(runner.home / "lib")
    done = runner.run("--compat", script, program=[bare.path, "-m", "tenax", "run"], env={"PYTHONPATH": lib})
    assert done.out.splitlines() == ["True", f"{lib}/sitecustomize.py", lib]


def test_a_plug_in_for_torchrun_works_in_the_launcher(runner: Runner, bare: Python) -> None:
    """A logs specs class that imports its base class from torch's path."""
    (runner.home / "plug_in.py").write_text(
        "from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs\n"
        "class Specs(DefaultLogsSpecs):\n"
        "    def __init__(self, **options):\n"
        "        super().__init__(**{**options, 'log_dir': 'plug_in_logs'})\n"
    )
    info = runner.home / "plug_in-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-in\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nmine = plug_in:Specs\n")
    args = ("--compat", "--logs-specs", "mine", "--redirects", "1", runner.script("print('line')"))
    env = {"PYTHONPATH": str(runner.home)}
    done = runner.run(*args, program=[bare.path, "-m", "tenax", "run"], env=env)
    assert done.code == 0, done
    assert (runner.run_dir("plug_in_logs") / "attempt_0" / "0" / "stdout.log").read_text() == "line\n"


def test_dry_run_shows_compat(runner: Runner) -> None:
    done = runner.run("--compat", "--dry-run", runner.script(""))
    assert "imports     torch.distributed.elastic is redirected to tenax (--compat)\n" in done.out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 2, "usage: python -m tenax.compat SCRIPT"),
        (("--help",), 0, "usage: python -m tenax.compat SCRIPT"),
        (("no-such-script.py",), 2, "can't open file"),
    ],
)
def test_the_command_without_a_program(bare: Python, args: tuple[str, ...], code: int, message: str) -> None:
    done = bare.run("-m", "tenax.compat", *args)
    assert done.returncode == code
    assert message in done.stdout + done.stderr


def test_a_python_that_ignores_the_environment_is_rejected(bare: Python) -> None:
    done = subprocess.run(
        [bare.path, "-E", "-m", "tenax.compat", "train.py"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "remove that flag" in done.stderr
