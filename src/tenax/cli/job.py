"""Finds a run as an operator names it (``SELECTOR_HELP``): connects to a running one, finds the notes of an ended one.

On this host every agent has a control socket (``_node/control_socket.py``) and forwards requests over its own link, so
no secret is needed and any node of the run will do. At an endpoint the settings are those of ``tenax run``, parsed by
the same code.

    arguments = parse_job_arguments(argv, switches=("--json",), values=("--why",))  # raises UsageError
    with find_job(JobSelector.of(arguments)) as job:  # raises UsageError, NoSuchJob
        answer = job.ask(StatusRequest(), RunStatus)  # raises Declined, ConnectionLost
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TypeVar

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._core.requests import AgentRequest, AnyRequest, StatusRequest
from tenax._core.text import concealed_repr, format_seconds, some_of
from tenax._engines.tcp.operator import (
    AccessDenied,
    ConnectionLost,
    OperatorConnection,
    OperatorError,
    Unreachable,
    connect_to_agent,
    connect_to_coordinator,
)
from tenax._io.endpoint import Address, Endpoint
from tenax._node.control_socket import socket_paths
from tenax._node.job import rendezvous_parameters
from tenax._node.run_notes import RunNote, last_runs, note_for
from tenax.cli.arguments import parse
from tenax.cli.command import Arguments, NoSuchJob, parse_arguments
from tenax.cli.flags import UsageError
from tenax.cli.options import ETCD_BACKENDS, MANY_NODES_BACKENDS
from tenax.cli.run import print_stderr

A = TypeVar("A")
TIMEOUT_S = 10.0  # for an answer that does not wait for anything
_AGENT_TIMEOUT_S = 3.0  # for an agent on this host, which may be stopped
_SELECTOR_FLAGS = ("--endpoint", "--rdzv-endpoint", "--rdzv-backend", "--rdzv-conf")
_MAX_SILENT = 3  # silent agents in one message

SELECTOR_HELP = """\
RUN_ID is the run's id, the beginning of it, or the pid of its agent on this host. It can be omitted if this host has
only one run; if it has none, status, logs, report, timeline and replay show the last one. A run of several nodes under
Slurm is found by the id of its job, from any host. For another run without a node on this host, give its id, its
endpoint and its secret as 'tenax run' got them:

  --endpoint HOST:PORT             the endpoint (--rdzv-endpoint of 'tenax run')
  --rdzv-backend tcp|etcd          the backend (default: tcp; c10d and static are the same)
  --rdzv-conf token_file=FILE,...  the secret and the TLS files; the secret can also be in TENAX_RDZV_TOKEN
