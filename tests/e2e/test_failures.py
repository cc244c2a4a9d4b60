"""Failures: what the on-call person reads, and what the shell gets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from kit.jobs import TENAX, Bench, control_group, is_alive, needs_root, until

HOST = socket.gethostname()

# Rank 1 fails when all workers are up; the others stay until they are stopped.
RAISES = """
    from worker_kit import RANK, ready, stay

    def step():
        raise ValueError("loss is nan")

    ready()
    if RANK == 1:
        step()
    stay()
"""


def test_an_exception_is_reported_whole_once_and_last(bench: Bench) -> None:
    """Without any annotation: exception, traceback, host, rank and pid, once, at the very end."""
    done = bench.run("--nproc-per-node", "3", bench.script(RAISES))
    pids = bench.pids(3)
    assert done.code == 1
    assert done.err.endswith(done.report)
    assert done.err.count("First cause") == 1
    assert f"train.py failed: rank 1 on {HOST} raised ValueError: loss is nan" in done.report
    assert done.fact("rank") == f"1 (local rank 1) on {HOST}, pid {pids[1]}"
    assert done.fact("error") == "ValueError: loss is nan"
    assert 'train.py", line 5, in step' in done.report
    assert 'raise ValueError("loss is nan")' in done.report
    assert "Stopped by us, not failed: ranks 0, 2" in done.report
    # The worker's own traceback, where the worker printed it, and the report's: nobody else's.
    assert done.err.count("Traceback (most recent call last)") == 2
    assert "/tenax/" not in done.err.replace(str(bench.home), "")


def test_where_to_look_is_there(bench: Bench) -> None:
    """Every path in the report exists, and the command for the story works as it is printed."""
    done = bench.run("--nproc-per-node", "2", "--redirects", "3", "--log-dir", "my logs", bench.script(RAISES))
    assert "loss is nan" in (bench.home / done.fact("stderr log")).read_text()
    assert (bench.home / done.fact("logs")).is_dir()
    command = done.fact("the story").replace("tenax", " ".join(TENAX), 1)
    told = subprocess.run(["sh", "-c", command], cwd=bench.home, env=bench.environ, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "ValueError: loss is nan" in told.stdout
    assert "every decision follows from what happened" in told.stdout
    assert "Traceback" not in done.err[: -len(done.report)], "redirected: the console shows it only in the report"


def test_the_report_as_json(bench: Bench) -> None:
    """'--report FILE' has the same truth for machines."""
    done = bench.run("--nproc-per-node", "3", "--max-restarts", "1", "--report", "r.json", bench.script(RAISES))
    report = json.loads((bench.home / "r.json").read_bytes())
    cause = report["first_cause"]
    assert (report["outcome"], report["exit_code"], report["entrypoint"]) == ("failed", 1, "train.py")
    assert (cause["rank"], cause["host"], cause["pid"]) == (1, HOST, bench.pids(3, attempt=1)[1])
    assert (cause["error_type"], cause["message"]) == ("ValueError", "ValueError: loss is nan")
    assert cause["traceback"].splitlines()[-1] == "ValueError: loss is nan"
    assert [worker["rank"] for worker in report["stopped_by_us"]] == [0, 2]
    assert (report["restarts_used"], report["max_restarts"], len(report["history"])) == (1, 1, 1)
    assert str(bench.pids(3)[1]) in report["history"][0]
    assert report["summary"] in " ".join(done.report.split())


def test_the_history_of_restarts_is_in_the_report(bench: Bench) -> None:
    """Each earlier failure has its line, in order, and the budget is told."""
    script = bench.script("import sys; from worker_kit import ATTEMPT; sys.exit(f'no luck in attempt {ATTEMPT}')")
    done = bench.run("--max-restarts", "3", script)
    assert done.code == 1
    lines = [line for line in done.report.splitlines() if "(local rank 0, pid" in line]
    assert len(lines) == 3
    assert "Restarted 3 of 3 times, then gave up" in done.report
    assert "no luck in attempt 3" in done.report
    starts = [line for line in done.said if "starting 1 worker" in line]
    assert [line.split(":")[0] for line in starts] == [
        "generation 1",
        "generation 2 (restart 1 of 3)",
        "generation 3 (restart 2 of 3)",
        "generation 4 (restart 3 of 3)",
    ]


# --- exit codes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit(3)", 3, "exited with code 3"),
        ("sys.exit('some words')", 1, "some words"),
        ("os._exit(255)", 255, "exited with code 255"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "killed by SIGTERM"),
        ("ctypes.string_at(0)", 139, "SIGSEGV (invalid memory access)"),
        ("os.abort()", 134, "SIGABRT (aborted by itself)"),
        ("1/0", 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_the_exit_code_of_the_first_failed_worker_is_kept(bench: Bench, ending: str, code: int, words: str) -> None:
    """As a shell would say it, and in words in the report."""
    script = bench.script(
        f"import ctypes, os, signal, sys; from worker_kit import *; ready()\nif RANK: stay()\n{ending}"
    )
    done = bench.run("--nproc-per-node", "2", script)
    assert done.code == code, done
    assert words in done.report
    assert "Stopped by us, not failed: rank 1" in done.report


def test_a_program_that_vanishes_before_it_starts(bench: Bench) -> None:
    """What cannot be started is 127 or 126 as in a shell, and said with the name."""
    program = bench.home / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    done = bench.run("--no-python", "./program")
    assert done.code == 127, done
    said = " ".join(done.report.split())
    assert "could not be started: the interpreter in its first line does not exist: './program'" in said
    program.write_bytes(b"\x00\x01\x02 not a program")
    done = bench.run("--no-python", "./program")
    assert done.code == 126, done
    assert "could not be started: Exec format error: './program'" in done.report


def test_a_module_that_is_not_there(bench: Bench) -> None:
    """The interpreter's own sentence reaches the report."""
    done = bench.run("-m", "no_such_module")
    assert done.code == 1
    assert "No module named no_such_module" in done.report


