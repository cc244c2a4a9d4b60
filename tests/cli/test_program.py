"""The program as a real process: commands, exit codes, output and imports."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from importlib import import_module

import pytest

import tenax
from tenax.cli.help import OVERVIEW, fit, run_page
from tenax.cli.main import SUBCOMMANDS

pytestmark = pytest.mark.process

HEAVY = {
    *("argparse", "asyncio", "dataclasses", "logging", "subprocess", "tempfile", "pathlib", "importlib.metadata"),
    *("shutil", "json", "difflib", "torch", "numpy", "multiprocessing", "tenax.cli.help", "tenax.cli.dry_run"),
    *("tenax.cli.rendezvous_options", "tenax.rendezvous.api", "tenax._engines.tcp"),  # one node needs no rendezvous
}


def start(args: list[str], cwd: object, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    return subprocess.run(
        [sys.executable, *args], cwd=str(cwd), env={**clean, **environ}, capture_output=True, text=True, timeout=60
    )


def program(args: list[str], cwd: object, **environ: str) -> subprocess.CompletedProcess[str]:
    return start(["-m", "tenax", *args], cwd, **environ)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run"], "tenax run: no script given; write 'tenax run train.py' or 'tenax run -m MODULE'"),
        (["run", "gone.py"], "tenax run: no file 'gone.py' in {cwd}; check the path"),
        (["run", "--log-dir", "file/x", "t.py"], "tenax run: --log-dir file/x: {cwd}/file is a file, not a folder"),
        (
            ["run", "--dry-run", "--log-dir", "file", "t.py"],
            "tenax run: --log-dir file: {cwd}/file is a file, not a folder",
        ),
        (
            ["run", "--report", "x/r.json", "t.py"],
            "tenax run: --report x/r.json: the folder '{cwd}/x' does not exist; create it first",
        ),
        (
            ["run", "--nnodes", "2", "--rdzv-endpoint", "h0", "--rdzv-conf", "token_file=gone", "t.py"],
            "tenax run: cannot read the file of the rendezvous option 'token_file': [Errno 2] No such file or "
            "directory: 'gone'",
        ),
        (["run", "--report", ".", "t.py"], "tenax run: --report . is a folder, not a file"),
        (
            ["run", "--rdzv-backend", "zookeeper", "t.py"],
            "tenax run: unknown --rdzv-backend 'zookeeper'; installed backends: "
            "c10d, etcd, etcd-v2, local, static, tcp",
        ),
    ],
)
def test_a_usage_error_is_one_message_with_exit_code_2(args, message, tmp_path) -> None:
    """With a hint, nothing on stdout and no stack trace."""
    (tmp_path / "t.py").touch()
    (tmp_path / "file").touch()
    done = program(args, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{message.format(cwd=tmp_path)}\ntry: tenax run --help\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["t.py", "--x"], "tenax: unknown command 't.py'; did you mean: tenax run t.py --x"),
        (["--tee", "3", "t.py"], "tenax: unknown command '--tee'; did you mean: tenax run --tee 3 t.py"),
        (["rnu"], "tenax: unknown command 'rnu'; did you mean 'tenax run'?"),
        (["help", "stauts"], "tenax: unknown command 'stauts'; did you mean 'tenax help status'?"),
        (
            ["help", "foo"],
            "tenax: unknown command 'foo'; commands: run, start, replay, ask, status, ps, logs, stacks, "
            "stop, drain, restart, timeline, report, completion, version, help",
        ),
        (
            ["launch"],
            "tenax: unknown command 'launch'; commands: run, start, replay, ask, status, ps, logs, stacks, "
            "stop, drain, restart, timeline, report, completion, version, help",
        ),
    ],
)
def test_an_unknown_command_is_rejected_with_a_suggestion(args, message, tmp_path) -> None:
    done = program(args, tmp_path)
    assert (done.returncode, done.stderr) == (2, f"{message}\ntry: tenax help\n")


def test_a_command_without_its_argument_is_a_usage_error(tmp_path) -> None:
    """An empty variable in a shell script must not look like success."""
    done = program(["ask"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tenax ask: no socket or folder given\ntry: tenax ask --help\n"


def test_help_and_version(tmp_path) -> None:
    """Help goes to stdout with exit code 0, also without an argument."""
    for args in ([], ["help"], ["--help"], ["-h"]):
        done = program(args, tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("tenax: ")
    for args in (["help", "run"], ["run", "--help"], ["run", "-h", "t.py"]):
        done = program(args, tmp_path, PET_TEE="nonsense")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("usage: tenax run ")
    assert (
        program(["version"], tmp_path).stdout
        == program(["--version"], tmp_path).stdout
        == f"tenax {tenax.__version__}\n"
    )


def test_help_fits_the_terminal(tmp_path) -> None:
    """Words are not split at the end of a row."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    subprocess.run([sys.executable, "-m", "tenax", "stop", "--help"], stdout=end, env=clean, timeout=60, check=True)
    os.close(end)
    shown = b""
    try:
        while data := os.read(terminal, 65536):
            shown += data
    except OSError:  # Linux reports the end of a terminal as an error
        pass
    os.close(terminal)
    lines = shown.decode().split("\r\n")
    assert max(len(line) for line in lines) <= 90
    assert " ".join(lines).split() == program(["stop", "--help"], tmp_path).stdout.split()


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("command", ["help", "run", *SUBCOMMANDS])
def test_pages_keep_their_words_and_fit(command: str, width: int) -> None:
    """Except for command lines, which remain in one piece."""
    if command == "help":
        page = OVERVIEW
    elif command == "run":
        page = run_page(100)
    else:
        page = getattr(import_module(f"tenax.cli.{SUBCOMMANDS[command]}"), f"{command.upper()}_USAGE")
    shown = run_page(width) if command == "run" else fit(page, width)
    assert shown.split() == page.split()
    assert shown.endswith("\n")
    long = [line for line in shown.splitlines() if len(line) > width]
    assert all(line.startswith(("usage: tenax ", "  tenax ")) for line in long), long


