"""``tenax start``: starts ``tenax run`` on several hosts, over ssh or with srun, and ends all of it together.

The machine of ``tenax._core.start`` decides. This module carries out its commands: each connection is a process of ssh
or srun, which runs ``tenax._processes.start_guard`` on its host.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from tenax import __version__
from tenax._core import start as core
from tenax._core.events import SignalReceived
from tenax._core.text import format_seconds, without_passwords
from tenax._io.helper_process import inheritable_environ
from tenax._io.interfaces import Watchable
from tenax._io.loop import Loop
from tenax._logs.device_thread import DeviceThread
from tenax._node.job import new_run_id
from tenax._node.signals import DEFAULT_SIGNALS, SignalSource, parse_signals
from tenax._schedulers import read_text
from tenax._schedulers.started import VARIABLE, describe, host_name, parse_file, parse_list
from tenax.cli.arguments import read
from tenax.cli.command import parse_arguments
from tenax.cli.flags import BY_DEST, UsageError, convert, usage_errors
from tenax.cli.options import node_range
from tenax.cli.rendezvous_options import TOKEN_VARIABLE

START_USAGE = """\
usage: tenax start --hosts LIST [flags] -- [flags of tenax run] SCRIPT [arguments of the script]
       tenax start --hostfile FILE [flags] -- ...
       tenax start --discover PROGRAM [flags] -- ...

Start 'tenax run' on several hosts as one run, with the Python and in the folder of this command. The
endpoint is on the first host; the number of nodes, the run id and a secret are set unless they are
given. Everything ends when this command ends, however it ends.

  tenax start --hosts h[0-3] -- --nproc-per-node gpu train.py        on h0, h1, h2 and h3, over ssh
  tenax start --hosts h[0-3] -- --nnodes 2:4 --max-restarts 3 train.py
                                                                     may go on with two hosts
  tenax start --hostfile hosts.txt --env WANDB_API_KEY -- train.py   with a variable of this shell
  tenax start --discover ./hosts.sh -- --nnodes 2:8 train.py         on the hosts that it prints
  salloc -N4 tenax start --via srun -- --nnodes 2:4 train.py         in Slurm: one step for each node

  --hosts LIST          hosts, as Slurm lists them: 'h[0-3,7],gpu1'; NAME:N has N workers
  --hostfile FILE       a host on each line: 'h0', 'h0 slots=8' or 'h0:8', with N workers; '#' begins a comment
  --discover PROGRAM    a program that prints such lines. It is run again every 10 s: new hosts join the run, and
                        the agents of hosts that it no longer prints are stopped. Needs --nnodes MIN:MAX
  --via ssh|srun        how to reach the hosts (default: ssh). With srun the default hosts are those of the job
  --ssh COMMAND         the command of ssh with its options (default: ssh): --ssh 'ssh -F config -J gate'
  --env NAMES           variables of this shell to set for the agents, separated by commas
  --host-restarts N     attempts in a row to start a lost agent again (default: 10)

First all hosts are checked: each must be reachable without a password and have the same folder, Python
and tenax. Lines of their output begin with the host. Ctrl-C stops the run, a second one kills it. An
agent that is killed, or whose host is lost, is started again; the other nodes wait for it, or go on
without it if --nnodes allows.