def test_an_abort_while_the_interpreter_goes_down_does_not_hide_the_exception(bench: Bench) -> None:
    """torch sometimes aborts after an uncaught exception, on its way out: the exception is still the cause."""
    script = bench.script(
        """
        import atexit, os

        def torn_down():
            os.write(2, b"terminate called without an active exception\\n")
            os.abort()

        atexit.register(torn_down)
        raise ValueError("bad batch")
        """
    )
    done = bench.run(script)
    assert done.code == 134
    assert done.fact("error") == "ValueError: bad batch"


# --- annotated --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["tenax.multiprocessing.errors", "torch.distributed.elastic.multiprocessing.errors"])
def test_recorded_exceptions(bench: Bench, home: str) -> None:
    """Our own 'record' and torch's leave an error file, which the report names and reads."""
    if home.startswith("torch"):
        pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    script = bench.script(
        f"""
        from {home} import record

        @record
        def main():
            raise KeyError("no such batch")

        main()
        """
    )
    done = bench.run("--log-dir", "logs", script)
    assert done.code == 1
    assert done.fact("error") == "KeyError: 'no such batch'"
    assert 'raise KeyError("no such batch")' in done.report
    error = json.loads((bench.home / done.fact("error file")).read_bytes())
    assert error["message"]["message"] == "KeyError: 'no such batch'"


def test_a_recorded_exception_is_the_first_cause_although_its_process_dies_last(bench: Bench) -> None:
    """A rank that raised first, then took its time to die, beats the ones that failed because of it."""
    script = bench.script(
        """
        import sys
        from worker_kit import *
        from tenax.multiprocessing.errors import record

        @record
        def main():
            ready()
            if RANK == 0:
                raise RuntimeError("the real reason")
            wait_for("raised", rank=0)
            sys.exit("peer is gone")

        class Slow:
            def __del__(self):
                note("raised")
                wait_for("dead", rank=1)

        if RANK == 0:
            import atexit
            atexit.register(Slow().__del__)
        main()
        """
    )
    job = bench.start("--nproc-per-node", "2", script)
    bench.note("raised")
    job.until_said("rank 1")
    bench.tell("dead", rank=1)
    done = job.wait()
    assert done.fact("error") == "RuntimeError: the real reason", done


