"""A job that is running, found as an operator names it, and a line to ask it.

    tenax COMMAND                              the only run of this user on this host
    tenax COMMAND RUN_ID                       a run by its id, or by the pid of one of its agents here
    tenax COMMAND RUN_ID --endpoint HOST:PORT  from anywhere: where its nodes meet, with the job's secret

On this host every agent has a door (``_node/control_socket.py``), and passes on what is asked over its own link: no
secret is
needed, and any node of the run will do. At an endpoint the settings are those of ``tenax run``, read by the same code.

For commands::

    words = read_words(argv, switches=("--json",), values=("--why",))  # raises UsageError
    with find_job(wanted(words, run_id)) as job:  # raises UsageError, NoSuchJob
        answer = job.ask(StatusRequest(), RunStatus)  # raises Declined, LineLost

``guarded`` turns what is raised into a sentence and an exit code.
"""

from __future__ import annotations

import os
from typing import TypeVar

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._engines.tcp.operator import (
    AccessDenied,
    Declined,
    LineLost,
    OperatorError,
    Unreachable,
    connect_to_agent,
    connect_to_coordinator,
)
from tenax.cli.flags import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tenax._core.requests import AnyRequest
    from tenax._engines.tcp.operator import OperatorLine
    from tenax._io.endpoint import Address
    from tenax.cli.ended_run import EndedRun

__all__ = [
    "PLACE_HELP",
    "AgentHere",
    "CannotBeAsked",
    "Declined",
    "Job",
    "JobSelector",
    "LineLost",
    "NoSuchJob",
    "UsageError",
    "Words",
    "agents_here",
    "find_job",
    "guarded",
    "read_words",
    "wanted",
]

A = TypeVar("A")
TIMEOUT_S = 10.0  # for an answer that nobody makes wait
_DOOR_S = 3.0  # an agent that is stopped does not hold up the others for longer
_PLACE_FLAGS = {
    "--endpoint": "endpoint",
    "--rdzv-endpoint": "endpoint",
    "--rdzv-backend": "backend",
    "--rdzv-conf": "conf",
}
_MAX_SAID = 8
_MAX_SILENT = 3  # of which it is said
_STOPPED, _TRACED = "T", "t"  # states of a process, as the system writes them

PLACE_HELP = """\
Which run: on a host of the run its id is enough, and if there is only one run not even that. The pid of its agent
names it too. From elsewhere, name the place where its nodes meet, as 'tenax run' was told it, and the job's secret:

  --endpoint HOST:PORT             where the nodes meet (--rdzv-endpoint of 'tenax run')
  --rdzv-backend tcp|etcd          what is there (default: tcp; c10d and static are the same)
  --rdzv-conf token_file=FILE,...  the secret and the files for TLS, as for 'tenax run'; or TENAX_RDZV_TOKEN=SECRET
"""


class NoSuchJob(Exception):
    """There is no such run, or it cannot be asked. The text is one sentence."""


class CannotBeAsked(NoSuchJob):
    """It is there, but nobody of it could say anything just now."""


class JobSelector(msgspec.Struct, frozen=True):
    """Which job is meant."""

    run_id: str = ""  # or a pid; empty: the only one
    endpoint: str = ""  # empty: on this host
    backend: str = ""
    conf: str = ""

    def __repr__(self) -> str:
        from tenax._core.text import concealed_repr

        return concealed_repr(self)


class Words(msgspec.Struct):
    """A command line, taken apart."""

    plain: list[str] = []
    switches: set[str] = set()
    values: dict[str, str] = {}


