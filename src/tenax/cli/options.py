"""Options: everything ``tenax run`` was asked to do, judged and frozen.

Decides which requests fit together. It takes converted values and where each came from, and answers with one
``Options`` or one ``UsageError``; it touches nothing. The principles:

1. What is written on the command line is either honoured or refused in one sentence, never ignored.
2. ``PET_*`` variables are defaults that a cluster sets for everybody: where the command line decides otherwise,
   they give way, and a note says so.
3. Whatever torchrun can do keeps working. A flag that one node has no use for, but that cannot mislead anybody
   (``--rdzv-backend c10d --rdzv-endpoint localhost:0``), is accepted in silence.

Where several nodes meet is decided in ``meeting``, which one node never needs.
"""

from __future__ import annotations

import msgspec

from tenax._core.bounds import MAX_NAME, MAX_NODES, MAX_SLOTS, name_problem
from tenax.cli.flags import BY_DEST, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from signal import Signals
    from typing import Any

# One node needs no rendezvous: these names (of torchrun, and of ours) all mean the same there.
_STANDALONE_BACKENDS = frozenset({"static", "c10d", "tcp", "local"})
ETCD_BACKENDS = frozenset({"etcd", "etcd-v2"})
ONE_NODE_BACKENDS = _STANDALONE_BACKENDS | ETCD_BACKENDS
MANY_NODES_BACKENDS = frozenset({"static", "c10d", "tcp"}) | ETCD_BACKENDS
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", ""})  # noqa: S104 - recognised, not bound
DEFAULT_SHUTDOWN_TIMEOUT_S = 30

