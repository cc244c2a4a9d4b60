"""The error that ended a Python process, found in the stderr of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenax._failures.python_traceback import LastOutput, find

pytestmark = pytest.mark.process

HEADER = "Traceback (most recent call last):\n"


def run(folder: Path, script: str, *options: str) -> tuple[int, str]:
    """Run the script in a new interpreter; return its exit code and stderr."""
    path = folder / "script.py"
    path.write_text(script)
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    # Without this the interpreter may dump core, which is slow on some machines.
    preamble = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    if "#bare" not in script:
        path.write_text(preamble + script)
    done = subprocess.run([sys.executable, *options, str(path)], env=env, capture_output=True, timeout=60, check=False)
    return done.returncode, done.stderr.decode()


# name: (script, type, one-line message); the interpreter prints only the traceback.
EXACT = {
    "plain": ("raise ValueError('boom')", "ValueError", "ValueError: boom"),
    "no message": ("raise ValueError", "ValueError", "ValueError"),
    "colon in message": ("raise KeyError('a: b')", "KeyError", "KeyError: 'a: b'"),
    "assertion": ("assert 1 == 2, 'one is not two'", "AssertionError", "AssertionError: one is not two"),
    "deep": (
        "def f(n):\n    f(n - 1) if n else 1 / 0\nf(50)",
        "ZeroDivisionError",
        "ZeroDivisionError: division by zero",
    ),
    "recursion": (
        "def f(): f()\nf()",
        "RecursionError",
        "RecursionError: maximum recursion depth exceeded",
    ),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
    "lines": ("raise RuntimeError('one\\ntwo\\n\\n  four')", "RuntimeError", "RuntimeError: one"),
    "empty first line": ("raise RuntimeError('\\n\\nthird')", "RuntimeError", "RuntimeError: third"),
    "unicode": ("class Fehlér(Exception): pass\nraise Fehlér('ö😀')", "Fehlér", "Fehlér: ö😀"),
    "local class": (
        "def f():\n    class E(Exception): pass\n    raise E('x')\nf()",
        "f.<locals>.E",
        "f.<locals>.E: x",
    ),
    "module of the class": ("import json\njson.loads('{')", "json.decoder.JSONDecodeError", None),
    "while handling": (
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError('second')",
        "ValueError",
        "ValueError: second",
    ),
    "caused by": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('second') from e",
        "ValueError",
        "ValueError: second",
    ),
    "caused by one without frames": ("raise ValueError('b') from TypeError('a')", "ValueError", "ValueError: b"),
    "three links": (
        "try:\n    try:\n        1 / 0\n    except Exception:\n        {}['k']\nexcept Exception as e:\n"
        "    raise OSError('third\\nline') from e",
        "OSError",
        "OSError: third",
    ),
    "imported syntax error": (
        "open(__file__ + '_bad.py', 'w').write('def f(:\\n')\nimport importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('bad', __file__ + '_bad.py')\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))",
        "SyntaxError",
        "SyntaxError: invalid syntax",
    ),
    "syntax error": ("#bare\ndef f(:\n    pass\n", "SyntaxError", "SyntaxError: invalid syntax"),
    "indentation": (
        "#bare\nif True:\nx = 1\n",
        "IndentationError",
        "IndentationError: expected an indented block after 'if' statement on line 2",
    ),
    "module not found": (
        "import no_such_module",
        "ModuleNotFoundError",
        "ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "pool": (
        "from concurrent.futures import ProcessPoolExecutor\nimport multiprocessing\n"
        "def f(x): return 1 / x\n"
        "if __name__ == '__main__':\n"
        "    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context('fork')) as pool:\n"
        "        pool.submit(f, 0).result()",
        "ZeroDivisionError",
        "ZeroDivisionError: division by zero",
    ),
    "quoted traceback": (
        "import traceback\ntry:\n    1 / 0\nexcept Exception:\n    text = traceback.format_exc()\n"
        "raise RuntimeError('the child failed:\\n' + text)",
        "RuntimeError",
        "RuntimeError: the child failed: ZeroDivisionError: division by zero",
    ),
    "data loader": (
        "raise RuntimeError('Caught ValueError in DataLoader worker process 0.\\n"
        'Original Traceback (most recent call last):\\n  File "x.py", line 1, in f\\nValueError: bad sample\\n\')',
        "RuntimeError",
        "RuntimeError: Caught ValueError in DataLoader worker process 0.",
    ),
    "spawned process": (
        "class ProcessRaisedException(Exception): pass\n"
        "raise ProcessRaisedException('\\n\\n-- Process 0 terminated with the following error:\\n"
        'Traceback (most recent call last):\\n  File "x.py", line 1, in f\\nValueError: in the child\\n\')',
        "ProcessRaisedException",
        "ProcessRaisedException: ValueError: in the child",
    ),
}
if sys.version_info >= (3, 11):
    EXACT["note"] = (
        "e = ValueError('x')\ne.add_note('a note\\nof two lines')\nraise e",
        "ValueError",
        "ValueError: x",
    )
    EXACT["group"] = (
        "def f(e):\n    try:\n        raise e\n    except Exception as e:\n        return e\n"
        "raise ExceptionGroup('many\\nlines', [f(ValueError('a')), TypeError('b'), "
        "ExceptionGroup('inner', [f(OSError(1, 'c'))])])",
        "ExceptionGroup",
        "ExceptionGroup: many",
    )
    EXACT["group after another"] = (
        "try:\n    1 / 0\nexcept Exception:\n    raise ExceptionGroup('g', [ValueError('a')])",
        "ExceptionGroup",
        "ExceptionGroup: g (1 sub-exception)",
    )
    EXACT["another after a group"] = (
        "try:\n    raise ExceptionGroup('g', [ValueError('a')])\nexcept Exception as e:\n    raise KeyError(1) from e",
        "KeyError",
        "KeyError: 1",
    )


@pytest.mark.parametrize("name", EXACT)
def test_the_traceback_is_found_exactly(tmp_path: Path, name: str) -> None:
    """The complete traceback and nothing else, with or without other output before it."""
    script, error_type, message = EXACT[name]
    exit_code, stderr = run(tmp_path, script)
    assert exit_code == (-signal.SIGINT if name == "interrupt" else 1)
    for before in ("", "warming up\nlr 0.1\n", "step 3\r 30%|###   | 3/10\n"):
        found = find(before + stderr, exit_code)
        assert found is not None
        assert found.traceback == stderr.rstrip("\n")
        assert found.error_type == error_type
        assert found.message == (message or found.message)
        assert found.message.startswith(error_type)


@pytest.mark.parametrize("name", EXACT)
def test_torchs_rank_prefix_is_removed(tmp_path: Path, name: str) -> None:
    """torch prefixes each line of an uncaught exception with the rank if there is a process group."""
    script, error_type, _ = EXACT[name]
    exit_code, stderr = run(tmp_path, script)
    prefixed = "\n".join(f"[rank12]: {line}" if line else "" for line in stderr.split("\n"))
    found = find(prefixed, exit_code)
    assert found is not None
    assert (found.traceback, found.error_type) == (stderr.rstrip("\n"), error_type)


def test_a_header_after_a_progress_bar_is_found(tmp_path: Path) -> None:
    """A progress bar leaves its line unfinished; the traceback begins on the same line."""
    exit_code, stderr = run(tmp_path, "raise ValueError('boom')")
    found = find(" 30%|###   | 3/10 [00:01<00:03]" + stderr, exit_code)
    assert found is not None
    assert found.traceback == stderr.rstrip("\n")


def test_a_logged_exception_is_not_the_cause(tmp_path: Path) -> None:
    """The last one counts, and none if much was printed after it."""
    script = (
        "import traceback, sys\ntry:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()\n"
        "print('going on', file=sys.stderr)\nraise ValueError('fatal')"
    )
    exit_code, stderr = run(tmp_path, script)
    found = find(stderr, exit_code)
    assert found is not None
    assert found.message == "ValueError: fatal"
    assert "ZeroDivisionError" not in found.traceback
    handled = stderr.split("going on")[0]
    assert find(handled + "epoch done\n" * 500, 3) is None


def test_secondary_tracebacks_do_not_hide_the_cause(tmp_path: Path) -> None:
    """Destructors, exit functions, threads and children print tracebacks too, also after the main one."""
    script = (
        "import atexit, threading, sys, multiprocessing\n"
        "class Bad:\n    def __del__(self): raise KeyError('destructor')\n"
        "keep = Bad()\n"
        "atexit.register(lambda: 1 / 0)\n"
        "def f(): raise OSError('thread')\n"
        "t = threading.Thread(target=f); t.start(); t.join()\n"
        "p = multiprocessing.get_context('fork').Process(target=f); p.start(); p.join()\n"
        "raise ValueError('fatal\\nof two lines')"
    )
    exit_code, stderr = run(tmp_path, script)
    for announcement in ("Exception in thread", "Process Fork", "Exception ignored in"):
        assert announcement in stderr
    found = find(stderr, exit_code)
    assert found is not None
    assert found.message == "ValueError: fatal"
    assert found.traceback.startswith(HEADER)
    assert found.traceback.endswith("ValueError: fatal\nof two lines")


def test_a_secondary_traceback_is_used_if_it_is_the_only_one(tmp_path: Path) -> None:
    """A script that exits with an error because its thread failed has only the thread's traceback."""
    script = (
        "import threading, sys\ndef f(): raise OSError('thread')\n"
        "t = threading.Thread(target=f); t.start(); t.join()\nsys.exit(3)"
    )
    exit_code, stderr = run(tmp_path, script)
    found = find(stderr, exit_code)
    assert exit_code == 3
    assert found is not None
    assert found.message == "OSError: thread"


