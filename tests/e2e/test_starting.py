"""Starting: what runs, with which environment and arguments, compared with torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.jobs import TENAX, Runner

TORCHRUN = Path(sys.executable).parent / "torchrun"

DUMP = """
    import json, os, sys
    from worker_kit import note
    note("seen", json.dumps({
        "env": dict(os.environ), "argv": sys.argv, "executable": os.path.realpath(sys.executable), "cwd": os.getcwd(),
        "path0": sys.path[0], "flags": str(sys.flags), "name": __name__, "stdin": sys.stdin.read(),
    }))
"""


def seen(runner: Runner, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(runner.note("seen", rank, timeout_s=1))
    return found


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_every_worker_runs_and_the_run_succeeds(runner: Runner, workers: int) -> None:
    """Each line is printed once, the exit code is 0, and there is no report."""
    script = runner.script("import os; print('hello from', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    done = runner.run("--nproc-per-node", str(workers), script)
    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == [f"hello from {rank} of {workers}" for rank in range(workers)]
    assert not done.report
    assert done.messages[-1].startswith("the run succeeded: "), done


def test_python_m_tenax_is_the_same_program(runner: Runner) -> None:
    script = runner.script("import sys; print(*sys.argv[1:])")
    for module in (["tenax", "run"], ["tenax.run"]):
        done = runner.run(script, "a b", program=[sys.executable, "-m", *module])
        assert (done.code, done.out) == (0, "a b\n"), done


# --- environment ------------------------------------------------------------------------------------------------------

SAME = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "CUDA_VISIBLE_DEVICES",
    "TORCHELASTIC_TIMER_FILE",
)
# With the reason.
DIFFERENT = {
    "MASTER_ADDR": "a name of this machine; ours needs no resolver",
    "MASTER_PORT": "a free port, another one for each run",
    "TORCHELASTIC_ERROR_FILE": "in the run's own folder",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "torchrun leaks it",
    "OMP_NUM_THREADS": "torchrun sets 1; tenax divides the cores",
    "TENAX_GENERATION": "ours",
    "TENAX_GENERATION_REASON": "ours: why this generation was formed",
    "TENAX_NOTICE_FILE": "ours: where a worker reads that a node will leave",
    "TENAX_KEEPER": "ours: how a lost process is found",
    "TENAX_ELASTIC_FD": "ours: how a worker that can survive reaches its agent",
    "PYTHONFAULTHANDLER": "ours: a crash in native code leaves its stack for the report",
    "_": "the shell's",
}


@pytest.mark.skipif(not TORCHRUN.exists(), reason="needs torchrun")
def test_the_environment_equals_that_of_torchrun(runner: Runner) -> None:
    """With the same arguments, except for documented differences."""
    script = runner.script(DUMP)
    arguments = [
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
        "--rdzv-id",
        "job7",
        "--role",
        "trainer",
        script,
        "--lr=1",
    ]
    environments = []
    for program in ([str(TORCHRUN), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"], [*TENAX, "run"]):
        done = runner.run(*arguments, program=program, env={"CUDA_VISIBLE_DEVICES": "3,4"}, timeout_s=60)
        assert done.code == 0, done
        environments.append([seen(runner, rank) for rank in range(2)])
    for theirs, ours in zip(*environments, strict=True):
        assert {name: ours["env"].get(name) for name in SAME} == {name: theirs["env"].get(name) for name in SAME}
        differing = {name for name in theirs["env"] | ours["env"] if theirs["env"].get(name) != ours["env"].get(name)}
        assert differing <= set(DIFFERENT), differing - set(DIFFERENT)
        for what in ("argv", "executable", "cwd", "path0", "flags", "name", "stdin"):
            assert ours[what] == theirs[what], what
    assert ours["env"]["MASTER_ADDR"] in ("127.0.0.1", "localhost")
    assert 0 < int(ours["env"]["MASTER_PORT"]) < 65536
    assert ours["env"]["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert ours["env"]["TORCHELASTIC_ERROR_FILE"].endswith("/attempt_0/1/error.json")


def test_each_attempt_has_its_own_restart_count_generation_port_and_error_file(runner: Runner) -> None:
    script = runner.script(
        """
        import os, sys
        from worker_kit import ATTEMPT, note
        names = "TORCHELASTIC_RESTART_COUNT TENAX_GENERATION MASTER_PORT TORCHELASTIC_ERROR_FILE".split()
        note("seen", "\\n".join(os.environ[name] for name in names))
        sys.exit(ATTEMPT < 2)
        """
    )
    assert runner.run("--max-restarts", "5", script).code == 0
    attempts = [runner.note("seen", attempt=attempt).splitlines() for attempt in range(3)]
    assert [(count, generation) for count, generation, _, _ in attempts] == [("0", "1"), ("1", "2"), ("2", "3")]
    assert len({port for _, _, port, _ in attempts}) == 3
    assert [Path(file).parts[-3] for *_, file in attempts] == ["attempt_0", "attempt_1", "attempt_2"]


def test_workers_share_the_cores_and_one_message_says_so(runner: Runner) -> None:
    """A value set by the user is kept, without a message."""
    script = runner.script(DUMP)
    done = runner.run("--nproc-per-node", "2", "--max-restarts", "1", script)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert int(seen(runner)["env"]["OMP_NUM_THREADS"]) <= share
    assert sum("OMP_NUM_THREADS" in line for line in done.messages) == 1, done
    done = runner.run("--nproc-per-node", "2", script, env={"OMP_NUM_THREADS": "5"})
    assert seen(runner)["env"]["OMP_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in done.err
    done = runner.run(script)
    assert "OMP_NUM_THREADS" not in seen(runner)["env"]
    assert "OMP_NUM_THREADS" not in done.err


def test_workers_inherit_folder_variables_limits_and_umask(runner: Runner) -> None:
    script = runner.script(
        """
        import os, resource
        from worker_kit import note
        mask = os.umask(0)
        note("seen", f"{os.getcwd()} {os.environ['MINE']} {mask:o} {resource.getrlimit(resource.RLIMIT_CORE)[0]}")
        """
    )
    folder = runner.home / "else where"
    folder.mkdir()
    command = 'umask 027; ulimit -c 0; cd "else where"; exec "$@"'
    done = runner.run(
        f"../{script}",
        program=["bash", "-c", command, "bash", *TENAX, "run"],
        env={"MINE": "a=b c\nd", "PYTHONPATH": ".."},
    )
    assert done.code == 0, done
    assert runner.note("seen") == f"{folder} a=b c\nd 27 0"


def test_workers_inherit_stdin_as_under_torchrun(runner: Runner) -> None:
    script = runner.script(DUMP)
    (runner.home / "data").write_text("one\ntwo\n")
    with (runner.home / "data").open() as data:
        assert runner.run(script, stdin=data).code == 0
    assert seen(runner)["stdin"] == "one\ntwo\n"


# --- ways to start ----------------------------------------------------------------------------------------------------

ARGUMENTS = ["--tee", "3", "--", "-m", "$$", "${HOME}", "a b", "", "--nproc-per-node=9", "-h", "*"]


def test_a_module_is_run_from_the_current_folder(runner: Runner) -> None:
    """As ``python -m`` does, with unchanged arguments."""
    runner.script("", "package/__init__.py")
    runner.script(DUMP, "package/train.py")
    assert runner.run("-m", "package.train", *ARGUMENTS).code == 0
    found = seen(runner)
    assert found["argv"] == [str(runner.home / "package/train.py"), *ARGUMENTS]
    assert (found["name"], found["path0"]) == ("__main__", str(runner.home))


def test_arguments_of_the_script_are_unchanged(runner: Runner) -> None:
    """Even if they look like flags of tenax or contain dollar signs."""
    assert runner.run(runner.script(DUMP), *ARGUMENTS).code == 0
    assert seen(runner)["argv"] == ["train.py", *ARGUMENTS]


def test_local_rank_is_substituted_in_arguments(runner: Runner) -> None:
    assert (
        runner.run("--nproc-per-node", "2", runner.script(DUMP), "--device=cuda:${local_rank}", "$local_rank").code == 0
    )
    for rank in range(2):
        assert seen(runner, rank)["argv"][1:] == [f"--device=cuda:{rank}", "$local_rank"]


def test_no_python_starts_any_program(runner: Runner) -> None:
    """Found on PATH or by its path."""
    done = runner.run(
        "--nproc-per-node", "2", "--no-python", "sh", "-c", 'echo "$RANK of $WORLD_SIZE, $0 $1"', "x", "y z"
    )
    assert sorted(done.out.splitlines()) == ["0 of 2, x y z", "1 of 2, x y z"], done


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_run_path_runs_the_script_as_main_with_any_start_method(runner: Runner, method: str) -> None:
    assert runner.run("--run-path", "--start-method", method, runner.script(DUMP), *ARGUMENTS).code == 0
    found = seen(runner)
    assert (found["argv"], found["name"], found["path0"]) == (["train.py", *ARGUMENTS], "__main__", str(runner.home))


def test_python_exec_sets_the_interpreter(runner: Runner) -> None:
    wrapper = runner.home / "my python"
    wrapper.write_text(f'#!/bin/sh\nWRAPPED=yes exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    assert runner.run(runner.script(DUMP), env={"PYTHON_EXEC": str(wrapper)}).code == 0
    assert seen(runner)["env"]["WRAPPED"] == "yes"


@pytest.mark.parametrize("word", ["auto", "cpu"])
def test_auto_and_cpu_start_one_worker_per_usable_cpu(runner: Runner, word: str) -> None:
    if word == "auto" and Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has GPUs")
    cpu = str(min(os.sched_getaffinity(0)))
    script = runner.script("import os; print(os.environ['WORLD_SIZE'])")
    done = runner.run("--nproc-per-node", word, script, program=["taskset", "-c", cpu, *TENAX, "run"])
    assert (done.code, done.out) == (0, "1\n"), done


def test_gpu_without_a_gpu_is_rejected(runner: Runner) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has GPUs")
    done = runner.run("--nproc-per-node", "gpu", runner.script(DUMP))
    assert done.code == 2
    assert "Traceback" not in done.err
    assert not runner.noted("seen")


def test_pet_variables_are_defaults_of_flags(runner: Runner) -> None:
    """For values and switches; the command line takes precedence."""
    runner.script("import os; print(os.environ['ROLE_NAME'], os.environ['WORLD_SIZE'])", "job.py")
    environ = {"PET_NPROC_PER_NODE": "3", "PET_ROLE": "actor", "PET_MODULE": "1"}
    done = runner.run("--nproc-per-node", "2", "job", env=environ)
    assert (done.code, done.out) == (0, "actor 2\n" * 2), done


def test_two_jobs_get_different_ids_and_ports(runner: Runner) -> None:
    script = runner.script(
        """
        import os
        from worker_kit import *
        note(os.environ["JOB"], os.environ["MASTER_PORT"] + os.environ["TORCHELASTIC_RUN_ID"])
        wait_for("a")
        wait_for("b")
        """
    )
    jobs = [runner.start(script, env={"JOB": name}) for name in "ab"]
    assert [job.wait().code for job in jobs] == [0, 0]
    assert runner.note("a") != runner.note("b")


def test_stdout_contains_only_the_output_of_workers(runner: Runner) -> None:
    """In a pipeline with ``set -eo pipefail`` the exit code counts."""
    runner.script("print(6 * 7)")
    shell = f"set -eo pipefail; {' '.join(TENAX)} run train.py 2>/dev/null | grep -x 42 && echo good"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=runner.home, env=runner.environ, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\ngood\n", "")