# Keys of --rdzv-conf that torchrun's backends read, and ours.
_KNOWN_SETTINGS = frozenset(
    {
        *("timeout", "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "read_timeout"),
        *("keep_alive_interval", "keep_alive_max_attempt", "is_host", "store_type", "use_libuv", "rank"),
        *("protocol", "ssl_cert", "ssl_cert_key", "ca_cert", "etcd_prefix", "cacert", "cert", "key"),
        *("token", "token_file", "scale_up", "node_name", "node_order", "store_port", "use_agent_store"),
        "store_allow",
        *("user", "password", "password_file", "outage_timeout", "managed", "managed_only", "link_port", "link_tls"),
    }
)
_URLS = ("rdzv_endpoint", "trace", "metrics", "event_log_handler")  # may hold a user and a password
# What a handler is told besides: each has a flag of its own.
_NOT_SETTINGS = frozenset({"self", "backend", "endpoint", "run_id", "min_nodes", "max_nodes", "local_addr"})
# Flags that a script of its own hardly has, so that finding one behind the script is worth a note.
_OURS_FOR_SURE = ("nproc_per_node", "nnodes", "standalone", "max_restarts", "rdzv_backend", "rdzv_endpoint")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as it was asked for. Nothing in it has to be looked up again."""

    script: str
    script_args: tuple[str, ...]
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    start_method: str = "spawn"
    python: str = ""  # the interpreter for the workers; empty: the one that runs tenax
    compat: bool = False  # TorchElastic's import paths are ours in the workers
    preload: str = "auto"  # modules to import once for all workers; auto: those of the script
    local_rank_argument: bool = False  # the oldest scripts want --local-rank=N in front of their arguments

    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 1
    nproc_as_written: str = "1"
    max_restarts: int = 0
    fatal_exit_codes: tuple[int, ...] = ()
    fatal_errors: tuple[str, ...] = ()
    shutdown_timeout_s: int = DEFAULT_SHUTDOWN_TIMEOUT_S
    signals_to_handle: str = ""
    notice_signals: str = ""  # a scheduler's advance notice; empty: none
    notice_s: float | None = None  # how soon after it the node must leave; None: nobody knows
    monitor_interval_s: float = 0.1

    log_dir: str | None = None
    redirects: int | dict[int, int] = 0
    tee: int | dict[int, int] = 0
    local_ranks_filter: frozenset[int] = frozenset()  # empty: all
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    log_line_prefix_template: str | None = None
    logs_specs: str | None = None
    event_log_handler: str = "null"
    metrics: str = ""  # handlers of metrics, by name

    dashboard: str = ""  # where the page is served; empty: nowhere
    on_hang: str = "off"
    hang_after_s: float = 300.0
    trace: str = ""

    virtual_local_rank: bool = False
    numa_binding: str | None = None

    run_id: str = ""  # empty: a random one, which several nodes could not agree upon
    role: str = "default"
    rdzv_backend: str = "local"
    rdzv_endpoint: str = ""
    rdzv_configs: dict[str, Any] = {}
    local_addr: str | None = None

    dry_run: bool = False
    report: str = ""  # the file for the failure report; empty: none
    colour_allowed: bool = True  # on a terminal; whether there is one is not known here
    live_line_allowed: bool = True  # likewise
    notes: tuple[str, ...] = ()  # what the user should know although nothing is wrong

    def __repr__(self) -> str:
        from tenax._core.text import concealed_repr

        return concealed_repr(self)


def decide(
    script: str,
    script_args: tuple[str, ...],
    values: Mapping[str, Any],
    sources: Mapping[str, str],
    environ: Mapping[str, str],
) -> Options:
    """Judge what was written. Raises ``UsageError`` with one sentence."""
    asked = Asked(values, sources)
    _check_kind_of_script(asked)
    least, most = _nodes(asked)
    if most > 1:
        from tenax.cli.meeting import meeting_place_of_many

        backend, endpoint, configs = meeting_place_of_many(asked, least, most, _settings(asked), environ)
    else:
        backend, endpoint, configs = _meeting_place(asked)
    workers = _workers(asked, environ)
    redirects = _streams(asked, "redirects", workers)
    tee = _streams(asked, "tee", workers)
    shown = _ranks(asked, workers)
    _check_signals(asked, backend)
    fatal_exit_codes, fatal_errors = _fatal(asked)
    _note_what_has_no_effect(asked, script_args)
    return Options(
        script=script,
        script_args=script_args,
        module=values["module"],
        no_python=values["no_python"],
        run_path=values["run_path"],
        start_method=values["start_method"],
        compat=values.get("compat", False),
        preload=_preload(asked),
        python=environ.get("PYTHON_EXEC", ""),
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=workers,
        nproc_as_written=str(values["nproc_per_node"]),
        max_restarts=values["max_restarts"],
        fatal_exit_codes=fatal_exit_codes,
        fatal_errors=fatal_errors,
        shutdown_timeout_s=_shutdown_timeout(values["shutdown_timeout"], environ),
        signals_to_handle=values["signals_to_handle"],
        notice_signals=values["notice_signals"],
        notice_s=values["notice_seconds"],
        monitor_interval_s=values["monitor_interval"],
        log_dir=values["log_dir"] or None,
        redirects=redirects,
        tee=tee,
        local_ranks_filter=shown,
        duplicate_stdout_filters=tuple(values["duplicate_stdout_filters"]),
        duplicate_stderr_filters=tuple(values["duplicate_stderr_filters"]),
        log_line_prefix_template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or None,
        logs_specs=values["logs_specs"],
        event_log_handler=values["event_log_handler"],
        metrics=values.get("metrics") or "",
        dashboard=_dashboard(asked),
        on_hang=values.get("on_hang") or "off",
        hang_after_s=values.get("hang_after") or 300.0,
        trace=_trace(asked),
        virtual_local_rank=values["virtual_local_rank"],
        numa_binding=values["numa_binding"],
        run_id="" if values["rdzv_id"] == "none" and most == 1 else values["rdzv_id"],
        role=_name("--role", values["role"]),
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs=configs,
        local_addr=values["local_addr"],
        dry_run=values.get("dry_run", False),
        report=values.get("report") or "",
        colour_allowed=not environ.get("NO_COLOR") and environ.get("TERM") != "dumb",
        live_line_allowed=environ.get("TERM") != "dumb",  # which cannot erase a line
        notes=tuple(asked.notes),
    )


class Asked:
    """The values, with the words to speak about them."""

    def __init__(self, values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        self.values = values
        self.sources = sources
        self.notes: list[str] = []

    def __getitem__(self, dest: str) -> Any:
        return self.values[dest]

    def given(self, dest: str) -> bool:
        return dest in self.sources

    def typed(self, dest: str) -> bool:
        """Whether it stands on the command line."""
        return dest in self.sources and not self.from_environment(dest)

    def from_environment(self, dest: str) -> bool:
        return self.sources.get(dest, "").startswith("PET_")

    def name(self, dest: str) -> str:
        return self.sources.get(dest, BY_DEST[dest].name)

    def words(self, dest: str) -> str:
        """The request as the user wrote it: '--nnodes 2', 'PET_NNODES=2', '--standalone'."""
        name, value = self.name(dest), self.values[dest]
        if isinstance(value, str) and dest in _URLS:
            from tenax._core.text import hide_passwords

            value = hide_passwords(value)
        if isinstance(value, float):
            value = f"{value:g}"
        if self.from_environment(dest):
            return f"{name}={int(value) if isinstance(value, bool) else value}"
        return name if isinstance(value, bool) else f"{name} {value}"

    def settle(self, winner: str, loser: str, refusal: str) -> None:
        """Two requests that do not fit. A variable gives way to the command line; everything else is refused."""
        if not (self.from_environment(loser) and self.typed(winner)):
            raise UsageError(refusal)
        self.note_unused(loser, winner)

    def note_unused(self, loser: str, winner: str) -> None:
        self.notes.append(f"{self.words(loser)} is not used, because of {self.words(winner)}")


def _check_kind_of_script(asked: Asked) -> None:
    """A script, a module, a program, or a script run inside: only one of them."""
    kinds = [dest for dest in ("module", "no_python", "run_path") if asked[dest]]
    if len(kinds) > 1:
        first, second = (asked.words(dest) for dest in kinds[:2])
        raise UsageError(
            f"{first} and {second} say two different things about how to start the script; drop one of them"
        )


def _nodes(asked: Asked) -> tuple[int, int]:
    """How many nodes, at least and at most."""
    least, most = _least_and_most(asked)
    if most > 1 and asked["standalone"]:
        if asked.typed("nnodes") and not asked.typed("standalone"):
            asked.note_unused("standalone", "nnodes")
        else:
            asked.settle(
                "standalone",
                "nnodes",
                f"{asked.words('standalone')} means this machine alone, but {asked.words('nnodes')} asks for more; "
                "drop one of them",
            )
            least = most = 1
    if most == 1 and asked["node_rank"] != 0:
        asked.settle(
            "standalone" if asked["standalone"] else "nnodes",
            "node_rank",
            f"{asked.words('node_rank')} is not a node of this job, which has one node, number 0; leave it out",
        )
    return least, most


def _least_and_most(asked: Asked) -> tuple[int, int]:
    text = asked["nnodes"]
    least, colon, most = text.partition(":")
    try:
        smallest = int(least)
        biggest = int(most) if colon else smallest
    except ValueError:
        smallest = biggest = 0
    if not 1 <= smallest <= biggest:
        raise UsageError(f"{asked.name('nnodes')} takes N, or MIN:MAX with 1 <= MIN <= MAX, not {text!r}")
    if biggest > MAX_NODES:
        raise UsageError(f"{asked.name('nnodes')} takes at most {MAX_NODES} nodes, not {text!r}")
    return smallest, biggest


def _meeting_place(asked: Asked) -> tuple[str, str, dict[str, Any]]:
    """Backend, endpoint and settings of the rendezvous: where the workers of the one node meet."""
    backend, endpoint = asked["rdzv_backend"], asked["rdzv_endpoint"]
    if not backend:
        raise UsageError(f"{asked.name('rdzv_backend')} needs a name, such as 'c10d' or 'static'")
    configs = _settings(asked)
    if backend in ONE_NODE_BACKENDS - ETCD_BACKENDS and configs.get("store_type") != "file":
        check_endpoint(asked)
    if asked["standalone"]:
        _check_standalone_rendezvous(asked)
        backend, endpoint = "static", ""
    elif backend != "static" and not _prefers_master(asked):
        if backend not in ETCD_BACKENDS:
            return backend, endpoint, configs
        if asked.typed("rdzv_backend"):
            asked.notes.append(f"{asked.words('rdzv_backend')} is not asked: one node has nobody to find")
        return "local", "", configs
    if endpoint and asked.from_environment("rdzv_endpoint") and types_master(asked):
        asked.note_unused("rdzv_endpoint", types_master(asked))
        endpoint = ""
    if endpoint:
        _check_two_places(asked, endpoint)
        host, port = split_endpoint(endpoint)
    elif _names_master(asked):
        host, port = asked["master_addr"], str(asked["master_port"] or 0)
    else:
        return "local", "", configs
    configs["rank"] = 0
    return "static", f"[{host}]:{port or 0}" if ":" in host else f"{host}:{port or 0}", configs


def _check_standalone_rendezvous(asked: Asked) -> None:
    if asked.given("rdzv_endpoint") and split_endpoint(asked["rdzv_endpoint"])[0].lower() not in _LOOPBACK:
        asked.settle(
            "standalone",
            "rdzv_endpoint",
            f"{asked.words('standalone')} means this machine alone, but {asked.words('rdzv_endpoint')} names "
            "another; drop one of them",
        )
    if asked["rdzv_backend"] not in _STANDALONE_BACKENDS:
        asked.settle(
            "standalone",
            "rdzv_backend",
            f"{asked.words('standalone')} needs no rendezvous, but {asked.words('rdzv_backend')} names one; "
            "drop one of them",
        )


def _prefers_master(asked: Asked) -> bool:
    """Whether --master-addr and --master-port decide although another backend than static is named."""
    for dest in ("master_addr", "master_port"):
        if not asked.given(dest):
            continue
        if asked.typed(dest) and asked.typed("rdzv_backend"):
            raise UsageError(
                f"{asked.words(dest)} is for the static rendezvous, but {asked.words('rdzv_backend')} names another; "
                "drop one of them"
            )
        if asked.typed(dest):
            asked.note_unused("rdzv_backend", dest)
            return True
        asked.note_unused(dest, "rdzv_backend")
    return False


def types_master(asked: Asked) -> str:
    """The flag on the command line that names the master, if one does."""
    return next((dest for dest in ("master_port", "master_addr") if asked.typed(dest)), "")


def _names_master(asked: Asked) -> bool:
    """Whether --master-addr or --master-port says where this node's workers meet."""
    given = [dest for dest in ("master_addr", "master_port") if asked.given(dest)]
    if types_master(asked):
        return True
    # A cluster's variables speak of a job of many nodes; here this node is a job of its own, and may not be theirs.
    if asked["standalone"] or asked["node_rank"] != 0:
        why = "standalone" if asked["standalone"] else "nnodes"
        for dest in given:
            asked.note_unused(dest, why)
        return False
    return bool(given)


def _check_two_places(asked: Asked, endpoint: str) -> None:
    """An endpoint and a master that disagree."""
    host, port = split_endpoint(endpoint)
    for dest, same in (
        ("master_addr", asked["master_addr"] == host),
        ("master_port", str(asked["master_port"]) == port),
    ):
        if asked.given(dest) and not same:
            asked.settle(
                "rdzv_endpoint",
                dest,
                f"{asked.words('rdzv_endpoint')} and {asked.words(dest)} name two different meeting places; "
                "drop one of them",
            )


def check_endpoint(asked: Asked) -> None:
    text = asked["rdzv_endpoint"]
    host, port = split_endpoint(text)
    if text and (not is_host(host) or (port and not (port.isdecimal() and int(port) < 65536))):
        raise UsageError(f"{asked.name('rdzv_endpoint')} takes HOST or HOST:PORT with a port below 65536, not {text!r}")


def is_host(host: str) -> bool:
    """Whether it looks like a name or an address. What has colons is an IPv6 address, or nothing."""
    if ":" in host:
        return host.count(":") > 1 and set(host.partition("%")[0].lower()) <= set("0123456789abcdef:.")
    return host.replace("-", "").replace(".", "").replace("_", "").isalnum()


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Host and port as text; the port may be missing, and a bare or bracketed IPv6 address is a host."""
    endpoint = endpoint.strip()
    if endpoint.startswith("["):
        host, _, rest = endpoint[1:].partition("]")
        return host, rest[1:] if rest.startswith(":") else rest
    if endpoint.count(":") > 1:
        return endpoint, ""
    host, _, port = endpoint.partition(":")
    return host, port


def _settings(asked: Asked) -> dict[str, Any]:
    """--rdzv-conf, taken apart. The value of a secret is never repeated."""
    settings: dict[str, Any] = {}
    text, name = asked["rdzv_conf"].strip(), asked.name("rdzv_conf")
    for pair in text.split(",") if text else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (key and equals and value):
            shown = "a part that is not" if "token" in text or "password" in text else repr(pair)
            raise UsageError(f"{name} takes 'key=value,key=value', but it contains {shown}")
        if key in _NOT_SETTINGS:
            raise UsageError(f"{name} sets {key!r}, which is no setting of a backend; it has a flag of its own")
        settings[key] = value
    if asked["rdzv_backend"] in ONE_NODE_BACKENDS:
        unknown = ", ".join(repr(key) for key in settings if key not in _KNOWN_SETTINGS)
        if unknown:
            asked.notes.append(f"unknown {name} key {unknown}, which has no effect")
    for secret, variable in (("token", "TENAX_RDZV_TOKEN"), ("password", "TENAX_ETCD_PASSWORD")):
        if secret in settings and asked.typed("rdzv_conf"):
            raise UsageError(
                f"every user of this host can read the {secret} of {name} in the process list; write it to a file that "
                f"only you can read and pass '{name} {secret}_file=FILE', or set the variable {variable}"
            )
    return settings


def _name(what: str, name: str) -> str:
    """Return a name that other nodes accept. Raises UsageError."""
    if problem := name_problem(name):
        raise UsageError(f"{what} {name[:MAX_NAME]!r} cannot be used: {problem}")
    return name


def _workers(asked: Asked, environ: Mapping[str, str]) -> int:
    """How many workers --nproc-per-node means on this machine."""
    text = str(asked["nproc_per_node"]).strip()
    if text.isdecimal():
        count = int(text)
    elif text[:1] in ("-", "+") or not text:
        count = 0
    else:
        from tenax._processes.devices import parse_nproc

        try:
            count = parse_nproc(text, environ)
        except ValueError as error:
            raise UsageError(str(error).rstrip(".")) from error  # it names the flag itself
    if count < 1:
        raise UsageError(
            f"{asked.name('nproc_per_node')} takes a number of at least 1, 'auto', 'cpu' or 'gpu', not {text!r}"
        )
    if count > MAX_SLOTS:
        raise UsageError(f"{asked.name('nproc_per_node')} takes at most {MAX_SLOTS} workers, not {text!r}")
    return count


def _streams(asked: Asked, dest: str, workers: int) -> int | dict[int, int]:
    """Which streams of which local ranks: one digit for all, or a map."""
    text = asked[dest].strip()
    if text in ("0", "1", "2", "3"):
        return int(text)
    chosen: dict[int, int] = {}
    for pair in text.split(","):
        rank, _, streams = (part.strip() for part in pair.partition(":"))
        if not rank.isdecimal() or streams not in ("0", "1", "2", "3"):
            raise UsageError(
                f"{asked.name(dest)} takes 0 (none), 1 (stdout), 2 (stderr), 3 (both), or a map of local ranks such as "
                f"'0:1,1:3', not {text!r}"
            )
        _check_rank(asked, dest, int(rank), workers)
        chosen[int(rank)] = int(streams)
    return chosen


def _ranks(asked: Asked, workers: int) -> frozenset[int]:
    text = asked["local_ranks_filter"].strip()
    if not text:
        return frozenset()
    ranks = [word.strip() for word in text.split(",")]
    if not all(rank.isdecimal() for rank in ranks):
        raise UsageError(f"{asked.name('local_ranks_filter')} takes local ranks such as '0' or '0,1,2', not {text!r}")
    for rank in ranks:
        _check_rank(asked, "local_ranks_filter", int(rank), workers)
    return frozenset(map(int, ranks))


def _check_rank(asked: Asked, dest: str, rank: int, workers: int) -> None:
    if rank >= workers:
        there_are = (
            "there is one worker, number 0" if workers == 1 else f"there are {workers} workers, 0 to {workers - 1}"
        )
        raise UsageError(f"{asked.words(dest)} names local rank {rank}, but {there_are}")


def _check_signals(asked: Asked, backend: str) -> None:
    if not asked.given("signals_to_handle") and not asked["notice_signals"]:
        return
    stopping, announcing = (_signals(asked, dest) for dest in ("signals_to_handle", "notice_signals"))
    both = next((number.name for number in announcing if number in stopping), "")
    if both:
        raise UsageError(
            f"{both} is in {asked.name('notice_signals')} and in {asked.name('signals_to_handle')}, but a signal "
            "either announces that this machine will be taken or stops the job; take it out of one of them"
        )
    if announcing and backend not in ONE_NODE_BACKENDS:
        raise UsageError(
            f"{asked.words('notice_signals')} needs a rendezvous of tenax to pass the notice on, but "
            f"{asked.words('rdzv_backend')} names another; drop one of them"
        )


def _signals(asked: Asked, dest: str) -> list[Signals]:
    from tenax._node.signals import parse_signals

    try:
        return parse_signals(asked[dest])
    except ValueError as error:
        raise UsageError(f"{asked.name(dest)}: {error}") from error


def _fatal(asked: Asked) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """After which exit codes and exceptions a restart is useless."""
    codes, errors = (
        [word.strip() for word in asked[dest].split(",") if word.strip()]
        for dest in ("fatal_exit_codes", "fatal_errors")
    )
    if not all(code.isdecimal() and 1 <= int(code) <= 255 for code in codes):
        raise UsageError(
            f"{asked.name('fatal_exit_codes')} takes exit codes from 1 to 255 such as '2,64', "
            f"not {asked['fatal_exit_codes']!r}"
        )
    if not all(part.isidentifier() for error in errors for part in error.split(".")):
        raise UsageError(
            f"{asked.name('fatal_errors')} takes names of exceptions such as 'ValueError,ConfigError', "
            f"not {asked['fatal_errors']!r}"
        )
    return tuple(dict.fromkeys(map(int, codes))), tuple(dict.fromkeys(errors))


def _shutdown_timeout(given: int | None, environ: Mapping[str, str]) -> int:
    if given is not None:
        return given
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    if not text:
        return DEFAULT_SHUTDOWN_TIMEOUT_S
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise UsageError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT takes a whole number of seconds of at least 0, not {text!r}")
    return value


def _note_what_has_no_effect(asked: Asked, script_args: tuple[str, ...]) -> None:
    if asked.typed("monitor_interval"):
        asked.notes.append(
            f"{asked.words('monitor_interval')} has no effect: tenax hears of a worker's end from the kernel at once"
        )
    if asked.typed("start_method") and asked["start_method"] != "spawn" and not asked["run_path"]:
        asked.notes.append(
            f"{asked.words('start_method')} has no effect: each worker is a new interpreter (it is for --run-path)"
        )
    for dest in ("fatal_exit_codes", "fatal_errors"):
        if asked.typed(dest) and asked["max_restarts"] == 0:
            asked.notes.append(f"{asked.words(dest)} has no effect: no restarts are allowed (--max-restarts)")
    if asked.typed("notice_seconds") and not asked["notice_signals"]:
        asked.notes.append(f"{asked.words('notice_seconds')} has no effect without --notice-signals")
    for dest, stream in (("duplicate_stdout_filters", "1"), ("duplicate_stderr_filters", "2")):
        if asked.typed(dest) and asked["tee"] == "0" and asked["logs_specs"] is None:
            asked.notes.append(f"{asked.name(dest)} has no effect: only teed lines are copied (--tee {stream})")
    for dest in _OURS_FOR_SURE:
        flag = BY_DEST[dest]
        if asked.typed(dest):
            continue
        for word in script_args:
            if word.partition("=")[0] in flag.spellings:
                asked.notes.append(f"{word!r} stands behind the script, so it goes to the script and not to tenax")
                break


def _dashboard(asked: Asked) -> str:
    """As HOST:PORT. A parser of others, for torchrun's flags, has none of these."""
    text = (asked.values.get("dashboard") or "").strip()
    if not text:
        return ""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{asked.words('dashboard')} names no port; write --dashboard 8080, or --dashboard HOST:8080")
    return f"{host or '127.0.0.1'}:{int(port)}"


def _trace(asked: Asked) -> str:
    text = (asked.values.get("trace") or "").strip()
    if text and text.partition(":")[0] != "otel":
        raise UsageError(f"{asked.words('trace')} names no handler of traces; write --trace otel, or --trace otel:URL")
    return text


def _preload(asked: Asked) -> str:
    """Only a script that an interpreter of its own runs can be forked from one."""
    text = asked.values.get("preload", "none").strip()  # a parser of others, for torchrun's flags, has none
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(
                f"{asked.words('preload')} is not a list of modules; write for example --preload torch,numpy, or "
                "--preload auto, or --preload none"
            )
    if "none" in names and len(names) > 1:
        raise UsageError(f"{asked.words('preload')} asks for modules and for none; write one or the other")
    for flag in ("no_python", "run_path"):
        if asked[flag]:
            if asked.typed("preload") and names != ["none"]:
                raise UsageError(
                    f"{asked.words('preload')} and {asked.words(flag)} do not fit together: only what an interpreter "
                    "of its own runs can be forked from one"
                )
            return "none"
    return ",".join(names) or "none"