"""


class NotResponding(NoSuchJob):
    """The run exists, but none of its agents here can answer now."""


class EndedRun(msgspec.Struct, frozen=True):
    """A run, from the notes that its agents left on this host.

    Several agents of a run may have run here, in parallel or one after another, and its id may have been used before.
    Agents belong to the same run if they had the same run id and rendezvous, and their lifetimes overlap.
    """

    run_id: str
    folders: tuple[str, ...]  # that still exist; the coordinator's last folder first, else the one written last
    notes: tuple[RunNote, ...]  # of its agents on this host, in the same order
    ended: float = 0.0  # the last sign of it, in seconds since the epoch

    @property
    def noted(self) -> tuple[str, ...]:
        """All log folders, including removed ones."""
        return _distinct(note.log_dir for note in self.notes)

    @property
    def outcome(self) -> str:
        """Empty: its agents were killed."""
        return next((note.outcome for note in self.notes if note.outcome), "")


class RunHasEnded(NoSuchJob):
    """The run no longer runs on this host."""

    def __init__(self, text: str, ended: EndedRun) -> None:
        super().__init__(text)
        self.ended = ended


class JobSelector(msgspec.Struct, frozen=True):
    run_id: str = ""  # or the pid of an agent; empty: the only run
    endpoint: str = ""  # empty: this host
    backend: str = ""
    conf: str = ""

    __repr__ = concealed_repr

    @classmethod
    def of(cls, arguments: Arguments) -> JobSelector:
        """Return the job that the arguments select. Raises ``UsageError``."""
        if len(arguments.positional) > 1:
            raise UsageError(f"expected one run, not {len(arguments.positional)}")
        endpoint, endpoint_of_run, backend, conf = (arguments.values.get(flag, "") for flag in _SELECTOR_FLAGS)
        selector = cls("".join(arguments.positional), endpoint or endpoint_of_run, backend, conf)
        if not selector.endpoint and (backend or conf):
            raise UsageError("--rdzv-backend and --rdzv-conf need --endpoint HOST:PORT")
        if selector.endpoint and not selector.run_id:
            raise UsageError("--endpoint needs a run id (--rdzv-id of 'tenax run')")
        return selector


class LocalAgent(RunNote, frozen=True):
    """An agent of this user on this host: its own answer, and what was observed from outside."""

    run_id: str = ""
    pid: int = 0
    phase: str = ""
    is_coordinator: bool = False
    # Not part of the answer, as ``since``: when its control socket was created.
    path: str = ""  # of its control socket
    trouble: str = ""  # why it did not answer; the other fields then come from its note on disk

    @property
    def silence(self) -> str:
        whose = f"the agent of the run {self.run_id!r} (pid {self.pid})" if self.run_id else f"the agent {self.pid}"
        return f"{whose} does not respond: {self.trouble}"


# --- job --------------------------------------------------------------------------------------------------------------


def parse_job_arguments(argv: Sequence[str], *, switches: Iterable[str] = (), values: Iterable[str] = ()) -> Arguments:
    """Parse flags at any position, including those that select a job. Raises ``UsageError``."""
    return parse_arguments(argv, switches=switches, values=(*values, *_SELECTOR_FLAGS))


class Job(AbstractContextManager["Job"]):
    """A connection to a run. ``agent`` is the agent that answers, if it is on this host."""

    def __init__(self, line: OperatorConnection, agent: LocalAgent | None = None) -> None:
        self.agent = agent
        self.line = line

    def ask(self, request: AnyRequest, kind: type[A], timeout_s: float = TIMEOUT_S) -> A:
        """Send a request and return the answer as this type. Raises ``Declined`` and ``ConnectionLost``."""
        return decode(self.line.ask(request, timeout_s), kind)

    def until_gone(self) -> None:
        """Wait until the process that answers exits: the agent, or the coordinator's. Raises ``ConnectionLost``."""
        self.line.until_closed(AgentRequest())

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.line.close()


def find_job(selector: JobSelector) -> Job:
    """Connect to the selected job. Raises ``UsageError`` and ``NoSuchJob``."""
    if selector.endpoint:
        return _job_at_endpoint(selector)
    agents = local_agents()
    selected = _selected(selector.run_id, agents)
    if not selected:
        return _scheduled_job(selector, agents)
    try:
        return connect(selected)
    except Unreachable as error:
        silent = [agent.silence for agent in selected if agent.trouble]  # possibly the coordinator's, or the only one
        why = "; ".join(silent[:_MAX_SILENT]) or f"the run {selected[0].run_id!r} does not respond: {error}"
        raise NotResponding(why) from error


def paths_of(name: str) -> list[str]:
    """Return the path itself, or the log folders on this host of the running or ended run with this name.

    Raises ``NoSuchJob`` and ``UsageError``.
    """
    if os.sep in name or os.path.lexists(name):
        return [name]
    agents = local_agents()
    if selected := _selected(name, agents):
        folders = _distinct(agent.log_dir for agent in selected)
        error = NoSuchJob(f"the run {selected[0].run_id!r} writes no logs")
    else:
        error = _nothing_found(name, agents)
        if not isinstance(error, RunHasEnded):
            what = f"no file, folder or run {name!r}{_similar(name, agents)}"
            raise UsageError(what if name else "you have no run on this host; give a journal or a folder")
        folders = error.ended.folders
    if not folders:
        raise error
    return list(folders)


def _selected(run_id: str, agents: list[LocalAgent]) -> list[LocalAgent]:
    """Return the agents of the run with this id, with this agent, or whose id begins so. Raises ``NoSuchJob``."""
    # Agents that do not answer count: their runs continue.
    exact = [agent for agent in agents if run_id in (agent.run_id, str(agent.pid))]
    selected = exact or [agent for agent in agents if agent.run_id.startswith(run_id)]
    if len({agent.which_run for agent in selected}) > 1:
        raise NoSuchJob(_several_found(run_id, selected, is_exact=bool(exact)))
    return selected