class AgentHere(msgspec.Struct, frozen=True):
    """An agent of this user on this host, as it says itself."""

    run_id: str = ""
    host: str = ""
    pid: int = 0
    role: str = ""
    entrypoint: str = ""
    phase: str = ""
    generation: int = 0
    workers: int = 0
    rank: int = -1
    is_coordinator: bool = False
    coordinator: str = ""  # where it is, for people; empty: here, and nowhere else
    log_dir: str = ""
    journal: str = ""
    # What we know ourselves.
    path: str = ""
    since: float = 0.0  # when it opened its door
    trouble: str = ""  # why it said nothing; what is known of it then is what it has noted before

    @property
    def which_run(self) -> tuple[str, str]:
        """The same for all agents of one run, although run ids may repeat."""
        from tenax._node.control_socket import which_run

        return which_run(self.run_id, self.pid, self.coordinator)

    @property
    def silence(self) -> str:
        """That it does not answer, in a sentence."""
        whose = f"the agent of the run {self.run_id!r} (pid {self.pid})" if self.run_id else f"the agent {self.pid}"
        return f"{whose} does not answer; {self.trouble}"


# --- the command line -------------------------------------------------------------------------------------------------


def read_words(argv: Sequence[str], *, switches: Iterable[str] = (), values: Iterable[str] = ()) -> Words:
    """Flags may stand anywhere. Those that say where a job is are known already. Raises ``UsageError``."""
    words = Words()
    known_switches, known_values = set(switches), {*values, *_PLACE_FLAGS}
    left = iter(argv)
    for word in left:
        if word == "--":
            words.plain += left
            break
        flag, equals, written = word.partition("=")
        flag = flag.replace("_", "-")
        if not word.startswith("-") or word == "-":
            words.plain.append(word)
        elif flag in known_switches and not equals:
            words.switches.add(flag)
        elif flag in known_values:
            value = written if equals else next(left, "")
            if not value:
                raise UsageError(f"{flag} needs a value")
            words.values[_PLACE_FLAGS.get(flag, flag)] = value
        elif flag in known_switches:
            raise UsageError(f"{flag} takes no value")
        else:
            raise UsageError(_unknown_flag(word, flag, {*known_switches, *known_values}))
    return words


def _unknown_flag(word: str, flag: str, known: set[str]) -> str:
    from tenax.cli.near_names import near_flag

    near = near_flag(flag, known)
    return f"there is no flag {word!r}" + (f"; did you mean {near!r}?" if near else "")


def wanted(words: Words, run_id: str = "") -> JobSelector:
    """Which job these words mean. Raises ``UsageError``."""
    values = words.values
    meant = JobSelector(run_id, values.get("endpoint", ""), values.get("backend", ""), values.get("conf", ""))
    if not meant.endpoint and (meant.backend or meant.conf):
        raise UsageError("--rdzv-backend and --rdzv-conf are for a run elsewhere; add --endpoint HOST:PORT")
    if meant.endpoint and not run_id:
        raise UsageError("at an endpoint the run must be named: add its id (--rdzv-id of 'tenax run')")
    return meant


def only_word(words: Words, what: str) -> str:
    """The one word that may stand there, or nothing. Raises ``UsageError``."""
    if len(words.plain) > 1:
        raise UsageError(f"one {what} at a time, not {len(words.plain)}")
    return words.plain[0] if words.plain else ""


def guarded(name: str, argv: Sequence[str], usage: str, command: Callable[[Sequence[str]], int]) -> int:
    """Do it; what is wrong becomes one sentence and an exit code: 2 for wrong usage, 1 for everything else."""
    from tenax._failures.exit_codes import FAILED, WRONG_USAGE
    from tenax._failures.plain_text import harmless
    from tenax.cli.run import print_page, tell

    if {"-h", "--help"}.intersection(argv):
        return print_page(usage)
    try:
        return command(argv)
    except UsageError as error:
        tell(f"tenax {name}: {harmless(str(error))}\ntry: tenax {name} --help")
        return WRONG_USAGE
    except (NoSuchJob, Declined) as error:
        tell(f"tenax {name}: {harmless(str(error))}")
    except OperatorError as error:
        tell(f"tenax {name}: the run did not answer: {harmless(str(error))}")
    return FAILED


