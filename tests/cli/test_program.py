"""The program itself, as a real process: commands, exit codes, what it prints where, and what it imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import tenax

pytestmark = pytest.mark.process

HEAVY = {
    *("argparse", "asyncio", "dataclasses", "logging", "subprocess", "tempfile", "pathlib", "importlib.metadata"),
    *("shutil", "json", "difflib", "torch", "numpy", "multiprocessing", "tenax.cli.help", "tenax.cli.dry_run"),
    *("tenax.cli.rendezvous_options", "tenax.rendezvous.api", "tenax._engines.tcp"),  # one node has nobody to find
}


def start(words: list[str], cwd: object, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    return subprocess.run(
        [sys.executable, *words], cwd=str(cwd), env={**clean, **environ}, capture_output=True, text=True, timeout=60
    )


def program(words: list[str], cwd: object, **environ: str) -> subprocess.CompletedProcess[str]:
    return start(["-m", "tenax", *words], cwd, **environ)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run"], "tenax run: no script was named; write 'tenax run train.py', or '-m' and the name of a module"),
        (["run", "gone.py"], "tenax run: there is no file 'gone.py' in {cwd}; check the path, or change the folder"),
        (["run", "--log-dir", "file/x", "t.py"], "tenax run: --log-dir file/x: {cwd}/file is a file; name a folder"),
        (
            ["run", "--dry-run", "--log-dir", "file", "t.py"],
            "tenax run: --log-dir file: {cwd}/file is a file; name a folder",
        ),
        (
            ["run", "--report", "x/r.json", "t.py"],
            "tenax run: --report x/r.json: there is no folder '{cwd}/x' to write it in; make it first",
        ),
        (
            ["run", "--nnodes", "2", "--rdzv-endpoint", "h0", "--rdzv-conf", "token_file=gone", "t.py"],
            "tenax run: the file of the rendezvous option 'token_file' cannot be read: [Errno 2] No such file or "
            "directory: 'gone'",
        ),
        (["run", "--report", ".", "t.py"], "tenax run: --report . is a folder; name a file"),
        (
            ["run", "--rdzv-backend", "zookeeper", "t.py"],
            "tenax run: --rdzv-backend zookeeper is neither one of ours nor installed; there are: "
            "c10d, etcd, etcd-v2, local, static, tcp",
        ),
    ],
)
def test_usage_mistakes(words, sentence, tmp_path) -> None:
    """One sentence, one hint, exit code 2, nothing on stdout, no stack trace."""
    (tmp_path / "t.py").touch()
    (tmp_path / "file").touch()
    done = program(words, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{sentence.format(cwd=tmp_path)}\ntry: tenax run --help\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["t.py", "--x"], "tenax: there is no command 't.py'; did you mean: tenax run t.py --x"),
        (["--tee", "3", "t.py"], "tenax: there is no command '--tee'; did you mean: tenax run --tee 3 t.py"),
        (["rnu"], "tenax: there is no command 'rnu'; did you mean 'tenax run'?"),
        (["help", "stauts"], "tenax: there is no command 'stauts'; did you mean 'tenax help status'?"),
        (
            ["help", "foo"],
            "tenax: there is no command 'foo'; there are run, replay, ask, status, ps, logs, "
            "stop, drain, restart, timeline, report, version, help",
        ),
        (
            ["launch"],
            "tenax: there is no command 'launch'; there are run, replay, ask, status, ps, logs, "
            "stop, drain, restart, timeline, report, version, help",
        ),
    ],
)
def test_unknown_commands(words, sentence, tmp_path) -> None:
    """A command that is not there is answered with what was probably meant."""
    done = program(words, tmp_path)
    assert (done.returncode, done.stderr) == (2, f"{sentence}\ntry: tenax help\n")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("replay", "no journal and no folder was named"),
        ("report", "no journal and no folder was named"),
        ("timeline", "no journal and no folder was named"),
        ("ask", "no socket and no folder was named"),
    ],
)
def test_a_command_without_what_it_is_about(command, sentence, tmp_path) -> None:
    """A variable that is empty in somebody's script must not look like success."""
    done = program([command], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"tenax {command}: {sentence}\ntry: tenax {command} --help\n"


def test_help_and_version(tmp_path) -> None:
    """Help goes to stdout with exit code 0, also without any word."""
    for words in ([], ["help"], ["--help"], ["-h"]):
        done = program(words, tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("tenax: ")
    for words in (["help", "run"], ["run", "--help"], ["run", "-h", "t.py"]):
        done = program(words, tmp_path, PET_TEE="nonsense")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("usage: tenax run ")
    assert (
        program(["version"], tmp_path).stdout
        == program(["--version"], tmp_path).stdout
        == f"tenax {tenax.__version__}\n"
    )


def test_help_teaches_the_variables_that_have_no_flag(tmp_path) -> None:
    """In a section at the end; nobody finds them by guessing."""
    section = program(["run", "--help"], tmp_path).stdout.partition("\nenvironment:\n")[2]
    for variable in (
        *("PET_", "TORCHELASTIC_ENABLE_FILE_TIMER=1", "TORCHELASTIC_HEALTH_CHECK_PORT"),
        *("TORCH_WORKER_SERVER_SOCKET", "tenax ask"),
    ):
        assert variable in section


def test_a_reader_that_has_seen_enough_is_no_failure(tmp_path) -> None:
    """'tenax run --help | head' ends quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as nobody_reads:
        done = subprocess.run(
            [sys.executable, "-m", "tenax", "run", "--help"], stdout=nobody_reads, stderr=subprocess.PIPE, timeout=60
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_dry_run_and_notes(tmp_path) -> None:
    """The plan goes to stdout, notes go to stderr, and no file is made."""
    (tmp_path / "t.py").touch()
    done = program(["run", "--dry-run", "--monitor-interval=1", "--log-dir=logs", "t.py", "--x"], tmp_path)
    assert done.returncode == 0
    assert f"command     {sys.executable} -u t.py --x\n" in done.stdout
    assert done.stderr == (
        "tenax run: note: --monitor-interval 1 has no effect: tenax hears of a worker's end from the kernel at once\n"
    )
    assert sorted(os.listdir(tmp_path)) == ["t.py"]


def test_dry_run_refuses_what_a_run_would(tmp_path) -> None:
    """A name of a handler that is nobody's."""
    (tmp_path / "t.py").touch()
    done = program(["run", "--dry-run", "--metrics", "zz", "t.py"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tenax run: unknown metric handler 'zz'; known: ")


def test_dry_run_shows_the_variables_of_compat(tmp_path) -> None:
    """They are what makes every Python process below see tenax under TorchElastic's names."""
    (tmp_path / "t.py").touch()
    done = program(["run", "--dry-run", "--compat", "--nproc-per-node", "2", "t.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    shared = done.stdout.partition("environment of every worker")[2].partition("\n\n")[0]
    assert "\n  TENAX_COMPAT=1" in shared
    (path,) = [line for line in shared.splitlines() if line.startswith("  PYTHONPATH=")]
    assert path.partition("=")[2].split(os.pathsep)[0].endswith("tenax/compat/hook")


def test_words_that_no_terminal_can_show(tmp_path) -> None:
    """Arguments that are not text in any encoding, or not in this one, neither break the plan nor a refusal."""
    (tmp_path / "t.py").touch()
    for words, code in (
        ([b"t.py", b"\xff", "ü".encode()], 0),
        ([b"--tee", b"\xff\xfe", b"t.py"], 2),
        ([b"\xff.py"], 2),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "tenax", "run", "--dry-run", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == code, done.stderr


def test_torchruns_module_is_the_same_program(tmp_path) -> None:
    """'python -m tenax.run' is 'tenax run'."""
    (tmp_path / "t.py").touch()
    ours, theirs = (
        start([*way, "--dry-run", "t.py"], tmp_path) for way in (["-m", "tenax", "run"], ["-m", "tenax.run"])
    )
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    assert start(["-m", "tenax.run", "gone.py"], tmp_path).returncode == 2


def test_a_bug_is_called_a_bug(tmp_path) -> None:
    """An unexpected error ends with exit code 70, the stack trace, and one line that says whose fault it is."""
    code = "from tenax.cli.main import main; raise SystemExit(main(['run', 3, 't.py']))"  # no word is a number
    done = start(["-c", code], tmp_path)
    assert done.returncode == 70
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "tenax: this is a bug in tenax, not in your script; please report it with the lines above"


def test_the_start_imports_nothing_heavy(tmp_path) -> None:
    """From the command line to the launch config, only what msgspec has already paid for is imported."""
    (tmp_path / "t.py").touch()
    code = (
        "import sys, msgspec; before = set(sys.modules)\n"
        "from tenax.cli.main import main\n"
        "from tenax.cli.arguments import parse\n"
        "from tenax.cli.run import launch_arguments\n"
        "from tenax.cli.host_checks import check_host\n"
        "options = parse('--nproc-per-node 2 --max-restarts 3 --log-dir logs --tee 3 t.py --x'.split(), {})\n"
        "check_host(options, '.', {})\n"
        "launch_arguments(options, sys.executable)\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    done = start(["-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()).isdisjoint(HEAVY)


# --- interrupts before the agent handles signals ----------------------------------------------------------------------

# What Python leaves behind when it has printed and discarded an interrupt on the way to the first line of its script.
DISCARDED_BY_PYTHON = "sys.last_value = KeyboardInterrupt()"
# An interrupt while a finalizer runs: Python discards a KeyboardInterrupt that is raised there.
IN_A_FINALIZER = """
class Interrupting:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(10))

class Finder:
    def find_spec(self, name, *_):
        if name == "tenax.launcher.api":
            Interrupting()

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(("happens", "code"), [(DISCARDED_BY_PYTHON, 130), (IN_A_FINALIZER, -signal.SIGINT)])
def test_an_interrupt_that_python_discards_ends_the_start(tmp_path, happens: str, code: int) -> None:
    """A Ctrl-C that Python would discard is not lost: no worker starts, and the program ends as interrupted."""
    (tmp_path / "t.py").write_text("open('started', 'w')")
    program = (
        f"import os, signal, sys\n{happens}\n"
        "from tenax.cli.main import main\nsys.argv[1:] = ['run', 't.py']\nraise SystemExit(main())"
    )
    done = start(["-c", program], tmp_path)
    assert done.returncode == code, done.stderr
    assert not (tmp_path / "started").exists()


def test_a_call_inside_another_program_leaves_its_interrupts_alone(tmp_path) -> None:
    """Called with arguments, the command line changes no handler and looks at no earlier error of its caller."""
    program = (
        f"import signal, sys\n{DISCARDED_BY_PYTHON}\nfrom tenax.cli.main import main\nmain(['run', '--help'])\n"
        "raise SystemExit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)"
    )
    assert start(["-c", program], tmp_path).returncode == 0