def _scheduled_job(selector: JobSelector, agents: list[LocalAgent]) -> Job:
    """Connect to a job on other hosts by the scheduler's id. Raises ``NoSuchJob``."""
    from tenax._schedulers.slurm import runs_of
    from tenax.cli.scheduled_run import shared_secret_path

    why = ""
    conf = f"token_file={shared_secret_path(os.path.expanduser('~'))}"
    for run_id, endpoint in runs_of(selector.run_id):
        try:
            return _job_at_endpoint(JobSelector(run_id, endpoint, "tcp", conf))
        except NoSuchJob as error:
            why = f"{why}; {error}" if why else f"the run {run_id!r} of the Slurm job does not respond: {error}"
    raise NoSuchJob(why) if why else _nothing_found(selector.run_id, agents)


def connect(agents: list[LocalAgent], timeout_s: float = TIMEOUT_S) -> Job:
    """Connect through the first agent that can reach the coordinator, starting with the coordinator's own.

    Raises ``Unreachable``.
    """
    why = ""
    responding = [agent for agent in agents if not agent.trouble]
    for agent in sorted(responding, key=lambda each: (not each.is_coordinator, each.pid)):
        try:
            job = Job(connect_to_agent(agent.path), agent)
        except (OSError, OperatorError):
            why = why or "its agent has just exited"
            continue
        try:
            if len(agents) > 1:
                job.line.ask(StatusRequest(), timeout_s)
        except OperatorError as error:  # it has lost its coordinator, or has just exited: try another
            why = why or str(error)
            job.close()
        else:
            return job
    raise Unreachable(why)


def decode(raw: msgspec.Raw, kind: type[A]) -> A:
    """Return an answer as this type. Raises ``ConnectionLost``."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except DECODE_ERRORS as error:
        raise ConnectionLost(f"unexpected answer ({error}); the run may use another version of tenax") from error


# --- this host --------------------------------------------------------------------------------------------------------


def local_agents() -> list[LocalAgent]:
    """Return every agent of this user on this host, oldest first. Removes control sockets without a listener.

    Raises ``NoSuchJob`` if the folder of control sockets is not private to this user.
    """
    try:
        paths = socket_paths()
    except OSError as error:
        raise NoSuchJob(f"could not list the agents of this host: {error.strerror or error}") from error
    # All requests are sent before the first answer is awaited.
    lines = [(path, _ask_agent(path)) for path in paths]
    found = [_agent(path, line) for path, line in lines if line is not None]
    return sorted((agent for agent in found if agent is not None), key=lambda agent: (agent.since, agent.pid))


def _ask_agent(path: str) -> OperatorConnection | OperatorError | None:
    """Send the first request. Return None, and remove the control socket, if no process listens on it."""
    try:
        line = connect_to_agent(path, _AGENT_TIMEOUT_S)
        line.send(AgentRequest())
    except (ConnectionRefusedError, FileNotFoundError):
        with suppress(OSError):
            os.unlink(path)  # of an agent that was killed
        return None
    except OperatorError as error:
        return error
    return line


def _agent(path: str, line: OperatorConnection | OperatorError) -> LocalAgent | None:
    """Return the agent behind a control socket; None if it has exited."""
    name = os.path.basename(path).partition(".")[0].partition("-")[0]
    pid = int(name) if name.isdecimal() else 0
    try:
        since = os.stat(path).st_mtime
    except OSError:
        since = 0.0
    try:
        if isinstance(line, OperatorError):
            raise line
        agent, trouble = decode(line.answer(1, _AGENT_TIMEOUT_S), LocalAgent), ""
    except OperatorError as error:
        is_late = isinstance(error.__cause__, TimeoutError)
        if not is_late:
            again = _ask_agent(path)  # otherwise it may be stopped
            if again is None:
                return None
            if isinstance(again, OperatorConnection):
                again.close()
        note = note_for(path)
        agent = LocalAgent(**msgspec.structs.asdict(note)) if note is not None else LocalAgent()
        late = f"no answer within {format_seconds(_AGENT_TIMEOUT_S)}"
        trouble = _why_stopped(pid) or (late if is_late else str(error))
    finally:
        if isinstance(line, OperatorConnection):
            line.close()
    return msgspec.structs.replace(agent, path=path, since=since, trouble=trouble, pid=agent.pid or pid)


def _why_stopped(pid: int) -> str:
    """Return why a process is stopped; empty if it is not, or if this is unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):  # not visible from this container, or no /proc
        return ""
    if state == "T":
        return f"it is stopped (Ctrl-Z, SIGSTOP or a debugger); to continue it: kill -CONT {pid}"
    return "it is stopped by a debugger" if state == "t" else ""