def test_the_dump_of_a_segmentation_fault_is_found(tmp_path: Path) -> None:
    """The complete dump of the fault handler, without earlier output."""
    script = "import ctypes, sys\nprint('before', file=sys.stderr)\ndef f(): ctypes.string_at(0)\nf()"
    exit_code, stderr = run(tmp_path, script, "-X", "faulthandler")
    found = find(stderr, exit_code)
    assert exit_code == -signal.SIGSEGV
    assert found is not None
    assert (found.error_type, found.message) == ("Fatal Python error", "Fatal Python error: Segmentation fault")
    assert found.traceback == stderr.removeprefix("before\n").rstrip("\n")
    assert "in f" in found.traceback


def test_the_dump_of_an_abort_is_found(tmp_path: Path) -> None:
    """It has the same format."""
    exit_code, stderr = run(tmp_path, "import os\nos.abort()", "-X", "faulthandler")
    found = find(stderr, exit_code)
    assert exit_code == -signal.SIGABRT
    assert found is not None
    assert found.message == "Fatal Python error: Aborted"


def test_the_dump_of_a_timeout_is_found(tmp_path: Path) -> None:
    """dump_traceback_later exits with code 1 and dumps the stack of each thread."""
    script = (
        "import faulthandler, threading\nfaulthandler.dump_traceback_later(0.01, exit=True)\nthreading.Event().wait(60)"
    )
    exit_code, stderr = run(tmp_path, script)
    found = find(stderr, exit_code)
    assert exit_code == 1
    assert found is not None
    assert found.error_type == "Timeout"
    assert found.traceback == stderr.rstrip("\n")