Exit code: that of the run; see 'tenax run --help'. 71: a host failed its check, or too few are left. 2:
wrong usage.
"""

_VALUES = ("--hosts", "--hostfile", "--discover", "--via", "--ssh", "--env", "--host-restarts")
_SOURCES = ("--hosts", "--hostfile", "--discover")
_SILENCE_S = 20.0  # then the other side ends
_HEARTBEAT_S = _SILENCE_S / 4
_MAX_CLOCK_DIFFERENCE_S = 5.0
_MAX_LINE = 1 << 16
_OUTPUT_BYTES = 1 << 20
_FLUSH_S = 5.0
_SSH_FAILED = 255
# Without the current folder, which may contain another tenax.
_PROGRAM = "import sys; sys.path[0] or sys.path.pop(0); from {module} import main; sys.exit(main())"
_SSH_OPTIONS = (
    *("-T", "-x", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=5", "-oServerAliveCountMax=3"),
    "-oControlPath=none",  # a shared connection would outlive this command
)


class Plan(msgspec.Struct, frozen=True):
    hosts: tuple[core.Host, ...]  # empty: the discovery script lists them
    run_flags: tuple[str, ...]
    nodes: int  # 0: as many as hosts
    settings: core.StartSettings
    env: dict[str, str] = {}
    connect: tuple[str, ...] = ("ssh", *_SSH_OPTIONS)
    discover: str = ""
    discover_every_s: float = 10.0
    folder: str = ""
    python: str = sys.executable
    run_id: str = ""
    resolves: bool = True  # the endpoint is on the first host

    def agent(self, host: core.Host, order: int, first: str) -> dict[str, Any]:
        argv = [self.python, "-c", _PROGRAM.format(module="tenax.cli.main"), "run", *self.run_flags]
        nodes = self.nodes or len(self.hosts)
        variable = describe(self.run_id, first, nodes, order, host.slots)
        return {"argv": argv, "folder": self.folder, "env": {**self.env, VARIABLE: variable}}

    def guard(self, host: str) -> list[str]:
        guard = [self.python, "-c", _PROGRAM.format(module="tenax._processes.start_guard")]
        if self.connect[0] == "srun":
            return [*self.connect, "-w", host, *guard]
        return [*self.connect, "--", host, shlex.join(guard)]


def start(argv: Sequence[str]) -> int:
    return start_all(make_plan(argv, os.environ, os.getcwd(), read_text))


def start_all(plan: Plan) -> int:
    """Start what is planned, and return the exit code when all of it has ended."""
    if shutil.which(plan.connect[0]) is None:
        raise UsageError(f"no program {plan.connect[0]!r} on PATH, with which to reach the hosts")
    loop = Loop()
    signals = [*parse_signals(DEFAULT_SIGNALS), signal.SIGCHLD]
    with SignalSource(loop, signals, exits_afterwards=True) as source:
        loop.watch(source)
        try:
            return _Starter(plan, loop).run()
        finally:
            loop.close()


def make_plan(argv: Sequence[str], environ: Mapping[str, str], folder: str, read_file: Callable[[str], str]) -> Plan:
    at = argv.index("--") if "--" in argv else len(argv)
    own, run_flags = argv[:at], tuple(argv[at + 1 :])
    arguments = parse_arguments(own, values=_VALUES)
    if arguments.positional or not run_flags:
        example = "tenax start --hosts LIST -- train.py"
        raise UsageError(f"write the flags of 'tenax run' and the script after '--': {example}")
    values = arguments.values
    connect = _connection(values)
    hosts = _hosts(values, connect, environ, read_file)
    names = [name for name in values.get("--env", "").split(",") if name]
    if missing := [name for name in names if name not in environ]:
        raise UsageError(f"--env: the variable {missing[0]} is not set")
    env = {name: environ[name] for name in names}
    flags = read(run_flags, env)
    for dest in ("standalone", "node_rank"):
        if flags.typed(dest):
            raise UsageError(f"{flags.quote(dest)} is not for several hosts; remove it")
    least, most = node_range(flags) if flags.given("nnodes") else (0, 0)
    if "--discover" in values and not most:
        raise UsageError("--discover needs the number of nodes: -- --nnodes MIN:MAX ...")
    if hosts and least > len(hosts):
        raise UsageError(f"{flags.quote('nnodes')} needs {least} hosts, but {len(hosts)} are given")
    has_secret = connect[0] == "srun" or "token_file=" in flags["rdzv_conf"]  # with srun as for every step
    if most != 1 and len(hosts) != 1 and not has_secret:
        env.setdefault(TOKEN_VARIABLE, environ.get(TOKEN_VARIABLE) or os.urandom(32).hex())
    restarts = values.get("--host-restarts", "10")
    return Plan(
        hosts=tuple(hosts),
        run_flags=run_flags,
        nodes=most,
        settings=core.StartSettings(
            min_nodes=least,
            max_restarts=convert(BY_DEST["max_restarts"], restarts, "--host-restarts"),
            discovers="--discover" in values,
        ),
        env=env,
        connect=connect,
        discover=values.get("--discover", ""),
        folder=folder,
        run_id=new_run_id(),
        resolves=not (flags.given("rdzv_endpoint") or flags.given("master_addr")) and len(hosts) != 1 and most != 1,
    )


def _connection(values: Mapping[str, str]) -> tuple[str, ...]:
    via = values.get("--via", "ssh")
    if via == "ssh":
        return (*shlex.split(values.get("--ssh", "ssh")), *_SSH_OPTIONS)
    if via != "srun":
        raise UsageError(f"--via takes ssh or srun, not {via!r}")
    if "--ssh" in values:
        raise UsageError("--ssh and --via srun cannot be combined; remove one of them")
    return ("srun", "--overlap", "--quiet", "-N1", "-n1")


def _hosts(
    values: Mapping[str, str], connect: Sequence[str], environ: Mapping[str, str], read_file: Callable[[str], str]
) -> list[core.Host]:
    given = [flag for flag in _SOURCES if flag in values]
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]} cannot be combined; remove one of them")
    with usage_errors(f"{given[0]}: " if given else ""):
        if "--hosts" in values:
            hosts = parse_list(values["--hosts"])
        elif "--hostfile" in values:
            try:
                hosts = parse_file(read_file(values["--hostfile"]))
            except OSError as error:
                raise ValueError(f"cannot read {values['--hostfile']!r}: {error.strerror}") from error
        elif "--discover" in values:
            return []
        elif connect[0] == "srun" and environ.get("SLURM_JOB_NODELIST"):
            hosts = parse_list(environ["SLURM_JOB_NODELIST"])
        else:
            raise ValueError("no hosts given; add --hosts LIST, --hostfile FILE or --discover PROGRAM")
        if not hosts:
            raise ValueError("it has no hosts")
    return hosts


class _Console:
    """Standard output or standard error, written by a thread: a terminal that is paused does not stop this process."""

    def __init__(self, descriptor: int, loop: Loop) -> None:
        self._descriptor = descriptor
        self._is_closed = False
        self._now = loop.now
        self.device = DeviceThread(self._write, loop.wake, limit_bytes=_OUTPUT_BYTES, stuck_after_s=float("inf"))

    def put(self, data: bytes) -> None:
        self.device.put(data, len(data))

    @property
    def is_full(self) -> bool:
        """Whether to wait with more output. The loop is woken when that changes."""
        self.device.update(self._now())
        return self.device.holding

    def _write(self, batch: list[bytes]) -> None:
        data = memoryview(b"".join(batch))
        while data and not self._is_closed:
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError:  # its reader is gone, as after '| head'
                self._is_closed = True


class _Stream(Watchable):
    def __init__(self, pipe: Any, console: _Console, on_line: Callable[[bytes], None]) -> None:
        self._pipe = pipe
        self._console = console
        self._on_line = on_line
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        return -1 if self._pipe.closed or self._console.is_full else int(self._pipe.fileno())

    def on_readable(self) -> None:
        self.read()

    def close(self) -> None:
        self._pipe.close()

    def read(self) -> bool:
        """Read what is there. Return False if it would block or is closed."""
        if self._pipe.closed:
            return False
        try:
            data = os.read(self._pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if not data or len(self._rest) > _MAX_LINE:
            lines += [self._rest] if self._rest else []
            self._rest = b""
        for line in lines:
            self._on_line(line)
        if not data:
            self._pipe.close()
        return bool(data)


class _Connection:
    """A process of ssh or srun, and what the guard on its host reports."""

    def __init__(self, plan: Plan, starter: _Starter, name: str, first: str) -> None:
        self.name = name
        self._python = plan.python
        self._starter = starter
        self._prefix = f"[{name}] ".encode()
        self._marker = os.urandom(16).hex()
        self._is_checked = False
        self._error = ""  # the last line on stderr before the check
        self.process = subprocess.Popen(
            plan.guard(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches this process alone
            env=inheritable_environ(),
        )
        self.streams = (
            _Stream(self.process.stdout, starter.out, self._on_output),
            _Stream(self.process.stderr, starter.err, self._on_error),
        )
        self._stdin: Any = self.process.stdin
        endpoint = host_name(first) if plan.resolves else ""
        self.send({"marker": self._marker, "folder": plan.folder, "endpoint": endpoint, "silence_s": _SILENCE_S})

    def send(self, request: object = None) -> None:
        """Send a request; None: a heartbeat."""
        with suppress(BrokenPipeError, ValueError):  # it has ended, which is reported by SIGCHLD; or it was closed
            self._stdin.write((b"" if request is None else msgspec.json.encode(request)) + b"\n")
            self._stdin.flush()

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._stdin.close()

    def why_ended(self) -> str:
        if self._is_checked:
            return "the connection was lost"
        if self.process.returncode == _SSH_FAILED:
            return f"cannot connect: {self._error}"
        return f"cannot start {self._python}: {self._error or 'it printed nothing'}"

    def _on_output(self, line: bytes) -> None:
        text, marker, report = line.partition(f"{self._marker} ".encode())
        if text or not marker:
            self._starter.out.put(self._prefix + text + b"\n")
        if marker and not self._is_checked:
            self._is_checked = True
            self._starter.on_checked(self.name, msgspec.json.decode(report))
        elif marker:
            self._starter.step(core.AgentExited(self.name, int(report)))

    def _on_error(self, line: bytes) -> None:
        if self._is_checked:
            self._starter.err.put(self._prefix + line + b"\n")
        elif line.strip():
            self._error = line.decode(errors="replace").strip().rstrip(".")


class _Starter:
    def __init__(self, plan: Plan, loop: Loop) -> None:
        self._plan = plan
        self._loop = loop
        self._machine = core.StartMachine(plan.settings)
        self._connections: dict[str, _Connection] = {}
        self._started: dict[str, tuple[core.Host, int]] = {}  # the hosts of ``Connect``, with their order
        self._first = plan.hosts[0].name if plan.hosts else ""
        self._script: subprocess.Popen[bytes] | None = None
        self._script_output: _Stream | None = None
        self._listed: list[bytes] = []
        self._is_stopping = False  # by a signal
        self.out, self.err = _Console(1, loop), _Console(2, loop)

    def run(self) -> int:
        try:
            if self._plan.discover:
                self._discover()
            else:
                self.step(core.HostsListed(self._plan.hosts))
            self._loop.at(self._loop.now() + _HEARTBEAT_S, self._send_heartbeats)
            while (code := self._machine.exit_code) is None:
                self._take_event(self._loop.next_event(self._deadline))
        finally:
            for connection in self._connections.values():
                connection.process.kill()
            if self._script is not None:
                self._script.kill()
                self._script.wait()
        self._flush()
        return code

    def _deadline(self) -> float | None:
        return self._machine.deadline if self._machine.exit_code is None else 0.0

    def _take_event(self, event: object) -> None:
        if not isinstance(event, SignalReceived):
            self.step(core.Tick())
        elif event.signal == signal.SIGCHLD:
            self._reap()
        else:
            name = signal.Signals(event.signal).name
            what = "killing all workers" if self._is_stopping else "stopping all agents; a second signal kills them"
            self._print(f"received {name}; {what}")
            self._is_stopping = True
            self.step(core.StopSignal(event.signal))

    def step(self, event: core.AnyEvent) -> None:
        for command in self._machine.step(event, self._loop.now()):
            match command:
                case core.Print():
                    self._print(command.text)
                case core.Connect():
                    name = command.host.name
                    self._started[name] = command.host, command.order
                    connection = self._connections[name] = _Connection(self._plan, self, name, self._first)
                    for stream in connection.streams:
                        self._loop.watch(stream)
                case core.StartAgent():
                    host, order = self._started[command.host]
                    self._connections[command.host].send(self._plan.agent(host, order, self._first))
                case core.SignalAgent():
                    self._connections[command.host].send(command.number)
                case core.CloseConnection():
                    self._connections[command.host].close()
                case core.KillConnection():
                    self._connections[command.host].process.kill()

    def on_checked(self, name: str, found: dict[str, Any]) -> None:
        difference_s = abs(found["time"] - time.time())
        if difference_s > _MAX_CLOCK_DIFFERENCE_S:
            self._print(f"{name}: its clock differs by {format_seconds(round(difference_s))}")
        self.step(core.Checked(name, problem_of(found, self._plan)))

    def _reap(self) -> None:
        for name, connection in list(self._connections.items()):
            if connection.process.poll() is not None:
                for stream in connection.streams:
                    self._read_rest(stream)
                del self._connections[name]
                connection.close()
                self.step(core.Disconnected(name, connection.why_ended()))
        if self._script is not None and self._script.poll() is not None:
            self._on_discovered(self._script)

    def _read_rest(self, stream: _Stream) -> None:
        """Read what an ended process has written, and close the stream."""
        while stream.read():
            pass
        self._loop.unwatch(stream)
        stream.close()

    def _send_heartbeats(self) -> None:
        for connection in self._connections.values():
            connection.send()
        self._loop.at(self._loop.now() + _HEARTBEAT_S, self._send_heartbeats)

    # --- discovery

    def _discover(self) -> None:
        command = shlex.split(self._plan.discover)
        try:
            self._script = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        except OSError as error:
            problem = f"--discover: cannot run {self._plan.discover!r}: {error.strerror}"
            if not self._first:
                raise UsageError(problem) from error
            self._keep_list(problem)
            return
        self._listed = []
        self._script_output = _Stream(self._script.stdout, self.out, self._listed.append)
        self._loop.watch(self._script_output)

    def _on_discovered(self, script: subprocess.Popen[bytes]) -> None:
        assert self._script_output is not None
        self._read_rest(self._script_output)
        self._script = self._script_output = None
        try:
            if script.returncode:
                raise ValueError(f"it exited with code {script.returncode}")
            hosts = tuple(parse_file(b"\n".join(self._listed).decode(errors="replace")))
        except ValueError as error:
            self._keep_list(f"--discover: {error}")
            return
        self._loop.at(self._loop.now() + self._plan.discover_every_s, self._discover)
        self._first = self._first or (hosts[0].name if hosts else "")
        self.step(core.HostsListed(hosts))

    def _keep_list(self, problem: str) -> None:
        self._print(f"{problem}; the list of hosts is unchanged")
        self._loop.at(self._loop.now() + self._plan.discover_every_s, self._discover)

    # --- console

    def _print(self, text: str) -> None:
        self.err.put(f"tenax start: {without_passwords(text)}\n".encode(errors="replace"))

    def _flush(self) -> None:
        until = self._loop.now() + _FLUSH_S
        for device in (self.out.device, self.err.device):
            device.wake_when_empty = True
            while device.pending and self._loop.now() < until:
                self._loop.next_event(lambda device=device: until if device.pending else 0.0)  # type: ignore[misc]


def problem_of(found: Mapping[str, Any], plan: Plan) -> str:
    """Return why no agent can be started on a host, from what its guard found; empty if one can."""
    python = ".".join(map(str, sys.version_info[:3]))
    if found["tenax"] != __version__:
        return f"it has tenax {found['tenax']}, and this host {__version__}"
    if found["python"] != python:
        return f"its {plan.python} is Python {found['python']}, and that of this host {python}"
    if not found["has_folder"]:
        return f"it has no folder {plan.folder}"
    if found["unresolved"]:
        name = found["unresolved"]
        return f"it cannot resolve the host name {name!r} of the endpoint; add '-- --rdzv-endpoint ADDRESS'"
    return ""