def _nothing_found(run_id: str, agents: list[LocalAgent]) -> NoSuchJob:
    elsewhere = "for a run on other hosts add --endpoint HOST:PORT"
    try:
        ended = ended_run(run_id)
    except OSError:  # the folder with the notes is not private; this has been reported
        ended = None
    if not run_id:
        text = f"you have no run on this host; {elsewhere} and its run id"
    elif ended is not None:
        where = f"its log folder {ended.noted[0]} was removed" if ended.noted else "it wrote no logs"
        if ended.folders:
            where = f"to see how it ended: tenax status {shlex.quote(ended.run_id)}"
        text = f"the run {ended.run_id!r} no longer runs on this host; {where}"
    else:
        there = f"your runs: {_names(agents)}" if agents else "you have none here"
        text = f"no run {run_id!r} on this host ({there}){_similar(run_id, agents) or f'; {elsewhere}'}"
    return RunHasEnded(text, ended) if ended is not None else NoSuchJob(text)


def _similar(run_id: str, agents: list[LocalAgent]) -> str:
    """Return a question about a run with a similar id, running or ended; empty if there is none."""
    from difflib import get_close_matches

    with suppress(OSError):
        known = [*(agent.run_id for agent in agents), *(run.run_id for run in ended_runs())]
        return "".join(f"; did you mean {each!r}?" for each in get_close_matches(run_id, known, 1))
    return ""


def _names(agents: Iterable[LocalAgent]) -> str:
    names = (
        (repr(agent.run_id) if agent.run_id else f"pid {agent.pid}")
        + (f" (agent {agent.pid} does not respond)" if agent.trouble else "")
        for agent in agents
    )
    return some_of(list(dict.fromkeys(names)))


def _several_found(run_id: str, agents: list[LocalAgent], *, is_exact: bool) -> str:
    by_run: dict[tuple[str, str], LocalAgent] = {}
    for agent in agents:
        by_run.setdefault(agent.which_run, agent)
    if is_exact:
        pids = ", ".join(f"{agent.pid} ({os.path.basename(agent.entrypoint)})" for agent in by_run.values())
        return f"{len(by_run)} runs on this host have the id {run_id!r}; use the pid of an agent instead: {pids}"
    begin = f" begin with {run_id!r}" if run_id else ""
    return f"{len(by_run)} runs on this host{begin}; give the id of one: {_names(by_run.values())}"


# --- ended runs -------------------------------------------------------------------------------------------------------


class _EndedAgent:
    """An agent's note, and how long it and its coordinator ran, judged by their files."""

    def __init__(self, note: RunNote) -> None:
        self.note = note
        self.coordinated_until = _last_written(note.log_dir, "coordinator")
        last_seen = max(note.since, self.coordinated_until, _last_written(note.log_dir, "journal"))
        self.until = note.ended or last_seen


def ended_run(name: str, environ: Mapping[str, str] | None = None) -> EndedRun | None:
    """Return the last ended run on this host with this run id, agent pid or beginning of a run id; "": the last one.

    Raises OSError, and ``NoSuchJob`` if several run ids begin so.
    """
    runs = ended_runs(environ)
    exact = [run for run in runs if name == run.run_id or name in (str(note.pid) for note in run.notes)]
    found = exact or [run for run in runs if run.run_id.startswith(name)]
    ids = _distinct(run.run_id for run in found)
    if name and len(ids) > 1 and not exact:
        raise NoSuchJob(f"{len(ids)} ended runs begin with {name!r}: {some_of(list(ids))}")
    return found[0] if found else None