# --- a job ------------------------------------------------------------------------------------------------------------


class Job:
    """A run that can be asked. ``agent`` is who is asked, if that is an agent on this host."""

    def __init__(self, run_id: str, line: OperatorLine, agent: AgentHere | None = None) -> None:
        self.run_id = run_id
        self.agent = agent
        self._line = line

    def ask(self, request: AnyRequest, kind: type[A], timeout_s: float = TIMEOUT_S) -> A:
        """The answer, of this type. Raises ``Declined`` (it was heard, and why not) and ``LineLost``."""
        return _typed(self.ask_raw(request, timeout_s), kind)

    def ask_raw(self, request: AnyRequest, timeout_s: float = TIMEOUT_S) -> msgspec.Raw:
        """The answer as JSON. Raises ``Declined`` and ``LineLost``."""
        return self._line.ask(request, timeout_s)

    def until_gone(self) -> None:
        """Wait until who is asked has ended: the agent here, or the coordinator's. Raises ``LineLost``."""
        from tenax._core.requests import AgentRequest

        self._line.until_closed(AgentRequest())

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._line.close()


def find_job(meant: JobSelector) -> Job:
    """The job that is meant, with a line to it. Raises ``UsageError`` and ``NoSuchJob``."""
    if meant.endpoint:
        return _job_at_endpoint(meant)
    agents = agents_here()
    mine = [agent for agent in agents if _is_meant(agent, meant.run_id)]
    runs = {agent.which_run for agent in mine}
    if not mine:
        raise NoSuchJob(_nothing_found(meant.run_id, agents))
    if len(runs) > 1:
        raise NoSuchJob(_several_found(meant.run_id, mine))
    return _job_of(mine)


def _is_meant(agent: AgentHere, run_id: str) -> bool:
    """Also one that does not answer: its run goes on."""
    return not run_id or run_id in (agent.run_id, str(agent.pid))


def _job_of(agents: list[AgentHere]) -> Job:
    """Through whichever agent has a way to the coordinator; that where it lives first."""
    from tenax._core.requests import StatusRequest

    why = ""
    silent = [agent for agent in agents if agent.trouble]
    for agent in sorted(agents, key=lambda each: (not each.is_coordinator, each.pid)):
        if agent.trouble:
            continue
        try:
            line = connect_to_agent(agent.path)
        except (OSError, OperatorError):
            why = why or "it has just ended"
            continue
        try:
            if len(agents) > 1:
                line.ask(StatusRequest(), TIMEOUT_S)
        except OperatorError as error:  # it looks for its coordinator, or has just ended: another may know more
            why = why or str(error)
            line.close()
            continue
        return Job(agent.run_id, line, agent)
    if silent:  # it may be the coordinator's, or the only one
        raise CannotBeAsked("; ".join(agent.silence for agent in silent[:_MAX_SILENT]))
    raise CannotBeAsked(f"the run {agents[0].run_id!r} cannot be asked: {why}")


def _typed(raw: msgspec.Raw, kind: type[A]) -> A:
    try:
        return msgspec.json.decode(raw, type=kind)
    except DECODE_ERRORS as error:
        raise LineLost(f"its answer is not ours ({error}); is that another version of tenax?") from error


# --- on this host -----------------------------------------------------------------------------------------------------


def agents_here(environ: Mapping[str, str] = os.environ) -> list[AgentHere]:
    """Every agent of this user on this host, the oldest first. What nobody listens at is removed. Raises ``NoSuchJob``
    if the folder is not ours alone."""
    from tenax._core.requests import AgentRequest
    from tenax._node.control_socket import doors_of

    lines: list[tuple[str, int, OperatorLine | OperatorError]] = []
    try:
        doors = doors_of(environ)
    except OSError as error:
        raise NoSuchJob(f"agents of this host cannot be looked for: {error.strerror or error}") from error
    for path in doors:
        try:
            line = connect_to_agent(path, _DOOR_S)
            lines.append((path, line.send(AgentRequest()), line))
        except (ConnectionRefusedError, FileNotFoundError):
            _remove(path)
        except OperatorError as error:
            lines.append((path, 0, error))
    # All were asked before the first answer is waited for.
    found = [_agent(path, number, line) for path, number, line in lines]
    return sorted((agent for agent in found if agent is not None), key=lambda agent: (agent.since, agent.pid))