@pytest.mark.parametrize(
    "content",
    [
        '{"message": {"message": "Half of',
        "",
        "[" * 100_000,
        '{"message": "\\u001b[2J\\u001b]0;owned\\u0007\\n' + "A" * 100_000 + '"}',
        '{"message": {"message": 7, "extraInfo": {"timestamp": "yesterday", "py_callstack": {}}}}',
        "\x00\xff\xfe",
    ],
    ids=["truncated", "empty", "deep", "escapes", "wrong types", "binary"],
)
def test_an_error_file_can_hurt_nobody(bench: Bench, content: str) -> None:
    """Whatever stands in it: the exit code is the worker's, stderr is shown or named, no escape code gets through."""
    bench.script(
        """
        import os, sys
        from pathlib import Path
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_bytes(Path("content").read_bytes())
        print("what really happened", file=sys.stderr)
        sys.exit(9)
        """
    )
    (bench.home / "content").write_text(content, encoding="latin-1")
    done = bench.run("--redirects", "2", "--log-dir", "logs", "train.py")
    assert done.code == 9, done
    assert "\x1b" not in done.err
    assert "\x07" not in done.err
    assert len(done.report) < 8000
    assert "what really happened" in done.report + (bench.home / done.fact("stderr log")).read_text()


# --- more than one ----------------------------------------------------------------------------------------------------


def test_two_that_fail_by_themselves_are_both_told(bench: Bench) -> None:
    """Two ranks are dead before anybody could ask them to stop: one is the first cause, the other failed too."""
    script = bench.script(
        """
        from worker_kit import *
        ready()
        if RANK == 2:
            stay()
        wait_for("now", rank=0)
        raise RuntimeError(f"rank {RANK} is unhappy")
        """
    )
    job = bench.start("--nproc-per-node", "3", "--redirects", "2", script)
    pids = bench.pids(3)
    job.send(signal.SIGSTOP)  # so that both are dead when it looks
    bench.tell("now")
    until(lambda: not any(map(is_alive, pids[:2])), "both are dead")
    job.send(signal.SIGCONT)
    done = job.wait()
    assert done.code == 1
    assert "rank 0 is unhappy" in done.report
    assert "rank 1 is unhappy" in done.report
    assert "Stopped by us, not failed: rank 2" in done.report


def test_eight_that_fail_alike_are_told_once(bench: Bench) -> None:
    """The report stays one screen however many say the same."""
    script = bench.script("from worker_kit import ready; ready(); raise ConnectionError('peer is gone')")
    done = bench.run("--nproc-per-node", "8", "--redirects", "2", script)
    assert done.code == 1
    assert len(done.report.splitlines()) < 40, done.report


def test_a_worker_that_succeeds_when_asked_to_stop_is_not_a_failure(bench: Bench) -> None:
    """Collateral: a worker that catches SIGTERM and exits with 0, or with any code, was stopped by us."""
    script = bench.script(
        """
        import signal, sys
        from worker_kit import *
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0 if RANK == 0 else 77))
        ready()
        if RANK == 1:
            sys.exit(4)
        stay()
        """
    )
    done = bench.run("--nproc-per-node", "3", script)
    assert done.code == 4
    assert "Stopped by us, not failed: ranks 0, 2" in done.report


# --- out of memory ----------------------------------------------------------------------------------------------------


@needs_root
def test_a_worker_that_the_kernel_killed_for_memory(bench: Bench) -> None:
    """Killed by SIGKILL, and the report says why: out of memory, with the kernel's own count."""
    script = bench.script(
        """
        from worker_kit import *
        ready()
        if RANK == 1:
            hog = []
            while True:
                hog.append(b"x" * (1 << 20))
        stay()
        """
    )
    with control_group("memory", "memory.limit_in_bytes", 160 << 20) as enter:
        done = bench.run("--nproc-per-node", "2", script, program=[*enter, *TENAX, "run"])
    assert done.code == 137, done
    assert "out of memory" in done.report.split("----")[0], "in the headline"
    assert "oom_kill" in done.fact("memory")
    assert any("out of memory" in line for line in done.said)