def ended_runs(environ: Mapping[str, str] | None = None) -> list[EndedRun]:
    """Return the ended runs on this host, the latest first. Raises OSError."""
    agents = [_EndedAgent(note) for note in last_runs(environ)]
    runs = []
    while agents:
        same_run = _same_run(agents[0], agents[1:])
        agents = [agent for agent in agents if agent not in same_run]
        same_run.sort(key=lambda agent: (agent.coordinated_until, agent.until), reverse=True)
        notes = tuple(agent.note for agent in same_run)
        folders = tuple(folder for folder in _distinct(note.log_dir for note in notes) if os.path.isdir(folder))
        runs.append(EndedRun(notes[0].run_id, folders, notes, max(agent.until for agent in same_run)))
    return runs


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in texts if text))


def _same_run(first: _EndedAgent, agents: Iterable[_EndedAgent]) -> list[_EndedAgent]:
    """Return the agents of that run that are connected to the first by a chain of overlapping lifetimes."""
    found, others = [first], [each for each in agents if each.note.which_run == first.note.which_run]
    for one in found:  # grows during the loop
        met = [other for other in others if other.note.since <= one.until and one.note.since <= other.until]
        found += met
        others = [other for other in others if other not in met]
    return found


def _last_written(folder: str, kind: str) -> float:
    """Return when the last journal of this kind was written, in seconds since the epoch; 0 if there is none."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith(kind) and name.endswith(".jsonl")]
        return max((os.stat(os.path.join(folder, name)).st_mtime for name in names), default=0.0)
    except OSError:
        return 0.0


# --- endpoint ---------------------------------------------------------------------------------------------------------


def _job_at_endpoint(selector: JobSelector) -> Job:
    backend = selector.backend or "tcp"
    if backend not in MANY_NODES_BACKENDS:
        raise UsageError(f"--rdzv-backend takes 'tcp' or 'etcd', not {backend!r}")
    backend = "tcp" if backend == "static" else backend
    # Parse the flags as for a node of that run; nothing is started.
    flags = {"--rdzv-id": selector.run_id, "--rdzv-backend": backend, "--rdzv-endpoint": selector.endpoint}
    flags |= {"--rdzv-conf": selector.conf} if selector.conf else {}
    options = parse([f"{flag}={value}" for flag, value in flags.items()] + ["--nnodes=1:2", "operator"], {})
    for note in options.notes:
        print_stderr(f"tenax: note: {note}")
    parameters = rendezvous_parameters(options)
    try:
        if backend in ETCD_BACKENDS:
            from tenax._engines.etcd.operator import connect_through_etcd
            from tenax.rendezvous._etcd_handler import etcd_engine_settings

            return Job(connect_through_etcd(etcd_engine_settings(parameters)))
        from tenax.rendezvous._tcp_handler import tcp_settings

        settings = tcp_settings(parameters)
        tls = settings.tls.for_client() if settings.tls is not None else None
    except ValueError as error:
        raise UsageError(str(error).rstrip(".")) from error
    except AccessDenied as error:
        raise NoSuchJob(f"the coordinator of {selector.run_id!r} denied access: {error}") from error
    except Unreachable as error:
        raise NoSuchJob(f"the run {selector.run_id!r} cannot be reached: {error}") from error
    endpoint = Endpoint.parse(settings.endpoint)
    secret = settings.secret
    if settings.uses_user_secret:
        from tenax._engines.secret import user_secret

        secret = user_secret(create=False)  # readable: tcp_settings has checked it
    try:
        line = connect_to_coordinator(
            _addresses(endpoint.host, endpoint.port), selector.run_id, secret, tls, endpoint.host
        )
    except AccessDenied as error:
        raise NoSuchJob(f"the coordinator at {endpoint} denied access: {error}") from error
    except Unreachable as error:
        raise NoSuchJob(f"no coordinator at {endpoint}: {error}") from error
    return Job(line)


def _addresses(host: str, port: int) -> list[Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise NoSuchJob(f"could not resolve the host name {host!r}: {why}") from error
    return [(family, address) for family, _, _, _, address in found]