def _agent(path: str, number: int, line: OperatorLine | OperatorError) -> AgentHere | None:
    """None: it has ended meanwhile."""
    name = os.path.basename(path).partition(".")[0].partition("-")[0]
    pid = int(name) if name.isdecimal() else 0
    try:
        since = os.stat(path).st_mtime
    except OSError:
        since = 0.0
    told, why = _told(number, line)
    if why is None:
        return msgspec.structs.replace(told, path=path, since=since, pid=told.pid or pid)
    is_late = isinstance(why.__cause__, TimeoutError)
    if not is_late and _is_left(path):
        return None
    told = _as_noted(path)
    trouble = _why_stopped(pid) or (f"nothing came within {_DOOR_S:g} s" if is_late else str(why))
    return msgspec.structs.replace(told, path=path, since=since, trouble=trouble, pid=told.pid or pid)


def _told(number: int, line: OperatorLine | OperatorError) -> tuple[AgentHere, OperatorError | None]:
    """What it says of itself, or why it does not."""
    if isinstance(line, OperatorError):
        return AgentHere(), line
    try:
        return _typed(line.answer(number, _DOOR_S), AgentHere), None
    except OperatorError as error:
        return AgentHere(), error
    finally:
        line.close()


def _is_left(path: str) -> bool:
    """Whether nobody is behind this door any more."""
    try:
        connect_to_agent(path, _DOOR_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        _remove(path)
        return True
    except OperatorError:
        return False
    return False


def _as_noted(door: str) -> AgentHere:
    """Of one that does not answer, what it has noted when it opened its door."""
    from tenax._node.control_socket import note_beside

    note = note_beside(door)
    if note is None:
        return AgentHere()
    return AgentHere(
        run_id=note.run_id,
        pid=note.pid,
        entrypoint=note.entrypoint,
        coordinator=note.coordinator,
        log_dir=note.log_dir,
    )


def _why_stopped(pid: int) -> str:
    """If it is: then it will not answer however often it is asked. Its workers may go on."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):  # no such process is seen from here, or the system does not tell
        return ""
    if state == _STOPPED:
        return f"it is stopped (Ctrl-Z, SIGSTOP or a debugger): kill -CONT {pid} lets it go on"
    return "a debugger has stopped it" if state == _TRACED else ""


def _remove(path: str) -> None:
    """Its agent was killed."""
    from contextlib import suppress

    with suppress(OSError):
        os.unlink(path)


def _nothing_found(run_id: str, agents: list[AgentHere]) -> str:
    from tenax.cli.ended_run import ended_run

    elsewhere = "if it runs elsewhere, add --endpoint HOST:PORT, where its nodes meet"
    if not run_id:
        return f"nothing of yours runs on this host; {elsewhere}, and its run id"
    if (ended := ended_run(run_id)) is not None:
        return f"the run {ended.run_id!r} is not running on this host any more; {_where_its_end_is(ended)}"
    there = f", only {_names(agents)}" if agents else ", nor any other of yours"
    return f"there is no run {run_id!r} on this host{there}; {elsewhere}"


def _where_its_end_is(ended: EndedRun) -> str:
    import shlex

    if ended.folders:
        return f"see how it ended: tenax report {shlex.join(ended.folders[:_MAX_SAID])}"
    return f"its logs were in {ended.noted[0]}, which is not there any more" if ended.noted else "it has kept no logs"


def _name(agent: AgentHere) -> str:
    name = repr(agent.run_id) if agent.run_id else f"pid {agent.pid}"
    return f"{name} (its agent, pid {agent.pid}, does not answer)" if agent.trouble else name


def _names(agents: list[AgentHere]) -> str:
    names = list(dict.fromkeys(map(_name, agents)))
    return ", ".join(names[:_MAX_SAID]) + (f" and {len(names) - _MAX_SAID} more" if len(names) > _MAX_SAID else "")


def _several_found(run_id: str, agents: list[AgentHere]) -> str:
    by_run: dict[tuple[str, str], AgentHere] = {}
    for agent in agents:
        by_run.setdefault(agent.which_run, agent)
    if run_id:
        pids = ", ".join(f"{agent.pid} ({os.path.basename(agent.entrypoint)})" for agent in by_run.values())
        return f"{len(by_run)} runs on this host are called {run_id!r}; name the pid of an agent instead: {pids}"
    return f"{len(by_run)} runs are on this host; say which: {_names(list(by_run.values()))}"


# --- at an endpoint ---------------------------------------------------------------------------------------------------


def _job_at_endpoint(meant: JobSelector) -> Job:
    from tenax.cli.arguments import parse
    from tenax.cli.options import ETCD_BACKENDS, MANY_NODES_BACKENDS
    from tenax.cli.run import tell
    from tenax.cli.world import rendezvous_parameters

    backend = meant.backend or "tcp"
    if backend not in MANY_NODES_BACKENDS:
        raise UsageError(f"--rdzv-backend is {backend!r}; a run can be asked through 'tcp' or 'etcd'")
    backend = "tcp" if backend == "static" else backend
    # As for a node of that run, but that nothing is started.
    flags = {"--rdzv-id": meant.run_id, "--rdzv-backend": backend, "--rdzv-endpoint": meant.endpoint}
    flags |= {"--rdzv-conf": meant.conf} if meant.conf else {}
    options = parse([f"{flag}={value}" for flag, value in flags.items()] + ["--nnodes=1:2", "operator"], {})
    for note in options.notes:
        tell(f"tenax: note: {note}")
    parameters = rendezvous_parameters(options)
    try:
        if backend in ETCD_BACKENDS:
            from tenax._engines.etcd.operator import line_through_etcd
            from tenax.rendezvous._etcd_handler import etcd_engine_settings

            return Job(meant.run_id, line_through_etcd(etcd_engine_settings(parameters)))
        from tenax.rendezvous._tcp_handler import tcp_settings

        settings = tcp_settings(parameters)
        tls = settings.tls.for_client() if settings.tls is not None else None
    except ValueError as error:
        raise UsageError(str(error).rstrip(".")) from error
    except AccessDenied as error:
        raise NoSuchJob(f"the coordinator of {meant.run_id!r} does not let us in: {error}") from error
    except Unreachable as error:
        raise NoSuchJob(f"the run {meant.run_id!r} cannot be asked: {error}") from error
    from tenax._io.endpoint import Endpoint

    endpoint = Endpoint.parse(settings.endpoint)
    secret = settings.secret
    if settings.uses_user_secret:
        from tenax._engines.secret import user_secret

        secret = user_secret(create=False)  # readable: the settings were checked
    try:
        line = connect_to_coordinator(
            _addresses(endpoint.host, endpoint.port), meant.run_id, secret, tls, endpoint.host
        )
    except AccessDenied as error:
        raise NoSuchJob(f"the coordinator at {endpoint} does not let us in: {error}") from error
    except Unreachable as error:
        raise NoSuchJob(f"there is no coordinator to ask at {endpoint}: {error}") from error
    return Job(meant.run_id, line)


def _addresses(host: str, port: int) -> list[Address]:
    import socket

    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise NoSuchJob(f"the name {host!r} cannot be looked up: {why}") from error
    return [(family, address) for family, _, _, _, address in found]
