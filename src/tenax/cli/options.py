"""The checked options of ``tenax run``: the description of a job, made from the flags.

Decides which flags can be combined. Takes converted values and their sources, and returns ``Options`` or raises
``UsageError``. Does no I/O.

1. A flag on the command line is either applied or rejected with a message, never ignored.
2. ``PET_*`` variables are defaults that a cluster sets for all its jobs: the command line overrides them, with a note.
3. Every torchrun command line keeps working. A flag without meaning on one node that cannot mislead
   (``--rdzv-backend c10d --rdzv-endpoint localhost:0``) is accepted silently.

``rendezvous_options`` decides the rendezvous of several nodes. A run of one node does not import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tenax._core.bounds import MAX_NAME, MAX_NODES, MAX_SLOTS, name_problem
from tenax._node.job import DEFAULT_SHUTDOWN_TIMEOUT_S, JobSpec, abandon_s_from
from tenax.cli.flags import BY_DEST, UsageError, convert, suggestion, usage_errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.numa.binding import NumaOptions
    from tenax.scheduler import Allocation

# One node needs no rendezvous, so these names of torchrun and tenax all mean the same there.
_STANDALONE_BACKENDS = frozenset({"static", "c10d", "tcp", "local"})
ETCD_BACKENDS = frozenset({"etcd", "etcd-v2"})
ONE_NODE_BACKENDS = _STANDALONE_BACKENDS | ETCD_BACKENDS
MANY_NODES_BACKENDS = frozenset({"static", "c10d", "tcp"}) | ETCD_BACKENDS
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", ""})  # noqa: S104 - recognised, not bound

# Keys of --rdzv-conf that the backends of torchrun and tenax read.
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
# Other parameters of a rendezvous handler, each with a flag of its own.
_NOT_SETTINGS = frozenset({"self", "backend", "endpoint", "run_id", "min_nodes", "max_nodes", "local_addr"})
# Flags that a script is unlikely to have itself: one of these after the script is probably a mistake.
_UNLIKELY_IN_SCRIPTS = ("nproc_per_node", "nnodes", "standalone", "max_restarts", "rdzv_backend", "rdzv_endpoint")


class Options(JobSpec, frozen=True, kw_only=True):
    """A job as written on the command line, with the names of its plug-ins. ``cli.run.resolve`` loads them."""

    script: str
    script_args: tuple[str, ...]
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    python: str = ""  # interpreter of the workers; empty: the one that runs tenax
    compat: bool = False  # redirect TorchElastic's import paths to tenax in the workers
    local_rank_argument: bool = False  # pass --local-rank=N before the script's arguments, for very old scripts
    nproc_as_written: str = "1"
    fatal_exit_codes: tuple[int, ...] = ()
    fatal_errors: tuple[str, ...] = ()
    policy_name: str | None = None  # None: the default policy

    log_dir: str | None = None
    redirects: int | dict[int, int] = 0
    tee: int | dict[int, int] = 0
    local_ranks_filter: frozenset[int] = frozenset()  # empty: all
    logs_specs_name: str | None = None  # None: the default

    dry_run: bool = False
    report: str = ""  # the file for the failure report; empty: none
    notes: tuple[str, ...] = ()  # remarks for the user

    __repr__ = JobSpec.__repr__


@usage_errors()
def decide(flags: FlagValues, environ: Mapping[str, str], allocation: Allocation | None = None) -> Options:
    """Check the flags and return the options. Raises ``UsageError``.

    A flag without a decision below is copied to the field of its name.
    """
    kinds = [dest for dest in ("module", "no_python", "run_path") if flags[dest]]
    if len(kinds) > 1:
        raise UsageError(flags.conflict(*kinds[:2]))
    least, most = node_range(flags)
    if most > 1:
        from tenax.cli.rendezvous_options import many_node_rendezvous

        backend, endpoint, configs = many_node_rendezvous(flags, least, most, _settings(flags), environ)
        if allocation is not None:
            from tenax.cli.scheduled_run import add_settings

            configs = add_settings(flags, allocation, configs, environ)
    else:
        backend, endpoint, configs = _one_node_rendezvous(flags)
    workers = _workers(flags, environ)
    grace_s = flags["shutdown_timeout"]
    if grace_s is None:
        text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or str(DEFAULT_SHUTDOWN_TIMEOUT_S)
        grace_s = convert(BY_DEST["shutdown_timeout"], text, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    policy_name = None if flags["restart_policy"] in ("", "budget") else flags["restart_policy"]
    fatal_exit_codes, fatal_errors = _fatal(flags, policy_name)
    decided = dict(
        preload=_preload(flags),
        python=environ.get("PYTHON_EXEC", ""),
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=workers,
        nproc_as_written=str(flags["nproc_per_node"]),
        fatal_exit_codes=fatal_exit_codes,
        fatal_errors=fatal_errors,
        policy_name=policy_name,
        restart_policy=None,
        shutdown_timeout=grace_s,
        abandon_s=abandon_s_from(environ),
        notice_s=flags["notice_seconds"],
        log_dir=flags["log_dir"] or None,
        numa_options=_numa_options(flags["numa_binding"]),
        logs_specs_name=flags["logs_specs"],
        logs_specs=None,
        redirects=_streams(flags, "redirects", workers),
        tee=_streams(flags, "tee", workers),
        local_ranks_filter=_ranks(flags, workers),
        duplicate_stdout_filters=tuple(flags["duplicate_stdout_filters"]),
        duplicate_stderr_filters=tuple(flags["duplicate_stderr_filters"]),
        log_line_prefix_template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or None,
        dashboard=_dashboard(flags),
        trace=_trace(flags),
        run_id="" if flags["rdzv_id"] == "none" and most == 1 else flags["rdzv_id"],
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs=configs,
        live_line=environ.get("TERM") != "dumb",  # a dumb terminal cannot erase a line
        allocation=allocation,
        colours=environ.get("TERM") != "dumb" and not environ.get("NO_COLOR"),
    )
    if problem := name_problem(flags["role"]):  # other nodes would reject it
        raise UsageError(f"invalid --role {flags['role'][:MAX_NAME]!r}: {problem}")
    _check_signals(flags, backend)
    if backend not in ONE_NODE_BACKENDS:  # an agent that polls a third-party rendezvous does not have these
        for dest in ("dashboard", "on_hang", "trace", "preload", "standby_setup", "report"):
            if flags[dest] not in (None, "", "off", "none"):
                flags.drop(dest, "rdzv_backend", why=f"{flags.name(dest)} is for tenax's own backends")
    _check_standby_setup(flags, decided["preload"], can_restart=most > 1 or flags["max_restarts"] > 0)
    _note_unused_flags(flags)
    if allocation is not None:
        from tenax.cli.scheduled_run import notes

        flags.notes += notes(flags, allocation, workers)
    known = Options.__struct_fields__
    copied = {dest: value for dest, value in flags.values.items() if dest in known and value is not None}
    copied.update(decided, script=flags.script, script_args=flags.script_args, notes=tuple(flags.notes))
    return Options(**copied)


class FlagValues(msgspec.Struct):
    """A parsed command line, and the notes collected while it is checked."""

    script: str
    script_args: tuple[str, ...]
    values: dict[str, Any]  # of every flag, by dest, converted
    sources: dict[str, str]  # flags that were given: dest -> spelling, such as "--tee" or "PET_TEE"
    notes: list[str] = []

    def __getitem__(self, dest: str) -> Any:
        return self.values[dest]

    def given(self, dest: str) -> bool:
        return dest in self.sources

    def typed(self, dest: str) -> bool:
        """Return True if the flag was given on the command line."""
        return self.given(dest) and not self.from_environment(dest)

    def from_environment(self, dest: str) -> bool:
        """Return True if a ``PET_*`` variable or the scheduler gave it."""
        return not self.sources.get(dest, "-").startswith("-")

    def name(self, dest: str) -> str:
        return self.sources.get(dest, BY_DEST[dest].name)

    def quote(self, dest: str) -> str:
        """Return flag and value as the user wrote them: '--nnodes 2', 'PET_NNODES=2', '--standalone'."""
        name, value = self.name(dest), self.values[dest]
        if isinstance(value, str) and dest in _URLS:
            from tenax._core.text import hide_passwords

            value = hide_passwords(value)
        if isinstance(value, float):
            value = f"{value:g}"
        if self.from_environment(dest):
            return f"{name}={int(value) if isinstance(value, bool) else value}"
        return name if isinstance(value, bool) else f"{name} {value}"

    def conflict(self, one: str, other: str, why: str = "", advice: str = "remove one of them") -> str:
        """Return the message that two flags cannot be combined."""
        return f"{self.quote(one)} and {self.quote(other)} cannot be combined{f': {why}' if why else ''}; {advice}"

    def invalid(self, dest: str, expected: str, text: str) -> UsageError:
        return UsageError(f"{self.name(dest)} takes {expected}, not {text!r}")

    def settle(self, winner: str, loser: str, refusal: str = "", why: str = "") -> None:
        """Resolve a conflict: the command line overrides a variable; otherwise raise ``UsageError``."""
        if not (self.from_environment(loser) and self.typed(winner)):
            raise UsageError(refusal or self.conflict(winner, loser, why))
        self.note_unused(loser, winner)

    def drop(self, loser: str, winner: str, refusal: str = "", why: str = "") -> None:
        """Ignore a flag that another one rules out, with a note. On the command line it is an error."""
        if self.typed(loser):
            raise UsageError(refusal or self.conflict(loser, winner, why))
        if self.given(loser):
            self.note_unused(loser, winner)

    def note_unused(self, loser: str, winner: str) -> None:
        self.notes.append(f"{self.quote(loser)} is ignored because of {self.quote(winner)}")

    def typed_master(self) -> str:
        """Return --master-port or --master-addr, whichever is on the command line; empty if neither is."""
        return next((dest for dest in ("master_port", "master_addr") if self.typed(dest)), "")

    def overrides_endpoint(self) -> bool:
        """Return True if --master-addr or --master-port on the command line overrides the endpoint of a variable."""
        master = self.typed_master() if self.from_environment("rdzv_endpoint") else ""
        if master:
            self.note_unused("rdzv_endpoint", master)
        return bool(master)

    def other_addresses(self) -> list[tuple[str, str]]:
        """Return --master-addr and --master-port if they differ from the endpoint, each with a message."""
        return [
            (dest, f"{self.quote('rdzv_endpoint')} and {self.quote(dest)} are different addresses; remove one of them")
            for dest, own in zip(("master_addr", "master_port"), split_endpoint(self["rdzv_endpoint"]), strict=True)
            if self.given(dest) and str(self[dest]) != own
        ]

    def check_endpoint(self) -> None:
        text = self["rdzv_endpoint"]
        host, port = split_endpoint(text)
        if text and (not is_host(host) or (port and not (port.isdecimal() and int(port) < 65536))):
            raise self.invalid("rdzv_endpoint", "HOST or HOST:PORT with a port below 65536", text)


def node_range(flags: FlagValues) -> tuple[int, int]:
    text = flags["nnodes"]
    first, colon, second = text.partition(":")
    try:
        least, most = int(first), int(second if colon else first)
    except ValueError:
        least = most = 0
    if not 1 <= least <= most:
        raise flags.invalid("nnodes", "N, or MIN:MAX with 1 <= MIN <= MAX", text)
    if most > MAX_NODES:
        raise flags.invalid("nnodes", f"at most {MAX_NODES} nodes", text)
    if most > 1 and flags["standalone"]:
        if flags.typed("nnodes") and not flags.typed("standalone"):
            flags.note_unused("standalone", "nnodes")
        else:
            flags.settle("standalone", "nnodes")
            least = most = 1
    if most == 1 and flags["node_rank"] != 0:
        refusal = f"{flags.quote('node_rank')} is out of range: the job has one node, with rank 0; remove it"
        flags.settle("standalone" if flags["standalone"] else "nnodes", "node_rank", refusal)
    return least, most


def _one_node_rendezvous(flags: FlagValues) -> tuple[str, str, dict[str, Any]]:
    """Return the backend, endpoint and settings of the rendezvous of a single node."""
    backend, endpoint = flags["rdzv_backend"], flags["rdzv_endpoint"]
    if not backend:
        raise UsageError(f"{flags.name('rdzv_backend')} needs a name, such as 'c10d' or 'static'")
    configs = _settings(flags)
    if backend in ONE_NODE_BACKENDS - ETCD_BACKENDS and configs.get("store_type") != "file":
        flags.check_endpoint()
    if flags["standalone"]:
        if flags.given("rdzv_endpoint") and split_endpoint(endpoint)[0].lower() not in _LOOPBACK:
            flags.settle("standalone", "rdzv_endpoint", why="the endpoint is another host")
        if backend not in _STANDALONE_BACKENDS:
            flags.settle("standalone", "rdzv_backend", why="one node needs no rendezvous")
        backend, endpoint = "static", ""
    elif backend != "static" and not _prefers_master(flags):
        if backend not in ETCD_BACKENDS:
            return backend, endpoint, configs
        if flags.typed("rdzv_backend"):
            flags.notes.append(f"{flags.quote('rdzv_backend')} is not used: one node needs no rendezvous")
        return "local", "", configs
    if endpoint and not flags.overrides_endpoint():
        for dest, refusal in flags.other_addresses():
            flags.settle("rdzv_endpoint", dest, refusal)
        host, port = split_endpoint(endpoint)
    elif _names_master(flags):
        host, port = flags["master_addr"], str(flags["master_port"] or 0)
    else:
        return "local", "", configs
    configs["rank"] = 0
    return "static", f"[{host}]:{port or 0}" if ":" in host else f"{host}:{port or 0}", configs


def _prefers_master(flags: FlagValues) -> bool:
    """Return True if --master-addr or --master-port overrides a backend other than static."""
    for dest in ("master_addr", "master_port"):
        if not flags.given(dest):
            continue
        if flags.typed(dest) and flags.typed("rdzv_backend"):
            raise UsageError(flags.conflict(dest, "rdzv_backend", f"{flags.name(dest)} is for the static backend"))
        if flags.typed(dest):
            flags.note_unused("rdzv_backend", dest)
            return True
        flags.note_unused(dest, "rdzv_backend")
    return False


def _names_master(flags: FlagValues) -> bool:
    """Return True if --master-addr or --master-port sets the rendezvous address of this node's workers."""
    given = [dest for dest in ("master_addr", "master_port") if flags.given(dest)]
    # A cluster's variables describe a job of several nodes. This node runs a job of its own and may not be the master.
    if not flags.typed_master() and (flags["standalone"] or flags["node_rank"] != 0):
        for dest in given:
            flags.note_unused(dest, "standalone" if flags["standalone"] else "nnodes")
        return False
    return bool(given)