def test_a_plain_kill_is_not_called_out_of_memory(bench: Bench) -> None:
    """Without proof the report does not guess."""
    job = bench.start(bench.script("from worker_kit import ready, stay; ready(); stay()"))
    os.kill(bench.pids(1)[0], signal.SIGKILL)
    done = job.wait()
    assert done.code == 137
    assert "memory" not in done.err


# --- limits ----------------------------------------------------------------------------------------------------------


def test_too_few_descriptors_for_so_many_workers(bench: Bench) -> None:
    """A limit of this process is told as what it is, with what to do, and ends the job in an orderly way."""
    command = 'ulimit -n 40; exec "$@"'
    program = ["sh", "-c", command, "sh", *TENAX, "run"]
    done = bench.run("--nproc-per-node", "32", "--no-python", "true", program=program)
    assert done.code == 1, done
    assert "could not be started" in done.report
    assert "Too many open files" in done.report
    assert "ulimit -n" in done.report
    assert "Traceback" not in done.err


@needs_root
def test_too_few_processes_for_so_many_workers(bench: Bench) -> None:
    """The system refuses a fork in the middle of the start: that is said, and who had started is stopped."""
    with control_group("pids", "pids.max", 7) as enter:  # the agent, two helpers with a few threads, and not much more
        done = bench.run("--nproc-per-node", "8", "--no-python", "sleep", "60", program=[*enter, *TENAX, "run"])
    # Whom it hits first is the system's choice: a worker, or a helper of ours that needs a process or a thread.
    said = " ".join(done.err.split())
    if done.code == 1:
        assert "could not be started: Resource temporarily unavailable" in said, done
    else:
        assert done.code == 71, done
        is_helper = "could not start the helper process" in said and "Resource temporarily unavailable" in said
        assert "can't start new thread" in said or is_helper, done
        assert "limits on processes" in said, done
    assert "Traceback" not in done.err


def test_too_few_descriptors_for_the_launcher_itself(bench: Bench) -> None:
    """Where not even our own helpers can be had, one sentence says so and what to raise; it is no bug of anybody."""
    program = ["sh", "-c", 'ulimit -n 8; exec "$@"', "sh", *TENAX, "run"]
    done = bench.run("--no-python", "true", program=program)
    assert done.code == 71, done
    assert "could not start the helper process" in done.err
    assert "ulimit -n" in done.err
    assert "Traceback" not in done.err


def test_a_spawned_function_of_a_script_without_a_main_guard(bench: Bench) -> None:
    """The remedy is named: what starts the run belongs under the guard."""
    script = bench.script(
        """
        from tenax.agent.server import LocalElasticAgent, WorkerSpec

        def work():
            return 1

        print(LocalElasticAgent(WorkerSpec(entrypoint=work, max_restarts=0), start_method="spawn").run().failures)
        """
    )
    done = bench.run(script, program=[sys.executable])
    assert "if __name__ == '__main__':" in done.out + done.err, done


# --- the launcher itself ----------------------------------------------------------------------------------------------


def test_a_script_that_breaks_the_import_system_does_not_break_the_launcher(bench: Bench) -> None:
    """Files next to the script that are named like modules of ours or of Python are the worker's alone."""
    for name in ("msgspec.py", "selectors.py", "json.py", "signal.py", "tenax.py", "socket.py"):
        bench.script("raise SystemExit('a stranger was imported')", name)
    if sys.version_info >= (3, 11):  # which can be told not to look into the current folder
        done = bench.run(bench.script("print('fine')"), program=[sys.executable, "-P", "-m", "tenax", "run"])
        assert (done.code, done.out) == (0, "fine\n"), done
    done = bench.run(bench.script("print('fine')"))
    assert (done.code, done.out) == (0, "fine\n"), done
