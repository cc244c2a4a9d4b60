"""Failures: the report and the exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from kit.jobs import TENAX, Runner, control_group, is_alive, needs_root, until

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


def test_an_exception_is_reported_completely_once_and_last(runner: Runner) -> None:
    """Without a decorator: exception, traceback, host, rank and pid."""
    done = runner.run("--nproc-per-node", "3", runner.script(RAISES))
    pids = runner.pids(3)
    assert done.code == 1
    assert done.err.endswith(done.report)
    assert done.err.count("First cause") == 1
    assert f"train.py failed: rank 1 on {HOST} raised ValueError: loss is nan" in done.report
    assert done.field("rank") == f"1 (local rank 1) on {HOST}, pid {pids[1]}"
    assert done.field("error") == "ValueError: loss is nan"
    assert 'train.py", line 5, in step' in done.report
    assert 'raise ValueError("loss is nan")' in done.report
    assert "Stopped by tenax, not failed: ranks 0, 2" in done.report
    # One printed by the worker and one in the report.
    assert done.err.count("Traceback (most recent call last)") == 2
    assert "/tenax/" not in done.err.replace(str(runner.home), "")


def test_paths_and_commands_of_the_report_work(runner: Runner) -> None:
    """Every path exists, and the replay command works as printed."""
    done = runner.run("--nproc-per-node", "2", "--redirects", "3", "--log-dir", "my logs", runner.script(RAISES))
    assert "loss is nan" in (runner.home / done.field("stderr log")).read_text()
    assert (runner.home / done.field("logs")).is_dir()
    command = done.field("replay").replace("tenax", " ".join(TENAX), 1)
    replayed = subprocess.run(
        ["sh", "-c", command], cwd=runner.home, env=runner.environ, capture_output=True, text=True
    )
    assert replayed.returncode == 0, replayed.stderr
    assert "ValueError: loss is nan" in replayed.stdout
    assert "every decision follows from the recorded events" in replayed.stdout
    assert "Traceback" not in done.err[: -len(done.report)], "redirected: the console shows it only in the report"


def test_the_json_report_has_the_same_content(runner: Runner) -> None:
    done = runner.run("--nproc-per-node", "3", "--max-restarts", "1", "--report", "r.json", runner.script(RAISES))
    report = json.loads((runner.home / "r.json").read_bytes())
    cause = report["first_cause"]
    assert (report["outcome"], report["exit_code"], report["entrypoint"]) == ("failed", 1, "train.py")
    assert (cause["rank"], cause["host"], cause["pid"]) == (1, HOST, runner.pids(3, attempt=1)[1])
    assert (cause["error_type"], cause["message"]) == ("ValueError", "ValueError: loss is nan")
    assert cause["traceback"].splitlines()[-1] == "ValueError: loss is nan"
    assert [worker["rank"] for worker in report["stopped"]] == [0, 2]
    assert (report["restarts_used"], report["max_restarts"], len(report["history"])) == (1, 1, 1)
    assert str(runner.pids(3)[1]) in report["history"][0]
    assert report["summary"] in " ".join(done.report.split())


def test_the_report_lists_earlier_failures_and_restarts(runner: Runner) -> None:
    """In order."""
    script = runner.script("import sys; from worker_kit import ATTEMPT; sys.exit(f'failed in attempt {ATTEMPT}')")
    done = runner.run("--max-restarts", "3", script)
    assert done.code == 1
    lines = [line for line in done.report.splitlines() if "(local rank 0, pid" in line]
    assert len(lines) == 3
    assert "Gave up after 3 of 3 restarts" in done.report
    assert "failed in attempt 3" in done.report
    starts = [line for line in done.messages if "starting 1 worker" in line]
    assert [line.split(":")[0] for line in starts] == [
        "generation 1",
        "generation 2 (restart 1 of 3)",
        "generation 3 (restart 2 of 3)",
        "generation 4 (restart 3 of 3)",
    ]


# --- exit codes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "code", "expected"),
    [
        ("sys.exit(3)", 3, "exited with code 3"),
        ("sys.exit('some text')", 1, "some text"),
        ("os._exit(255)", 255, "exited with code 255"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "killed by SIGTERM"),
        ("ctypes.string_at(0)", 139, "SIGSEGV (invalid memory access)"),
        ("os.abort()", 134, "SIGABRT (aborted by itself)"),
        ("1/0", 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_the_exit_code_is_that_of_the_first_failed_worker(
    runner: Runner, ending: str, code: int, expected: str
) -> None:
    """As a shell reports it, and described in the report."""
    script = runner.script(
        f"import ctypes, os, signal, sys; from worker_kit import *; ready()\nif RANK: stay()\n{ending}"
    )
    done = runner.run("--nproc-per-node", "2", script)
    assert done.code == code, done
    assert expected in done.report
    assert "Stopped by tenax, not failed: rank 1" in done.report


def test_a_program_that_cannot_be_started_gives_126_or_127(runner: Runner) -> None:
    """As in a shell, and the report names it."""
    program = runner.home / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    done = runner.run("--no-python", "./program")
    assert done.code == 127, done
    report = " ".join(done.report.split())
    assert "could not be started: the interpreter in its first line does not exist: './program'" in report
    program.write_bytes(b"\x00\x01\x02 not a program")
    done = runner.run("--no-python", "./program")
    assert done.code == 126, done
    assert "could not be started: Exec format error: './program'" in done.report


def test_a_missing_module_is_reported(runner: Runner) -> None:
    """With the interpreter's message."""
    done = runner.run("-m", "no_such_module")
    assert done.code == 1
    assert "No module named no_such_module" in done.report