def is_host(host: str) -> bool:
    """Return True if the text looks like a host name or an address. Only IPv6 addresses contain colons."""
    if ":" in host:
        return host.count(":") > 1 and set(host.partition("%")[0].lower()) <= set("0123456789abcdef:.")
    return host.replace("-", "").replace(".", "").replace("_", "").isalnum()


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Return host and port as text. The port may be missing; an IPv6 address may be bare or in brackets."""
    endpoint = endpoint.strip()
    if endpoint.startswith("["):
        host, _, rest = endpoint[1:].partition("]")
        return host, rest[1:] if rest.startswith(":") else rest
    if endpoint.count(":") > 1:
        return endpoint, ""
    host, _, port = endpoint.partition(":")
    return host, port


def _settings(flags: FlagValues) -> dict[str, Any]:
    """Parse --rdzv-conf. Messages never contain the value of a secret."""
    settings: dict[str, Any] = {}
    text, name = flags["rdzv_conf"].strip(), flags.name("rdzv_conf")
    for pair in text.split(",") if text else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (key and equals and value):
            has_secret = "token" in text or "password" in text
            raise UsageError(
                f"{name} takes 'key=value,key=value'" + ("; a part is not" if has_secret else f", not {pair!r}")
            )
        if key in _NOT_SETTINGS:
            raise UsageError(f"{key!r} cannot be set in {name}; it has its own flag")
        settings[key] = value
    if flags["rdzv_backend"] in ONE_NODE_BACKENDS:
        for key in (key for key in settings if key not in _KNOWN_SETTINGS):
            flags.notes.append(f"ignoring unknown {name} key {key!r}{suggestion(key, _KNOWN_SETTINGS)}")
    for secret, variable in (("token", "TENAX_RDZV_TOKEN"), ("password", "TENAX_ETCD_PASSWORD")):
        if secret in settings and flags.typed("rdzv_conf"):
            raise UsageError(
                f"every user of this host can read the {secret} of {name} in the process list; write it to a file that "
                f"only you can read and pass '{name} {secret}_file=FILE', or set the variable {variable}"
            )
    return settings


def _workers(flags: FlagValues, environ: Mapping[str, str]) -> int:
    """Return the number of workers that --nproc-per-node stands for on this machine."""
    text = str(flags["nproc_per_node"]).strip()
    if text.isdecimal():
        count = int(text)
    elif text[:1] in ("-", "+") or not text:
        count = 0
    else:
        from tenax._processes.devices import parse_nproc

        count = parse_nproc(text, environ)  # its message names the flag
    if count < 1:
        raise flags.invalid("nproc_per_node", "a number of at least 1, 'auto', 'cpu' or 'gpu'", text)
    if count > MAX_SLOTS:
        raise flags.invalid("nproc_per_node", f"at most {MAX_SLOTS} workers", text)
    return count


def _streams(flags: FlagValues, dest: str, workers: int) -> int | dict[int, int]:
    """Return the streams for all local ranks (one digit), or a map by local rank."""
    text = flags[dest].strip()
    if text in ("0", "1", "2", "3"):
        return int(text)
    chosen: dict[int, int] = {}
    for pair in text.split(","):
        rank, _, streams = (part.strip() for part in pair.partition(":"))
        if not rank.isdecimal() or streams not in ("0", "1", "2", "3"):
            expected = "0 (none), 1 (stdout), 2 (stderr), 3 (both), or a map of local ranks such as '0:1,1:3'"
            raise flags.invalid(dest, expected, text)
        _check_rank(flags, dest, int(rank), workers)
        chosen[int(rank)] = int(streams)
    return chosen


def _ranks(flags: FlagValues, workers: int) -> frozenset[int]:
    text = flags["local_ranks_filter"].strip()
    if not text:
        return frozenset()
    if not all(rank.strip().isdecimal() for rank in text.split(",")):
        raise flags.invalid("local_ranks_filter", "local ranks such as '0' or '0,1,2'", text)
    ranks = [int(rank) for rank in text.split(",")]
    for rank in ranks:
        _check_rank(flags, "local_ranks_filter", rank, workers)
    return frozenset(ranks)


def _check_rank(flags: FlagValues, dest: str, rank: int, workers: int) -> None:
    if rank >= workers:
        are = "is one worker, local rank 0" if workers == 1 else f"are {workers} workers, 0 to {workers - 1}"
        raise UsageError(f"{flags.quote(dest)}: local rank {rank} is out of range; there {are}")


def _check_signals(flags: FlagValues, backend: str) -> None:
    if not flags.given("signals_to_handle") and not flags["notice_signals"]:
        return
    from tenax._node.signals import parse_signals

    parsed = {}
    for dest in ("signals_to_handle", "notice_signals"):
        with usage_errors(f"{flags.name(dest)}: "):
            parsed[dest] = parse_signals(flags[dest])
    for number in parsed["notice_signals"]:
        if number in parsed["signals_to_handle"]:
            raise UsageError(
                f"{number.name} is in {flags.name('notice_signals')} and in {flags.name('signals_to_handle')}; a "
                "signal either announces preemption or stops the job, so remove it from one of them"
            )
    if parsed["notice_signals"] and backend not in ONE_NODE_BACKENDS:
        why = "only tenax's own backends send notices to other nodes"
        raise UsageError(flags.conflict("notice_signals", "rdzv_backend", why))


def _fatal(flags: FlagValues, policy: str | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    codes, errors = _parts(flags["fatal_exit_codes"]), _parts(flags["fatal_errors"])
    if not all(code.isdecimal() and 1 <= int(code) <= 255 for code in codes):
        expected = "exit codes from 1 to 255 such as '2,64'"
        raise flags.invalid("fatal_exit_codes", expected, flags["fatal_exit_codes"])
    if not all(map(_is_dotted_name, errors)):
        expected = "names of exceptions such as 'ValueError,ConfigError'"
        raise flags.invalid("fatal_errors", expected, flags["fatal_errors"])
    if (codes or errors) and policy is not None:
        given = flags.name("fatal_exit_codes" if codes else "fatal_errors")
        raise UsageError(f"{given} is for the restart policy 'budget', and {policy!r} was chosen; use one of the two")
    return tuple(dict.fromkeys(map(int, codes))), tuple(dict.fromkeys(errors))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _is_dotted_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _numa_options(mode: str | None) -> NumaOptions | None:
    if mode is None:
        return None
    from tenax.numa.binding import AffinityMode, NumaOptions

    return NumaOptions(AffinityMode(mode))


def _note_unused_flags(flags: FlagValues) -> None:
    if flags.typed("monitor_interval"):
        flags.notes.append(f"{flags.quote('monitor_interval')} has no effect: tenax does not poll its workers")
    if flags.typed("start_method") and flags["start_method"] != "spawn" and not flags["run_path"]:
        flags.notes.append(f"{flags.quote('start_method')} has no effect without --run-path")
    for dest in ("fatal_exit_codes", "fatal_errors"):
        if flags.typed(dest) and flags["max_restarts"] == 0:
            flags.notes.append(f"{flags.quote(dest)} has no effect without --max-restarts")
    if flags.typed("notice_seconds") and not flags["notice_signals"]:
        flags.notes.append(f"{flags.quote('notice_seconds')} has no effect without --notice-signals")
    for dest, stream in (("duplicate_stdout_filters", "1"), ("duplicate_stderr_filters", "2")):
        if flags.typed(dest) and flags["tee"] == "0" and flags["logs_specs"] is None:
            flags.notes.append(f"{flags.name(dest)} has no effect without --tee {stream}: only teed lines are copied")
    for dest in _UNLIKELY_IN_SCRIPTS:
        spellings = () if flags.typed(dest) else BY_DEST[dest].spellings
        if arg := next((arg for arg in flags.script_args if arg.partition("=")[0] in spellings), ""):
            flags.notes.append(f"{arg!r} is after the script, so it is passed to the script")


def _dashboard(flags: FlagValues) -> str:
    """Return the dashboard's address as HOST:PORT."""
    text = flags["dashboard"].strip()
    if not text:
        return ""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise flags.invalid("dashboard", "PORT or HOST:PORT", text)
    return f"{host or '127.0.0.1'}:{int(port)}"


