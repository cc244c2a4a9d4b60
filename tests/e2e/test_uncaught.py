"""Uncaught exceptions of Python workers are recorded when they are raised, without changes to user code."""

from __future__ import annotations

import json
import os
import signal

import pytest

from kit.jobs import Runner


@pytest.mark.parametrize("handled", ["SIGTERM", ""])
def test_the_rank_that_raised_first_is_the_cause_even_if_it_hangs_while_exiting(runner: Runner, handled: str) -> None:
    """Rank 0 raises, then waits for a thread; rank 1 fails because of that and exits first. The exit code is not that
    of the signal that ended rank 0."""
    script = runner.script(
        """
        import os, sys, threading, time
        from worker_kit import RANK, ignore

        if RANK == 0:
            if not sys.argv[1]:
                ignore("SIGTERM")
            threading.Thread(target=time.sleep, args=(60,)).start()
            raise ValueError("loss is nan: the root cause")
        error_of_rank_0 = os.environ["TORCHELASTIC_ERROR_FILE"].replace("/1/error", "/0/error")
        while not os.path.exists(error_of_rank_0):
            time.sleep(0.01)
        raise ConnectionError("the peer went away")
        """
    )
    done = runner.run("--nproc-per-node", "2", "--shutdown-timeout", "1", "--log-dir", "logs", script, handled)
    assert done.code == 1
    assert done.field("rank").startswith("0 ")
    assert done.field("error") == "ValueError: loss is nan: the root cause"
    assert "rank 1: raised ConnectionError: the peer went away" in done.report
    assert "Stopped by tenax, not failed" not in done.report


def test_a_worker_that_raised_and_does_not_exit_is_not_waited_for_the_whole_grace_period(runner: Runner) -> None:
    """Rank 1 is killed. Rank 0 is stopped, raises, and waits at exit for its peer, as JAX does."""
    script = runner.script(
        """
        import atexit, os, signal, threading
        from worker_kit import RANK

        if RANK == 1:
            open("ready").close()  # waits until the other one opens it
            os.kill(os.getpid(), signal.SIGKILL)
        stopped = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        atexit.register(threading.Event().wait)
        open("ready", "w").close()
        stopped.wait()
        raise ConnectionError("the peer went away")
        """
    )
    os.mkfifo(runner.home / "ready")
    done = runner.run("--nproc-per-node", "2", "--log-dir", "logs", script)
    assert done.code == 128 + signal.SIGKILL
    assert "killing all remaining processes: rank 0 raised an exception and did not exit within 2 s" in done.err
    assert done.field("rank").startswith("1 ")


def test_the_hook_is_invisible_to_workers_and_their_children(runner: Runner) -> None:
    """Whatever PYTHONPATH was."""
    script = runner.script(
        """
        import json, os, subprocess, sys
        look = "import json, os, sys; print(json.dumps([os.environ.get('PYTHONPATH'), sys.path[1:],"
        look += " [k for k in os.environ if 'RECORD' in k], sys.excepthook is sys.__excepthook__]))"
        mine = [os.environ.get("PYTHONPATH"), sys.path[1:], [k for k in os.environ if "RECORD" in k]]
        child = json.loads(subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout)
        print(json.dumps([mine, child]))
        """
    )
    runner.environ.pop("PYTHONPATH", None)
    for value in (None, "", f"{runner.home}/lib"):
        environ = {} if value is None else {"PYTHONPATH": value}
        done = runner.run(script, env=environ)
        mine, child = json.loads(done.out)
        assert mine[0] == child[0] == value
        assert mine[2] == child[2] == []
        assert child[3] is True
        assert not any("failures/hook" in entry for entry in mine[1] + child[1])
        assert (f"{runner.home}/lib" in mine[1]) == bool(value)


def test_the_sitecustomize_of_the_environment_still_runs(runner: Runner) -> None:
    """The hook comes first on the path and then imports it."""
    (runner.home / "lib").mkdir()
    (runner.home / "lib" / "sitecustomize.py").write_text("import sys\nsys.customized = True\n")
    script = runner.script(
        """
        import sitecustomize, sys
        print(sys.customized, sitecustomize.__file__, sep="\\n")
        """
    )
    done = runner.run(script, env={"PYTHONPATH": str(runner.home / "lib")})
    assert done.out.splitlines() == ["True", str(runner.home / "lib" / "sitecustomize.py")]


def test_exceptions_of_child_processes_are_not_recorded(runner: Runner) -> None:
    """Only the worker writes its error file."""
    script = runner.script(
        """
        import os, subprocess, sys
        subprocess.run([sys.executable, "-c", "raise OSError('of a child')"])
        if os.fork() == 0:
            raise OSError("of a fork")
        os.wait()
        print(os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"]))
        """
    )
    assert runner.run(script).out.split() == ["False"]


def test_a_launcher_that_is_a_worker_writes_its_first_cause_to_its_own_error_file(runner: Runner) -> None:
    script = runner.script('raise KeyError("inner")')
    path = runner.home / "outer.json"
    assert runner.run(script, env={"TORCHELASTIC_ERROR_FILE": str(path)}).code == 1
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "KeyError: 'inner'"
    assert message["errorCode"] == 1
    assert os.listdir(runner.home).count("outer.json") == 1


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise ValueError('two\\nlines')", "ValueError: two"),
        ("compile('1 +', 'config', 'exec')", "SyntaxError: invalid syntax"),
        (
            "class Odd(Exception):\n    def __str__(self):\n        raise OSError\nraise Odd",
            "Odd: <",
        ),
        ("import sys; sys.exit('bye')", None),
        ("raise KeyboardInterrupt", None),
    ],
)
def test_uncaught_exceptions_are_recorded(runner: Runner, source: str, error: str | None) -> None:
    """In the wording of Python; SystemExit and KeyboardInterrupt are not recorded."""
    done = runner.run("--log-dir", "logs", runner.script(source))
    path = runner.run_dir() / "attempt_0" / "0" / "error.json"
    assert path.exists() == (error is not None)
    if error is not None:
        assert json.loads(path.read_text())["message"]["message"].removeprefix("__main__.").startswith(error)
        assert done.code == 1
    assert os.listdir(path.parent) == (["error.json"] if error else [])


def test_a_module_json_next_to_the_script_only_prevents_the_recording(runner: Runner) -> None:
    """The exit code and the report are right."""
    runner.script("raise SystemExit(55)", "json.py")
    done = runner.run(runner.script("raise ValueError('loss is nan')"))
    assert done.code == 1
    assert done.field("error") == "ValueError: loss is nan"