def test_an_abort_during_interpreter_shutdown_does_not_hide_the_exception(runner: Runner) -> None:
    """torch sometimes aborts there after an uncaught exception."""
    script = runner.script(
        """
        import atexit, os

        def torn_down():
            os.write(2, b"terminate called without an active exception\\n")
            os.abort()

        atexit.register(torn_down)
        raise ValueError("bad batch")
        """
    )
    done = runner.run(script)
    assert done.code == 134
    assert done.field("error") == "ValueError: bad batch"


# --- annotated --------------------------------------------------------------------------------------------------------


def test_recorded_exceptions_are_read_from_the_error_file(runner: Runner) -> None:
    script = runner.script(
        """
        from tenax.multiprocessing.errors import record

        @record
        def main():
            raise KeyError("no such batch")

        main()
        """
    )
    done = runner.run("--log-dir", "logs", script)
    assert done.code == 1
    assert done.field("error") == "KeyError: 'no such batch'"
    assert 'raise KeyError("no such batch")' in done.report
    error = json.loads((runner.home / done.field("error file")).read_bytes())
    assert error["message"]["message"] == "KeyError: 'no such batch'"


def test_the_rank_that_raised_first_is_the_first_cause_even_if_it_exits_last(runner: Runner) -> None:
    script = runner.script(
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
    job = runner.start("--nproc-per-node", "2", script)
    runner.note("raised")
    job.until_printed("rank 1")
    runner.leave_note("dead", rank=1)
    done = job.wait()
    assert done.field("error") == "RuntimeError: the real reason", done


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
def test_an_invalid_error_file_is_harmless(runner: Runner, content: str) -> None:
    """The exit code is the worker's, stderr is shown or named, and no escape code is printed."""
    runner.script(
        """
        import os, sys
        from pathlib import Path
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_bytes(Path("content").read_bytes())
        print("what really happened", file=sys.stderr)
        sys.exit(9)
        """
    )
    (runner.home / "content").write_text(content, encoding="latin-1")
    done = runner.run("--redirects", "2", "--log-dir", "logs", "train.py")
    assert done.code == 9, done
    assert "\x1b" not in done.err
    assert "\x07" not in done.err
    assert len(done.report) < 8000
    assert "what really happened" in done.report + (runner.home / done.field("stderr log")).read_text()


# --- more than one ----------------------------------------------------------------------------------------------------


def test_two_independent_failures_are_both_reported(runner: Runner) -> None:
    """Both had exited before the stop."""
    script = runner.script(
        """
        from worker_kit import *
        ready()
        if RANK == 2:
            stay()
        wait_for("now", rank=0)
        raise RuntimeError(f"rank {RANK} has failed")
        """
    )
    job = runner.start("--nproc-per-node", "3", "--redirects", "2", script)
    pids = runner.pids(3)
    job.send(signal.SIGSTOP)  # so that both are dead when the agent continues
    runner.leave_note("now")
    until(lambda: not any(map(is_alive, pids[:2])), "both are dead")
    job.send(signal.SIGCONT)
    done = job.wait()
    assert done.code == 1
    assert "rank 0 has failed" in done.report
    assert "rank 1 has failed" in done.report
    assert "Stopped by tenax, not failed: rank 2" in done.report


def test_equal_failures_are_reported_once(runner: Runner) -> None:
    """The report stays short."""
    script = runner.script("from worker_kit import ready; ready(); raise ConnectionError('peer is gone')")
    done = runner.run("--nproc-per-node", "8", "--redirects", "2", script)
    assert done.code == 1
    assert len(done.report.splitlines()) < 40, done.report


def test_a_stopped_worker_is_not_a_failure_whatever_its_exit_code(runner: Runner) -> None:
    script = runner.script(
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
    done = runner.run("--nproc-per-node", "3", script)
    assert done.code == 4
    assert "Stopped by tenax, not failed: ranks 0, 2" in done.report


# --- out of memory ----------------------------------------------------------------------------------------------------


@needs_root
def test_an_out_of_memory_kill_is_reported_as_such(runner: Runner) -> None:
    """With the kernel's counter as proof."""
    script = runner.script(
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
        done = runner.run("--nproc-per-node", "2", script, program=[*enter, *TENAX, "run"])
    assert done.code == 137, done
    assert "out of memory" in done.report.split("----")[0], "in the headline"
    assert "oom_kill" in done.field("memory")
    assert any("out of memory" in line for line in done.messages)


def test_another_sigkill_is_not_reported_as_out_of_memory(runner: Runner) -> None:
    job = runner.start(runner.script("from worker_kit import ready, stay; ready(); stay()"))
    os.kill(runner.pids(1)[0], signal.SIGKILL)
    done = job.wait()
    assert done.code == 137
    assert "memory" not in done.err


# --- limits ----------------------------------------------------------------------------------------------------------


def test_too_few_descriptors_for_the_workers_are_reported_with_the_remedy(runner: Runner) -> None:
    """The job ends normally."""
    command = 'ulimit -n 40; exec "$@"'
    program = ["sh", "-c", command, "sh", *TENAX, "run"]
    done = runner.run("--nproc-per-node", "32", "--no-python", "true", program=program)
    assert done.code == 1, done
    assert "could not be started" in done.report
    assert "Too many open files" in done.report
    assert "ulimit -n" in done.report
    assert "Traceback" not in done.err


def test_workers_start_with_a_low_limit_on_open_files(runner: Runner) -> None:
    """They have no channel to the agent then, because its descriptor has a high number."""
    script = runner.script("import os; from worker_kit import note; note('seen', 'TENAX_ELASTIC_FD' in os.environ)")
    done = runner.run(script, program=["sh", "-c", 'ulimit -n 128; exec "$@"', "sh", *TENAX, "run"])
    assert done.code == 0, done
    assert runner.note("seen") == "False"


@needs_root
def test_too_few_processes_for_the_workers_are_reported(runner: Runner) -> None:
    """Workers that had started are stopped."""
    with control_group("pids", "pids.max", 7) as enter:  # the agent, two helpers with a few threads, and not much more
        done = runner.run("--nproc-per-node", "8", "--no-python", "sleep", "60", program=[*enter, *TENAX, "run"])
    # It may hit a worker, or a helper that needs a process or a thread.
    messages = " ".join(done.err.split())
    if done.code == 1:
        assert "could not be started: Resource temporarily unavailable" in messages, done
    else:
        assert done.code == 71, done
        is_helper = "could not start the helper process" in messages and "Resource temporarily unavailable" in messages
        assert "can't start new thread" in messages or is_helper, done
        assert "limits on processes" in messages, done
    assert "Traceback" not in done.err


def test_too_few_descriptors_for_the_helpers_are_reported_with_the_remedy(runner: Runner) -> None:
    program = ["sh", "-c", 'ulimit -n 8; exec "$@"', "sh", *TENAX, "run"]
    done = runner.run("--no-python", "true", program=program)
    assert done.code == 71, done
    assert "could not start the helper process" in done.err
    assert "ulimit -n" in done.err
    assert "Traceback" not in done.err


def test_a_missing_main_guard_is_reported_with_the_remedy(runner: Runner) -> None:
    script = runner.script(
        """
        from tenax.agent.server import LocalElasticAgent, WorkerSpec

        def work():
            return 1

        print(LocalElasticAgent(WorkerSpec(entrypoint=work, max_restarts=0), start_method="spawn").run().failures)
        """
    )
    done = runner.run(script, program=[sys.executable])
    assert "if __name__ == '__main__':" in done.out + done.err, done


# --- the launcher itself ----------------------------------------------------------------------------------------------


def test_modules_next_to_the_script_do_not_affect_the_launcher(runner: Runner) -> None:
    """Even if they are named like modules of tenax or of Python."""
    for name in ("msgspec.py", "selectors.py", "json.py", "signal.py", "tenax.py", "socket.py"):
        runner.script("raise SystemExit('the wrong module was imported')", name)
    if sys.version_info >= (3, 11):  # -P: do not import from the current folder
        done = runner.run(runner.script("print('fine')"), program=[sys.executable, "-P", "-m", "tenax", "run"])
        assert (done.code, done.out) == (0, "fine\n"), done
    if len(TENAX) == 1:  # the script; without it the tests use python -m tenax, which imports from the current folder
        done = runner.run(runner.script("print('fine')"))
        assert (done.code, done.out) == (0, "fine\n"), done