def _trace(flags: FlagValues) -> str:
    text: str = flags["trace"].strip()
    if text and text.partition(":")[0] != "otel":
        from tenax._core.text import hide_passwords

        raise flags.invalid("trace", "'otel' or 'otel:URL'", hide_passwords(text))
    return text


def _check_standby_setup(flags: FlagValues, preload: object, *, can_restart: bool) -> None:
    text = flags["standby_setup"]
    if not text:
        return
    module, _, function = text.partition(":")
    if not function.isidentifier() or not _is_dotted_name(module):
        raise flags.invalid("standby_setup", "MODULE:FUNCTION", text)
    if preload == "none" or not can_restart:
        missing = "--preload" if preload == "none" else "--max-restarts"
        raise UsageError(f"{flags.quote('standby_setup')} needs standbys, and there are none without {missing}")


def _preload(flags: FlagValues) -> str:
    """Return the modules to preload. Only a script that runs in its own interpreter can be forked from a template."""
    text = flags["preload"].strip()
    names = _parts(text)
    if not all(map(_is_dotted_name, names)):
        raise flags.invalid("preload", "'auto', 'none' or modules separated by commas", text)
    if "none" in names and len(names) > 1:
        raise flags.invalid("preload", "either 'none' or modules", text)
    for flag in ("no_python", "run_path"):
        if flags[flag]:
            if flags.typed("preload") and names != ["none"]:
                raise UsageError(flags.conflict("preload", flag, "only Python scripts and modules can be preloaded"))
            return "none"
    return ",".join(names) or "none"
