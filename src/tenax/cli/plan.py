"""The plan: what ``tenax run --dry-run`` prints. It says what a run would do, and starts, makes and opens nothing.

The environment comes from the same function that a real run uses; what is only known at the start (a free port, a
random name) stands in angle brackets.
"""

from __future__ import annotations

import os
import shlex

from tenax.cli.options import split_endpoint
from tenax.cli.script import entrypoint_of
from tenax.cli.world import places_of
from tenax.core.environment import WorkerEnvironment, worker_environment
from tenax.core.model import AgentSettings, Assignment
from tenax.processes.entrypoint import LOCAL_RANK_MACRO
from tenax.rendezvous.local import LOOPBACK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tenax.cli.options import Options
    from tenax.runtime.places import Places

_RANDOM_ID = "<random>"
_FREE_PORT = "<a free port>"
_STREAMS = ("none", "stdout", "stderr", "stdout and stderr")
_TITLE_WIDTH = 12


def describe(options: Options, *, interpreter: str, cwd: str, environ: Mapping[str, str]) -> str:
    """The whole plan as text. Raises ``UsageError`` where a real run would refuse to start."""
    places = places_of(options, environ)
    environments = _environments(options, places, environ)
    shared = {
        name: value
        for name, value in environments[0].items()
        if all(environment.get(name) == value for environment in environments)
    }
    sections = [
        _opening(options),
        *_facts(options, places, interpreter, cwd, environ),
        "",
        "environment of every worker, added to what is inherited:",
        *_assignments(shared),
    ]
    for rank, environment in enumerate(environments):
        sections += ["", f"worker {rank}: global rank {environment['RANK']} of {options.nproc_per_node}"]
        sections.append("  " + _title("command") + _command(options, interpreter, rank))
        if places.placement is not None and places.placement.bindings:
            sections.append("  " + _title("CPUs") + places.placement.bindings[rank].why)
        sections += _assignments({name: value for name, value in environment.items() if name not in shared})
    return "\n".join(sections) + "\n"


def _opening(options: Options) -> str:
    workers = "1 worker" if options.nproc_per_node == 1 else f"{options.nproc_per_node} workers"
    written = options.nproc_as_written
    counted = "" if written.isdecimal() else f" (--nproc-per-node {written})"
    return f"A dry run: nothing is started. The command would run {workers}{counted} on this machine.\n"


def _facts(options: Options, places: Places, interpreter: str, cwd: str, environ: Mapping[str, str]) -> Iterable[str]:
    yield from _lines("script", [_kind_of_script(options)])
    if not options.no_python:
        origin = "PYTHON_EXEC" if options.python and not options.run_path else "the one that runs tenax"
        yield from _lines("interpreter", [f"{_worker_python(options, interpreter)} ({origin})"])
    yield from _lines("folder", [cwd])
    yield from _lines("run id", [options.run_id or f"{_RANDOM_ID}; --rdzv-id sets one"])
    yield from _lines("role", [options.role])
    yield from _lines("restarts", [_restarts(options)])
    yield from _lines("stopping", _stopping(options))
    yield from _lines("logs", _logs(options))
    yield from _lines("threads", [_threads(places, environ)])
    yield from _lines(
        "placement", [places.placement.why.rstrip(".") if places.placement else "workers may run on any CPU"]
    )


def _lines(title: str, texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        yield _title(title) + text
        title = ""


def _title(title: str) -> str:
    return title.ljust(_TITLE_WIDTH)


def _kind_of_script(options: Options) -> str:
    if options.module:
        return f"module {options.script}"
    if options.no_python:
        return f"program {options.script}"
    return f"{options.script} (run by multiprocessing, {options.start_method})" if options.run_path else options.script


def _worker_python(options: Options, interpreter: str) -> str:
    return interpreter if options.run_path else options.python or interpreter


def _restarts(options: Options) -> str:
    if options.max_restarts == 0:
        return "none: the first failure ends the job (--max-restarts)"
    return f"up to {options.max_restarts}: after a failure all workers are stopped and started again"


def _stopping(options: Options) -> Iterable[str]:
    signals = ", ".join(name.strip() for name in options.signals_to_handle.split(",") if name.strip())
    yield f"{signals} stop the job and are passed on to the workers" if signals else "no signal is handled"
    yield f"what has not ended {options.shutdown_timeout_s} s after it was asked to is killed"


def _logs(options: Options) -> Iterable[str]:
    if options.logs_specs not in (None, "default"):
        yield f"decided by the plug-in {options.logs_specs!r}"
    if options.log_dir == os.devnull:
        yield "nothing is kept (--log-dir /dev/null)"
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
        yield f"in front of a worker's line: {options.log_line_prefix_template!r}"
    if options.report:
        yield f"a failure report goes to {options.report}"


def _streams(chosen: int | dict[int, int], workers: int) -> str:
    if isinstance(chosen, int):
        return _STREAMS[chosen]
    named = [f"{_STREAMS[chosen[rank]]} of local rank {rank}" for rank in range(workers) if chosen.get(rank)]
    return ", ".join(named) or _STREAMS[0]


def _threads(places: Places, environ: Mapping[str, str]) -> str:
    if "OMP_NUM_THREADS" in environ:
        return f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}, inherited"
    if places.omp_num_threads:
        return places.notes[-1].rstrip(".")
    return "OMP_NUM_THREADS is left alone: one worker may use every core"


def _environments(options: Options, places: Places, environ: Mapping[str, str]) -> list[dict[str, str]]:
    settings = AgentSettings(
        run_id=options.run_id or _RANDOM_ID,
        role=options.role,
        local_world_size=options.nproc_per_node,
        max_restarts=options.max_restarts,
        grace_s=options.shutdown_timeout_s,
    )
    assignment = _assignment(options)
    for_all = WorkerEnvironment(
        virtual_local_rank=options.virtual_local_rank,
        omp_num_threads=places.omp_num_threads,
    )
    environments = [
        worker_environment(settings, assignment, rank, environ, for_all) for rank in range(options.nproc_per_node)
    ]
    for rank, environment in enumerate(environments):
        if not assignment.master_port:
            environment["MASTER_PORT"] = _FREE_PORT
        if options.log_dir != os.devnull and options.logs_specs in (None, "default"):
            environment["TORCHELASTIC_ERROR_FILE"] = f"<log folder>/attempt_0/{rank}/error.json"
    return environments


def _assignment(options: Options) -> Assignment:
    """The one node's part: it is alone, and only where its workers meet was to be chosen."""
    host, port = options.local_addr or LOOPBACK, "0"
    if options.rdzv_backend == "static":
        host, port = split_endpoint(options.rdzv_endpoint)
    return Assignment(
        generation=1,
        world_size=options.nproc_per_node,
        role_world_size=options.nproc_per_node,
        master_addr=host,
        master_port=int(port),
    )


def _assignments(environment: Mapping[str, str]) -> list[str]:
    """One variable a line, so that values of any length stay readable. What is not known yet keeps its brackets."""
    return [f"  {name}={value if value.startswith('<') else shlex.quote(value)}" for name, value in environment.items()]


def _command(options: Options, interpreter: str, rank: int) -> str:
    entrypoint, args = entrypoint_of(options, interpreter)
    words = [word.replace(LOCAL_RANK_MACRO, str(rank)) for word in args]
    if isinstance(entrypoint, str):
        return shlex.join([entrypoint, *words])
    return f"{shlex.join(words)}, inside a process that multiprocessing makes ({options.start_method})"
