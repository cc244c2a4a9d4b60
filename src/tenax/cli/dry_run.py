"""``tenax run --dry-run``: describes what a run would do. Starts, creates and opens nothing.

The environment comes from the function that a real run uses. Values that are decided later (a free port, a random name,
the ranks of several nodes) are shown in angle brackets. Secrets are never shown.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping

import msgspec

from tenax._core.environment import WorkerEnvironment, worker_environment
from tenax._core.model import Assignment
from tenax._core.text import counted, format_seconds, hide_passwords
from tenax._engines.local import LOOPBACK
from tenax._engines.tcp.linked import LinkedSettings
from tenax._io.endpoint import Endpoint
from tenax._node.job import (
    TORCHELASTIC_ENABLE_FILE_TIMER,
    TORCHELASTIC_TIMER_FILE,
    rendezvous_parameters,
    watchdog_file,
)
from tenax._node.workers import Placements, decide_placements
from tenax._observe.health.check import TORCHELASTIC_HEALTH_CHECK_PORT, health_check_port
from tenax._processes.entrypoint import LOCAL_RANK_MACRO
from tenax.cli.flags import usage_errors
from tenax.cli.options import ETCD_BACKENDS, MANY_NODES_BACKENDS, Options, split_endpoint
from tenax.cli.rendezvous_options import ORDER_VARIABLE, TOKEN_VARIABLE
from tenax.cli.run import compat_variables
from tenax.cli.script import entrypoint_of
from tenax.control_plane._sockets import VARIABLE as SOCKET_VARIABLE
from tenax.control_plane._sockets import socket_folder
from tenax.events import handlers
from tenax.metrics import _by_name as metrics
from tenax.policy import load_policy
from tenax.rendezvous._tcp_handler import tcp_settings

Setting = tuple[str, Iterable[str]]  # a title and its lines

_RANDOM_ID = "<random>"
_FREE_PORT = "<a free port>"
_STREAMS = ("none", "stdout", "stderr", "stdout and stderr")
_TITLE_WIDTH = 12


@usage_errors()
def describe(options: Options, *, interpreter: str, cwd: str, environ: Mapping[str, str]) -> str:
    """Return the description as text. Raises ``UsageError`` where a real run would refuse to start."""
    placements = decide_placements(options.numa_options, options.nproc_per_node, environ)
    environments = _environments(options, placements, environ)
    common = set.intersection(*(set(environment.items()) for environment in environments))
    shared = {name: value for name, value in environments[0].items() if (name, value) in common}
    workers = counted(options.nproc_per_node, "worker")
    written = options.nproc_as_written
    flag = "" if written.isdecimal() else f" (--nproc-per-node {written})"
    among = f", which is one of {_count(options)}" if options.max_nodes > 1 else ""
    sections = [f"Dry run, nothing is started. The command would run {workers}{flag} on this node{among}.\n"]
    for title, texts in _settings(options, placements, interpreter, cwd, environ):
        sections += [f"{'' if index else title:<{_TITLE_WIDTH}}{text}" for index, text in enumerate(texts)]
    sections += ["", "environment of every worker, added to what is inherited:", *_variables(shared)]
    for rank, environment in enumerate(environments):
        number = f"global rank {environment['RANK']} of {environment['WORLD_SIZE']}"
        number = number if options.max_nodes == 1 else "ranks are assigned when all nodes have joined"
        command = _command(options, interpreter, rank)
        sections += ["", f"worker {rank}: {number}", f"  {'command':<{_TITLE_WIDTH}}{command}"]
        if placements.placement is not None and placements.placement.bindings:
            sections.append(f"  {'CPUs':<{_TITLE_WIDTH}}{placements.placement.bindings[rank].why}")
        sections += _variables({name: value for name, value in environment.items() if name not in shared})
    return "\n".join(sections) + "\n"


def _count(options: Options) -> str:
    least, most = options.min_nodes, options.max_nodes
    return str(most) if least == most else f"{least} to {most}"


def _settings(
    options: Options, placements: Placements, interpreter: str, cwd: str, environ: Mapping[str, str]
) -> Iterable[Setting]:
    kind = "module " if options.module else "program " if options.no_python else ""
    how = f" (run by multiprocessing, {options.start_method})" if options.run_path else ""
    yield "script", [f"{kind}{options.script}{how}"]
    if not options.no_python:
        is_own = options.python and not options.run_path
        python = f"{options.python} (PYTHON_EXEC)" if is_own else f"{interpreter} (the one that runs tenax)"
        yield "interpreter", [python]
    if options.compat:
        yield "imports", ["torch.distributed.elastic is redirected to tenax (--compat)"]
    if not options.no_python and not options.run_path:
        what = "what the script imports" if options.preload == "auto" else options.preload.replace(",", ", ")
        is_off = options.preload == "none"
        text = "off: every worker imports on its own" if is_off else f"{what}, once per node; workers are forked"
        yield "preload", [f"{text} (--preload)"]
    yield "folder", [cwd]
    yield "run id", [options.run_id or f"{_RANDOM_ID}; --rdzv-id sets one"]
    yield "role", [options.role]
    if options.max_nodes > 1:
        yield "nodes", _nodes(options, environ)
        yield "rendezvous", _rendezvous(options, environ)
    yield "restarts", _restarts(options)
    yield "stopping", _stopping(options)
    yield "logs", _logs(options)
    yield from _observers(options, environ)
    threads = "OMP_NUM_THREADS is not set: one worker may use every core"
    if "OMP_NUM_THREADS" in environ:
        threads = f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}, inherited"
    elif placements.omp_num_threads:
        threads = placements.notes[-1].rstrip(".")
    yield "threads", [threads]
    placement = placements.placement
    yield "placement", [placement.why.rstrip(".") if placement else "workers may run on any CPU"]


def _nodes(options: Options, environ: Mapping[str, str]) -> Iterable[str]:
    if options.min_nodes == options.max_nodes:
        yield f"{options.max_nodes}: workers start when all have joined; a lost node must be replaced"
    else:
        yield f"{_count(options)}: nodes may join and leave; each change restarts the workers"
    if options.rdzv_backend not in MANY_NODES_BACKENDS:
        return
    order = options.rdzv_configs.get("node_order") or environ.get(ORDER_VARIABLE)
    if "rank" in options.rdzv_configs:
        yield f"this is node {options.rdzv_configs['rank']} (--node-rank)"
    elif order:
        yield f"ranked by node_order, which is {order!r} here"
    else:
        yield "ranked in the order in which they join; a node that stays keeps its rank"


def _rendezvous(options: Options, environ: Mapping[str, str]) -> Iterable[str]:
    """Describe the rendezvous from the settings that a real run would use."""
    if options.rdzv_backend not in MANY_NODES_BACKENDS:
        at = f" at {options.rdzv_endpoint}" if options.rdzv_endpoint else ""
        yield f"by the installed backend {options.rdzv_backend!r}{at}"
        return
    if options.rdzv_backend in ETCD_BACKENDS:
        yield from _etcd_rendezvous(options)
        return
    settings = tcp_settings(rendezvous_parameters(options))
    yield f"at {Endpoint.parse(settings.endpoint)}, served by the node that can listen there"
    yield from _terms(options, settings)
    yield _secret(options, environ)
    certificate, authority = (options.rdzv_configs.get(key) for key in ("ssl_cert", "ca_cert"))
    own = f"this node presents {certificate}" if certificate else "this node has no certificate and cannot serve"
    on = f"{own}; peers are verified with {authority or 'the authorities of this host'}"
    yield f"TLS: {on if certificate or authority else 'off (ssl_cert, ssl_cert_key, ca_cert)'}"


def _etcd_rendezvous(options: Options) -> Iterable[str]:
    from tenax.rendezvous._etcd_handler import etcd_engine_settings  # it imports h11

    settings = etcd_engine_settings(rendezvous_parameters(options))
    members = ", ".join(settings.etcd.endpoints)
    if settings.managed is None:
        yield f"through etcd at {members}; any node can be elected leader, and is replaced if it is lost"
    else:
        yield f"through etcd, which tenax runs on {members} during the job (managed)"
    yield from _terms(options, settings)
    yield f"a single node continues for {format_seconds(settings.outage_s)} without etcd (outage_timeout)"
    user = f"as user {settings.etcd.user!r}" if settings.etcd.user else "without a user (user, password_file)"
    if settings.managed is not None:
        user = "as root, with the secret" if settings.etcd.user else "without a user, so open to all (token_file)"
    yield f"connections to etcd are {user}, {'with' if settings.etcd.tls is not None else 'without'} TLS"
    port = f"port {settings.link_port}" if settings.link_port else "a free port"
    tls = "with TLS" if settings.tls is not None else "without TLS (ssl_cert, ssl_cert_key, ca_cert)"
    yield f"nodes connect to the leader at {port} (link_port), {tls}"


def _terms(options: Options, settings: LinkedSettings) -> Iterable[str]:
    if options.min_nodes < options.max_nodes:
        enough = "1 node has" if options.min_nodes == 1 else f"{options.min_nodes} nodes have"
        wait = format_seconds(settings.last_call_s)
        yield f"when {enough} joined, others may join for another {wait} (last_call_timeout)"
        newcomers = "starts a new generation at once" if settings.scale_up else "waits for the next restart"
        yield f"a node that joins later {newcomers} (scale_up)"
    yield f"the job fails after {format_seconds(settings.join_timeout_s)} with too few nodes (join_timeout)"
    lease = format_seconds(settings.terms.lease_s)
    yield f"a node without a heartbeat for {lease} is lost (keep_alive_interval, keep_alive_max_attempt)"


def _secret(options: Options, environ: Mapping[str, str]) -> str:
    if options.rdzv_configs.get("token_file"):
        return f"secret: from {options.rdzv_configs['token_file']} (token_file)"
    if options.rdzv_configs.get("token"):
        return "secret: set (token)"
    if environ.get(TOKEN_VARIABLE):
        return f"secret: set ({TOKEN_VARIABLE})"
    host, _ = split_endpoint(options.rdzv_endpoint)
    if options.rdzv_backend not in ETCD_BACKENDS and Endpoint(host, 1).is_loopback:
        return "secret: the one of this user on this host (token_file, TENAX_RDZV_TOKEN)"
    return "secret: none, so any process that reaches the endpoint can join (token_file, TENAX_RDZV_TOKEN)"


def _restarts(options: Options) -> Iterable[str]:
    if options.policy_name is not None:
        load_policy(options.policy_name)  # raises for an unknown one
        yield f"decided by {options.policy_name}, given --max-restarts {options.max_restarts} (--restart-policy)"
        return
    if options.max_restarts == 0:
        yield "none: the first failure ends the job (--max-restarts)"
        return
    once = ", counted once for all nodes" if options.max_nodes > 1 else ""
    yield f"up to {options.max_restarts}{once}: a failure restarts all workers (--max-restarts)"
    fatal = [f"exit code {code}" for code in options.fatal_exit_codes] + list(options.fatal_errors)
    if fatal:
        yield f"no restart after {' or '.join(fatal)} (--fatal-exit-codes, --fatal-errors)"


def _stopping(options: Options) -> Iterable[str]:
    signals = _names(options.signals_to_handle)
    yield f"{signals} stop the job and are forwarded to the workers" if signals else "no signal is handled"
    yield f"SIGTERM, {format_seconds(options.shutdown_timeout)} grace period, SIGKILL (--shutdown-timeout)"
    if options.notice_signals:
        soon = "" if options.notice_s is None else f" in {format_seconds(options.notice_s)}"
        yield f"{_names(options.notice_signals)}: notice of preemption{soon} (--notice-signals)"


def _names(text: str) -> str:
    return ", ".join(name.strip() for name in text.split(",") if name.strip())


def _logs(options: Options) -> Iterable[str]:
    if options.logs_specs_name not in (None, "default"):
        yield f"by the plug-in {options.logs_specs_name!r}"
    if options.log_dir == os.devnull:
        yield "no files (--log-dir /dev/null)"
    else:
        folder = options.log_dir or "<a new temporary folder>"
        yield f"{folder}/{options.run_id or '<run id>'}_<random>/attempt_<restarts>/<local rank>/"
    yield f"to files only: {_streams(options.redirects, options.nproc_per_node)} (--redirects)"
    yield f"to files and the terminal: {_streams(options.tee, options.nproc_per_node)} (--tee)"
    if options.local_ranks_filter:
        yield f"shown on the terminal: local ranks {', '.join(map(str, sorted(options.local_ranks_filter)))} only"
    for name, texts in (("stdout", options.duplicate_stdout_filters), ("stderr", options.duplicate_stderr_filters)):
        if texts:
            yield f"filtered_{name}.log: lines with {' or '.join(map(repr, texts))}"
    if options.log_line_prefix_template is not None:
        yield f"prefix of a worker's line: {options.log_line_prefix_template!r}"
    if options.report:
        yield f"failure report: {options.report} (--report)"


def _observers(options: Options, environ: Mapping[str, str]) -> Iterable[Setting]:
    """Describe sinks, observers, and what only environment variables enable. Checks names; creates no handler."""
    if options.metrics:
        metrics.check_names(options.metrics, environ)
        yield "metrics", [hide_passwords(_names(options.metrics))]
    if options.event_log_handler not in ("", "null"):
        handlers.check_names(options.event_log_handler)
        yield "events", [hide_passwords(_names(options.event_log_handler))]
    if options.dashboard:
        where = options.dashboard.removesuffix(":0") + (", any free port" if options.dashboard.endswith(":0") else "")
        yield "dashboard", [f"at {where} on the coordinator's node (--dashboard)"]
    if options.on_hang != "off":
        what = "report the stacks" if options.on_hang == "report" else "report the stacks and restart all workers"
        yield "hangs", [f"after {format_seconds(options.hang_after)} without progress, {what} (--on-hang)"]
    if options.trace:
        yield "trace", [f"{hide_passwords(_names(options.trace))} (--trace)"]
    if watchdog_file(environ) is not None:
        what = "kills a worker that does not leave a timer's scope in time"
        yield "watchdog", [f"{what} ({TORCHELASTIC_ENABLE_FILE_TIMER})"]
    if (port := health_check_port(environ)) is not None:
        where = f"port {port}" if port else "a free port"
        yield "health", [f"served at {where} ({TORCHELASTIC_HEALTH_CHECK_PORT})"]
    if folder := socket_folder(environ):
        command = shlex.join(["tenax", "ask", folder])
        yield "queries", [f"of workers that use worker_main: {command} ({SOCKET_VARIABLE})"]


def _streams(chosen: int | dict[int, int], workers: int) -> str:
    if isinstance(chosen, int):
        return _STREAMS[chosen]
    named = [f"{_STREAMS[chosen[rank]]} of local rank {rank}" for rank in range(workers) if chosen.get(rank)]
    return ", ".join(named) or _STREAMS[0]


def _environments(options: Options, placements: Placements, environ: Mapping[str, str]) -> list[dict[str, str]]:
    settings = msgspec.structs.replace(options.settings, run_id=options.run_id or _RANDOM_ID)
    assignment = _assignment(options, environ)
    for_all = WorkerEnvironment(options.virtual_local_rank, placements.omp_num_threads)
    environments = []
    for rank in range(options.nproc_per_node):
        environment = worker_environment(settings, assignment, rank, environ, for_all)
        environments.append(environment)
        if not assignment.master_port:
            environment["MASTER_PORT"] = _FREE_PORT
        if options.max_nodes > 1:
            environment.update(_decided_later(options))
        if options.log_dir != os.devnull and options.logs_specs_name in (None, "default"):
            environment["TORCHELASTIC_ERROR_FILE"] = f"<log folder>/attempt_0/{rank}/error.json"
            environment["TENAX_NOTICE_FILE"] = "<log folder>/notice-1.json"
        if (timer_file := watchdog_file(environ)) is not None:
            pipe = os.path.abspath(timer_file) if timer_file else "<a pipe created for the run>"
            environment[TORCHELASTIC_TIMER_FILE] = pipe
        if folder := socket_folder(environ):
            path = f"{folder}/rank"
            environment[SOCKET_VARIABLE] = f"{path}{rank}" if options.max_nodes == 1 else f"<{path} and its rank>"
        if options.compat:
            environment.update(compat_variables(environ))
    return environments


def _assignment(options: Options, environ: Mapping[str, str]) -> Assignment:
    host, port = options.local_addr or LOOPBACK, "0"
    if options.rdzv_backend == "static":
        host, port = split_endpoint(options.rdzv_endpoint)
    shares_store = environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
    return Assignment(
        generation=1,
        world_size=options.nproc_per_node,
        role_world_size=options.nproc_per_node,
        master_addr=host,
        master_port=int(port or 0),
        use_agent_store=bool(rendezvous_parameters(options).get_as_bool("use_agent_store", shares_store)),
        why="first generation",
    )


def _decided_later(options: Options) -> dict[str, str]:
    """Return the variables that the coordinator of several nodes sets. Nodes may have different numbers of workers."""
    is_own = options.rdzv_backend in MANY_NODES_BACKENDS
    settings = options.rdzv_configs if is_own else {}
    is_fixed = options.min_nodes == options.max_nodes
    later = {
        "RANK": "<rank>",
        "GROUP_RANK": str(settings.get("rank", "<rank of this node>")),
        "ROLE_RANK": "<rank>",
        "WORLD_SIZE": "<all workers>",
        "GROUP_WORLD_SIZE": str(options.max_nodes) if is_fixed else "<nodes>",
        "ROLE_WORLD_SIZE": "<all workers>",
        "MASTER_ADDR": "<address of node 0>",
        "MASTER_PORT": str(settings.get("store_port", "<a free port of node 0>")),
    }
    if not is_own:
        later["TORCHELASTIC_USE_AGENT_STORE"] = "<set by the rendezvous>"
    return later


def _variables(environment: Mapping[str, str]) -> list[str]:
    """Return one line per variable. Values in angle brackets are not quoted."""
    return [f"  {name}={value if value.startswith('<') else shlex.quote(value)}" for name, value in environment.items()]


def _command(options: Options, interpreter: str, rank: int) -> str:
    entrypoint, args = entrypoint_of(options, interpreter)
    args = [arg.replace(LOCAL_RANK_MACRO, str(rank)) for arg in args]
    if isinstance(entrypoint, str):
        return shlex.join([entrypoint, *args])
    return f"{shlex.join(args)}, in a process of multiprocessing ({options.start_method})"