def test_a_childs_crash_does_not_hide_the_parents_exception(tmp_path: Path) -> None:
    """A child crashes, and the parent raises an exception because of that: it is the error of the parent."""
    _, crash = run(tmp_path, "import ctypes\nctypes.string_at(0)", "-X", "faulthandler")
    exit_code, stderr = run(tmp_path, "raise RuntimeError('my child died')")
    found = find(crash + stderr, exit_code)
    assert found is not None
    assert found.message == "RuntimeError: my child died"


def test_an_uncaught_cpp_exception_is_found() -> None:
    """The C++ runtime prints it before it aborts."""
    text = "some line\nterminate called after throwing an instance of 'c10::Error'\n  what():  NCCL timeout\nframe #0\n"
    found = find(text, -signal.SIGABRT)
    assert found == LastOutput(
        "c10::Error",
        "c10::Error: NCCL timeout",
        "terminate called after throwing an instance of 'c10::Error'\n  what():  NCCL timeout\nframe #0",
    )


JAX_ABORT = (
    "F1117 12:09:18.613696   23653 client.h:80] Terminating process because the JAX distributed service detected fatal "
    "errors.\n*** Check failure stack trace: ***\n    @     0x7fc3cc640634  absl::LogMessage::SendToLog()\n"
    "Fatal Python error: Aborted\n\nThread 0x00007fc3d4442b80 (most recent call first):\n"
    + '  File "multihost_utils.py", line 134 in sync_global_devices\n'
    * 40
)
JAX_RAISED = "Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\nKeyError: 'lr'\n"


def test_a_fatal_log_line_is_the_error_of_an_abort() -> None:
    """However long the dump of the fault handler below it is."""
    found = find("step 3\n" + JAX_ABORT, -signal.SIGABRT)
    assert found is not None
    assert found.message == "Terminating process because the JAX distributed service detected fatal errors."


def test_the_status_in_a_fatal_log_line_is_the_message() -> None:
    status = "absl::Status: UNAVAILABLE: tasks are unhealthy (stopped sending heartbeats):\n6\n7\n\nRPC: /xla"
    found = find(JAX_ABORT.replace("errors.", f"errors. {status}"), -signal.SIGABRT)
    assert found is not None
    assert found.message == "UNAVAILABLE: tasks are unhealthy (stopped sending heartbeats): 6 7"


@pytest.mark.parametrize("text", [JAX_RAISED + JAX_ABORT, JAX_ABORT.replace("*** Check", JAX_RAISED + "*** Check")])
def test_an_exception_has_priority_over_the_abort_while_it_ends_the_process(text: str) -> None:
    """JAX's thread aborts at exit, and may log before the traceback is printed."""
    found = find(text, -signal.SIGABRT)
    assert found is not None
    assert (found.error_type, found.message) == ("KeyError", "KeyError: 'lr'")