def test_help_lists_the_environment_variables_without_a_flag(tmp_path) -> None:
    section = program(["run", "--help"], tmp_path).stdout.partition("\nenvironment:\n")[2]
    for variable in (
        *("PET_", "TORCHELASTIC_ENABLE_FILE_TIMER=1", "TORCHELASTIC_HEALTH_CHECK_PORT"),
        *("TORCH_WORKER_SERVER_SOCKET", "tenax ask"),
    ):
        assert variable in section


def test_a_closed_pipe_is_not_an_error(tmp_path) -> None:
    """'tenax run --help | head' ends quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed_pipe:
        done = subprocess.run(
            [sys.executable, "-m", "tenax", "run", "--help"], stdout=closed_pipe, stderr=subprocess.PIPE, timeout=60
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_dry_run_prints_notes_to_stderr_and_creates_no_file(tmp_path) -> None:
    (tmp_path / "t.py").touch()
    done = program(["run", "--dry-run", "--monitor-interval=1", "--log-dir=logs", "t.py", "--x"], tmp_path)
    assert done.returncode == 0
    assert f"command     {sys.executable} -u t.py --x\n" in done.stdout
    assert done.stderr == ("tenax run: note: --monitor-interval 1 has no effect: tenax does not poll its workers\n")
    assert sorted(os.listdir(tmp_path)) == ["t.py"]


def test_dry_run_rejects_an_unknown_handler(tmp_path) -> None:
    (tmp_path / "t.py").touch()
    done = program(["run", "--dry-run", "--metrics", "zz", "t.py"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tenax run: unknown metric handler 'zz'; known: ")


def test_dry_run_shows_the_variables_of_compat(tmp_path) -> None:
    (tmp_path / "t.py").touch()
    done = program(["run", "--dry-run", "--compat", "--nproc-per-node", "2", "t.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    shared = done.stdout.partition("environment of every worker")[2].partition("\n\n")[0]
    assert "\n  TENAX_COMPAT=1" in shared
    (path,) = [line for line in shared.splitlines() if line.startswith("  PYTHONPATH=")]
    assert path.partition("=")[2].split(os.pathsep)[0].endswith("tenax/compat/hook")


def test_arguments_that_cannot_be_printed_are_escaped(tmp_path) -> None:
    """In the dry run and in errors, also if they are not valid in the terminal's encoding."""
    (tmp_path / "t.py").touch()
    for args, code in (
        ([b"t.py", b"\xff", "ü".encode()], 0),
        ([b"--tee", b"\xff\xfe", b"t.py"], 2),
        ([b"\xff.py"], 2),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "tenax", "run", "--dry-run", *args],
            cwd=tmp_path,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == code, done.stderr