def test_an_old_crash_is_not_the_cause(tmp_path: Path) -> None:
    """Invariant 2 also holds for crashes of children and for syntax errors of other files."""
    _, crash = run(tmp_path, "import ctypes\nctypes.string_at(0)", "-X", "faulthandler")
    _, syntax = run(tmp_path, "#bare\ndef f(:\n")
    for stderr in (crash, syntax):
        assert find(stderr, 1) is not None
        assert find(stderr + "going on\n" * 500, 1) is None
        assert find(stderr + "going on\n" * 500, -signal.SIGSEGV) is None
    assert find(crash, -signal.SIGKILL) is None


def test_a_cpp_exception_has_priority_over_the_dump_of_the_abort(tmp_path: Path) -> None:
    """The exception is the message; the dump follows in the text."""
    thrown = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
    exit_code, stderr = run(tmp_path, "import os\nos.abort()", "-X", "faulthandler")
    found = find(thrown + stderr, exit_code)
    assert found is not None
    assert found.message == "std::bad_alloc: std::bad_alloc"
    assert found.traceback == (thrown + stderr).rstrip("\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_process_killed_from_outside_has_no_exception(tmp_path: Path, number: int) -> None:
    """Invariant 3: an exception that was logged before is not the reason for the signal."""
    _, stderr = run(tmp_path, "raise ValueError('logged')")
    assert find(stderr, -number) is None


def test_a_crash_after_an_exception_shows_the_exception(tmp_path: Path) -> None:
    """The interpreter often crashes while it exits; the exception was the cause."""
    _, stderr = run(tmp_path, "raise ValueError('cause')")
    found = find(stderr + "free(): invalid pointer\n", -signal.SIGABRT)
    assert found is not None
    assert found.message == "ValueError: cause"


def test_the_exception_is_found_in_any_end_of_the_text(tmp_path: Path) -> None:
    """As long as one frame and the line of the exception are left."""
    script = (
        "def f(n):\n    if n: f(n - 1)\n    else: {}['key']\ntry:\n    f(3)\nexcept KeyError as e:\n"
        "    raise ValueError('the\\nend') from e"
    )
    exit_code, stderr = run(tmp_path, script)
    last_frame = stderr.rindex('  File "')
    for begin in range(last_frame):
        found = find(stderr[begin:], exit_code, cut=True)
        assert found is not None, stderr[begin:]
        assert (found.error_type, found.message) == ("ValueError", "ValueError: the")
        assert found.traceback.endswith("ValueError: the\nend")
        if begin > len(HEADER):
            assert found.traceback.startswith("[the beginning of stderr was not kept]\n") or (
                found.traceback.startswith((HEADER, "KeyError"))
            )


def test_text_without_an_error_has_none() -> None:
    """Ordinary output is not taken for an error."""
    for text in ("", "\n\n", "all good\n", "ValueError: mentioned in passing\n", "  indented\nError: no\n"):
        for cut in (False, True):
            assert find(text, 1, cut=cut) is None


pieces = st.sampled_from(
    [
        "Traceback (most recent call last):",
        "  + Exception Group Traceback (most recent call last):",
        "    | Traceback (most recent call last):",
        "Original Traceback (most recent call last):",
        '  File "x.py", line 1, in f',
        '  File "x.py", line 1',
        "    code",
        "    ^^^^",
        "  | ExceptionGroup: x (1 sub-exception)",
        "  +-+---------------- 1 ----------------",
        "ValueError: x",
        "ValueError:",
        "SyntaxError: bad",
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
        '"""',
        "",
        "Exception ignored in: <x>",
        "Fatal Python error: Segmentation fault",
        "Thread 0x1 (most recent call first):",
        "terminate called after throwing an instance of 'X'",
        "  what():  y",
        "[rank0]: ",
        "-- Process 0 terminated with the following error:",
    ]
)


@given(st.lists(pieces | st.text(max_size=8), max_size=30), st.integers(-20, 3), st.booleans())
def test_no_text_makes_it_raise(lines: list[str], exit_code: int, cut: bool) -> None:
    """Any order of the lines that it looks for, mixed with other text."""
    text = "\n".join(lines)
    found = find(text, exit_code, cut=cut)
    if found is not None:
        assert "\n" not in found.message
        assert found.traceback


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=60))
def test_any_message_is_found_exactly(message: str) -> None:
    """The output of the interpreter's own formatter is found completely, except for blank lines at the end."""
    try:
        raise RuntimeError(message)
    except RuntimeError:
        text = traceback.format_exc()
    found = find("noise\n" + text, 1)
    assert found is not None
    lines = text.split("\n")
    while not lines[-1].strip():
        lines.pop()
    assert found.traceback == "\n".join(lines)
    assert found.error_type == "RuntimeError"