def test_python_m_tenax_run_is_the_same_program(tmp_path) -> None:
    """'python -m tenax.run' is 'tenax run'."""
    (tmp_path / "t.py").touch()
    ours, theirs = (
        start([*way, "--dry-run", "t.py"], tmp_path) for way in (["-m", "tenax", "run"], ["-m", "tenax.run"])
    )
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    assert start(["-m", "tenax.run", "gone.py"], tmp_path).returncode == 2


def test_an_unexpected_error_is_reported_as_a_bug(tmp_path) -> None:
    """With exit code 70, the traceback, and a line that it is a bug in tenax."""
    code = "from tenax.cli.main import main; raise SystemExit(main(['run', 3, 't.py']))"  # 3 is not a string
    done = start(["-c", code], tmp_path)
    assert done.returncode == 70
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "tenax: this is a bug in tenax, not in your script; please report it with the traceback above"


def test_the_start_imports_no_slow_module(tmp_path) -> None:
    """From the command line to the description of the job."""
    (tmp_path / "t.py").touch()
    code = (
        "import sys, msgspec; before = set(sys.modules)\n"
        "from tenax.cli.main import main\n"
        "from tenax.cli.arguments import parse\n"
        "from tenax.cli.run import resolve\n"
        "from tenax.cli.host_checks import check_host\n"
        "options = parse('--nproc-per-node 2 --max-restarts 3 --log-dir logs --tee 3 t.py --x'.split(), {})\n"
        "check_host(options, {}, '.')\n"
        "resolve(options, sys.executable)\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    done = start(["-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()).isdisjoint(HEAVY)


def test_what_the_start_defers_or_hides_works_as_usual(tmp_path) -> None:
    """For plug-ins in the agent's process: msgspec's schemas, and the modules that msgspec was imported without."""
    code = (
        "from tenax.cli.main import _import_msgspec; _import_msgspec()\n"
        "import datetime, decimal, msgspec, platform, sys, textwrap, typing, uuid\n"
        "assert msgspec.inspect.type_info(int) == msgspec.inspect.IntType() and 'msgspec.inspect' in sys.modules\n"
        "assert msgspec.json.schema(int) == {'type': 'integer'}\n"
        "assert msgspec.toml.encode and msgspec.yaml.encode\n"
        "assert textwrap.dedent(' a') == 'a' and platform.python_version()\n"
        "values = [uuid.UUID(int=1), decimal.Decimal('1.5'), datetime.datetime(2026, 1, 2, 3, 4)]\n"
        "types = tuple[uuid.UUID, decimal.Decimal, datetime.datetime]\n"
        "assert list(msgspec.json.decode(msgspec.json.encode(values), type=types)) == values\n"
        "assert isinstance(typing.ForwardRef('int'), typing.ForwardRef)\n"
        "class Node(msgspec.Struct):\n"
        "    below: 'Node | None' = None\n"
        "assert msgspec.json.decode(b'{\"below\":{}}', type=Node) == Node(Node())\n"
    )
    done = start(["-c", code], tmp_path)
    assert done.returncode == 0, done.stderr


# --- interrupts before the agent handles signals ----------------------------------------------------------------------

# The state after Python has printed and discarded an interrupt before the first line of the script.
DISCARDED_BY_PYTHON = "sys.last_value = KeyboardInterrupt()"
# An interrupt while a finalizer runs: Python discards a KeyboardInterrupt that is raised there.
IN_A_FINALIZER = """
class Interrupting:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(10))

class Finder:
    def find_spec(self, name, *_):
        if name == "tenax._node.node":
            Interrupting()

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(("happens", "code"), [(DISCARDED_BY_PYTHON, 130), (IN_A_FINALIZER, -signal.SIGINT)])
def test_an_interrupt_that_python_discards_stops_the_start(tmp_path, happens: str, code: int) -> None:
    """No worker starts, and the program exits as interrupted."""
    (tmp_path / "t.py").write_text("open('started', 'w')")
    program = (
        f"import os, signal, sys\n{happens}\n"
        "from tenax.cli.main import main\nsys.argv[1:] = ['run', 't.py']\nraise SystemExit(main())"
    )
    done = start(["-c", program], tmp_path)
    assert done.returncode == code, done.stderr
    assert not (tmp_path / "started").exists()


def test_a_call_from_another_program_changes_no_signal_handler(tmp_path) -> None:
    """And it ignores earlier errors of its caller."""
    program = (
        f"import signal, sys\n{DISCARDED_BY_PYTHON}\nfrom tenax.cli.main import main\nmain(['run', '--help'])\n"
        "raise SystemExit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)"
    )
    assert start(["-c", program], tmp_path).returncode == 0
