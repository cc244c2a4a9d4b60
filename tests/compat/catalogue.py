"""Small cases of behaviour, for torch or tenax: ``python catalogue.py torch`` or ``... tenax``.

Prints one JSON object: case -> result, which is the repr of a value or the name of an exception. The cases are the same
for both; ``test_behaviours.py`` compares the results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

Question = tuple[str, Callable[[], Any]]


def outcome(ask: Callable[[], Any]) -> str:
    """Return the result as text. Of an exception only the documented type counts, not its message."""
    try:
        return repr(ask())
    except (Exception, SystemExit) as error:
        documented = (
            each for each in type(error).__mro__ if each.__module__ == "builtins" or "Rendezvous" in str(each)
        )
        return f"raises {next(documented).__name__}"


class Store:
    """A key-value store that needs neither torch nor tenax."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.values[key]


class SharedStore:
    """A store that several threads can wait for."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str | bytes) -> None:
        with self._changed:
            self._values[key] = value.encode() if isinstance(value, str) else value
            self._changed.notify_all()

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._values.keys() >= set(keys), timeout.total_seconds()):
                raise TimeoutError(f"timed out waiting for {keys}")

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)


class NobodyWaits:
    """As much of a rendezvous handler as assigning ranks asks for."""

    def num_nodes_waiting(self) -> int:
        return 0


def agent_questions(home: str) -> Iterator[Question]:
    server = importlib.import_module(f"{home}.agent.server")
    api = importlib.import_module(f"{home}.agent.server.api")
    local = importlib.import_module(f"{home}.agent.server.local_elastic_agent")

    def spec(**fields: Any) -> Any:
        return server.WorkerSpec(
            **{"role": "r", "local_world_size": 2, "rdzv_handler": None, "entrypoint": "/bin/true", **fields}
        )

    yield "WorkerSpec: its defaults", lambda: dataclasses.astuple(spec())[3:16]
    for field, value in [
        ("local_world_size", 0),
        ("local_world_size", -1),
        ("monitor_interval", 0),
        ("monitor_interval", -1.0),
        ("entrypoint", None),
        ("max_restarts", -1),
    ]:
        yield f"WorkerSpec: {field}={value}", lambda field=field, value=value: getattr(spec(**{field: value}), field)

    def with_fn() -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = spec(fn=print, entrypoint="/bin/true")
        return made.entrypoint is print, [each.category.__name__ for each in caught]

    yield "WorkerSpec: fn", with_fn
    yield "WorkerSpec: the name of a program", lambda: spec(entrypoint="/usr/bin/env").get_entrypoint_name()
    yield "WorkerSpec: the name of a function", lambda: spec(entrypoint=Store.get).get_entrypoint_name()
    worker = server.Worker(3)
    yield "Worker: str and repr", lambda: (str(worker), repr(worker), worker.id)
    yield "Worker: has no other attributes", lambda: setattr(worker, "colour", "red")
    yield "WorkerState: values", lambda: [(each.name, each.value) for each in server.WorkerState]
    yield "WorkerState: is its text", lambda: server.WorkerState.HEALTHY == "HEALTHY"
    for state in server.WorkerState:
        yield f"WorkerState: is_running({state.name})", lambda state=state: server.WorkerState.is_running(state)
        yield f"RunResult: is_failed() of {state.name}", lambda state=state: server.RunResult(state).is_failed()
    yield "RunResult: defaults", lambda: dataclasses.astuple(server.RunResult(server.WorkerState.INIT))[1:]

    def group() -> Any:
        made = server.WorkerGroup(spec())
        names = ("store", "group_rank", "group_world_size", "master_addr", "master_port")
        return made.state.name, len(made.workers), [getattr(made, name) for name in names]

    yield "WorkerGroup: as it begins", group
    yield "WorkerGroup: has no other attributes", lambda: setattr(server.WorkerGroup(spec()), "colour", "red")
    yield "DEFAULT_ROLE", lambda: api.DEFAULT_ROLE
    for name in ("ENABLE_FILE_TIMER", "TIMER_FILE", "HEALTH_CHECK_PORT", "UNINTERRUPTIBLE_STATE_TIMEOUT"):
        yield name, lambda name=name: getattr(local, f"TORCHELASTIC_{name}")

    class Toy(server.SimpleElasticAgent):  # type: ignore[name-defined, misc]
        def _start_workers(self, worker_group: Any) -> Any: ...

        def _stop_workers(self, worker_group: Any) -> Any: ...

        def _monitor_workers(self, worker_group: Any) -> Any: ...

        def _shutdown(self, *args: Any) -> Any: ...

    agent = Toy(spec())
    yield (
        "SimpleElasticAgent: the role of get_worker_group is ignored",
        lambda: agent.get_worker_group("unknown") is agent.get_worker_group(),
    )
    yield "SimpleElasticAgent: is abstract", lambda: server.SimpleElasticAgent(spec())

    def ranks(*nodes: tuple[str, int]) -> Any:
        store = SharedStore()

        def assign(group_rank: int) -> list[str]:
            role, workers = nodes[group_rank]
            mine = spec(role=role, local_world_size=workers, rdzv_handler=NobodyWaits())
            return [str(each) for each in Toy(mine)._assign_worker_ranks(store, group_rank, len(nodes), mine)]

        with ThreadPoolExecutor(len(nodes)) as pool:
            return list(pool.map(assign, range(len(nodes))))

    yield "ranks: one node", lambda: ranks(("a", 3))
    yield "ranks: equal nodes", lambda: ranks(("a", 2), ("a", 2), ("a", 2))
    yield "ranks: uneven nodes", lambda: ranks(("a", 1), ("a", 3), ("a", 2))
    yield "ranks: several roles", lambda: ranks(("a", 2), ("b", 1), ("a", 3), ("c", 1), ("b", 2))


def rendezvous_questions(home: str) -> Iterator[Question]:
    rendezvous = importlib.import_module(f"{home}.rendezvous")
    api = importlib.import_module(f"{home}.rendezvous.api")
    registry = importlib.import_module(f"{home}.rendezvous.registry")
    dynamic = importlib.import_module(f"{home}.rendezvous.dynamic_rendezvous")
    c10d = importlib.import_module(f"{home}.rendezvous.c10d_rendezvous_backend")
    static = importlib.import_module(f"{home}.rendezvous.static_tcp_rendezvous")

    def params(backend: str = "mine", endpoint: str = "", nodes: tuple[int, int] = (1, 2), **config: Any) -> Any:
        return rendezvous.RendezvousParameters(backend, endpoint, "run", *nodes, **config)

    for nodes in [(0, 1), (-1, 1), (2, 1), (1, 1), (1, 4)]:
        yield f"RendezvousParameters: {nodes}", lambda nodes=nodes: params(nodes=nodes).max_nodes
    yield "RendezvousParameters: no backend", lambda: params("")
    yield (
        "RendezvousParameters: attributes",
        lambda: [getattr(params(a="1"), name) for name in ("backend", "endpoint", "run_id", "local_addr", "config")],
    )
    texts = [*"10tfynTY", "true", "FALSE", "Yes", "NO", "on", "off", "2", "-1", "", " true ", "1.0", "0x1", "１"]
    for value in [*texts, True, False, 1, 0, 2, 3.7, None]:
        yield f"RendezvousParameters.get({value!r})", lambda value=value: params(key=value).get("key", 7)
        yield f"RendezvousParameters.get_as_bool({value!r})", lambda value=value: params(key=value).get_as_bool("key")
        yield f"RendezvousParameters.get_as_int({value!r})", lambda value=value: params(key=value).get_as_int("key")
    for method in ("get", "get_as_bool", "get_as_int"):
        yield (
            f"RendezvousParameters.{method}: what is not there",
            lambda method=method: (getattr(params(), method)("key"), getattr(params(), method)("key", 1)),
        )

    class Handler(rendezvous.RendezvousHandler):  # type: ignore[name-defined, misc]
        def get_backend(self) -> str:
            return "mine"

        def next_rendezvous(self) -> Any: ...

        def is_closed(self) -> Any: ...

        def set_closed(self) -> Any: ...

        def num_nodes_waiting(self) -> Any: ...

        def get_run_id(self) -> Any: ...

        def shutdown(self) -> Any: ...

    yield "RendezvousHandler: use_agent_store", lambda: Handler().use_agent_store
    yield "RendezvousHandler: is abstract", lambda: rendezvous.RendezvousHandler()

    def one(_: Any) -> Any:
        return Handler()

    def other(_: Any) -> Any:
        return Handler()

    def registered(*pairs: Any) -> Any:
        made = rendezvous.RendezvousHandlerRegistry()
        for pair in pairs:
            made.register(*pair)
        return made

    yield "RendezvousHandlerRegistry: twice the same", lambda: registered(("mine", one), ("mine", one)) is not None
    yield "RendezvousHandlerRegistry: another one", lambda: registered(("mine", one), ("mine", other))
    yield "RendezvousHandlerRegistry: no name", lambda: registered(("", one))
    yield (
        "RendezvousHandlerRegistry: create",
        lambda: type(registered(("mine", one)).create_handler(params())).__name__,
    )
    yield "RendezvousHandlerRegistry: unknown", lambda: registered().create_handler(params())
    yield "RendezvousHandlerRegistry: another name", lambda: registered(("x", one)).create_handler(params("x"))
    yield "get_rendezvous_handler: unknown", lambda: registry.get_rendezvous_handler(params("unknown"))
    yield (
        "the errors of a rendezvous",
        lambda: [
            (name, [each.__name__ for each in getattr(rendezvous, name).__mro__[1:3]])
            for name in sorted(api.__all__)
            if name.endswith("Error")
        ],
    )

    info = rendezvous.RendezvousStoreInfo

    def built(rank: int, store: Store, *args: Any) -> Any:
        made = info.build(rank, store, *args)
        return made.master_addr, made.master_port, sorted(store.values)

    filled = Store()
    filled.values = {"MASTER_ADDR": b"a-host", "MASTER_PORT": b"77"}
    yield "RendezvousStoreInfo: its keys", lambda: (info.MASTER_ADDR_KEY, info.MASTER_PORT_KEY)
    yield "RendezvousStoreInfo: equality", lambda: info("a", 1) == info("a", 1)
    yield "RendezvousStoreInfo.build: rank 0", lambda: built(0, Store(), "here", 5)
    yield "RendezvousStoreInfo.build: a free port", lambda: 0 < built(0, Store(), "here")[1] < 65536
    yield "RendezvousStoreInfo.build: another rank", lambda: built(1, filled, "here", 5)
    yield "RendezvousStoreInfo.build: missing keys", lambda: built(1, Store(), "here", 5)
    met = rendezvous.RendezvousInfo("store", 1, 2, info("a", 1))
    yield (
        "RendezvousInfo: its parts",
        lambda: (met.store, met.rank, met.world_size, met.bootstrap_store_info.master_port),
    )
    yield "RendezvousInfo: cannot be changed", lambda: setattr(met, "rank", 2)

    utils = importlib.import_module(f"{home}.rendezvous.utils")
    etcd_store = importlib.import_module(f"{home}.rendezvous.etcd_store")
    for seconds in [0, -1, 0.02, (0.02, 0.03), (0, 0)]:
        yield f"_delay({seconds})", lambda seconds=seconds: waits_within(utils._delay, seconds)
    yield "cas_delay", lambda: waits_within(etcd_store.cas_delay)

    timeout = dynamic.RendezvousTimeout
    names = ("join", "last_call", "close", "heartbeat")
    yield "RendezvousTimeout: defaults", lambda: [getattr(timeout(), name).total_seconds() for name in names]
    for name in names:
        for seconds in (-1, 0, 1):
            yield (
                f"RendezvousTimeout: {name}={seconds}",
                lambda name=name, seconds=seconds: getattr(timeout(**{name: timedelta(seconds=seconds)}), name),
            )
    settings = dynamic.RendezvousSettings("run", 1, 2, timeout(), timedelta(seconds=5), 3)
    yield "RendezvousSettings: cannot be changed", lambda: setattr(settings, "run_id", "x")

    class Backend(dynamic.RendezvousBackend):  # type: ignore[name-defined, misc]
        name = "mine"

        def get_state(self) -> None: ...

        def set_state(self, state: bytes, token: Any = None) -> None: ...

    def read(**config: Any) -> Any:
        found = dynamic.create_handler(Store(), Backend(), params(**config)).settings
        times = [getattr(found.timeout, name).total_seconds() for name in names]
        return (
            found.run_id,
            found.min_nodes,
            found.max_nodes,
            times,
            found.keep_alive_interval.total_seconds(),
            (found.keep_alive_max_attempt),
        )

    yield "create_handler: defaults", read
    for key in [
        *("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "heartbeat"),
        *("keep_alive_interval", "keep_alive_max_attempt"),
    ]:
        yield f"create_handler: {key}", lambda key=key: read(**{key: "9"})
    yield "create_handler: no number", lambda: read(join_timeout="soon")
    yield (
        "create_handler: an own handler's name",
        lambda: dynamic.create_handler(Store(), Backend(), params()).get_backend(),
    )
    yield "RendezvousBackend: is abstract", lambda: dynamic.RendezvousBackend()

    yield "c10d: DEFAULT_PORT", lambda: c10d.DEFAULT_PORT
    for key, value in [("store_type", "stone"), ("read_timeout", "0"), ("read_timeout", "-1"), ("read_timeout", "x")]:
        yield (
            f"c10d: {key}={value}",
            lambda key=key, value=value: c10d.create_backend(params("c10d", "localhost:0", **{key: value})),
        )

    def in_a_file() -> Any:
        backend, store = c10d.create_backend(params("c10d", "", store_type="file"))
        store.set("key", "value")
        return backend.name, store.get("key"), backend.set_state(b"state")[2]

    yield "c10d: an unnamed file", in_a_file

    def static_params(endpoint: str = "host:1", **config: Any) -> Any:
        return rendezvous.RendezvousParameters("static", endpoint, "run", 2, 2, **config)

    def static_handler(*args: Any, **config: Any) -> Any:
        made = static.create_rdzv_handler(static_params(*args, **config))
        return made.get_backend(), made.get_run_id(), made.master_addr, made.master_port, made.rank, made.timeout

    yield "static: defaults", lambda: static_handler(rank=1)
    yield "static: a timeout", lambda: static_handler(rank=1, timeout="7")
    yield "static: no rank", lambda: static_handler()
    yield "static: no endpoint", lambda: static_handler("", rank=1)
    yield "static: no port", lambda: static_handler("host", rank=1)


def multiprocessing_questions(home: str) -> Iterator[Question]:
    processes = importlib.import_module(f"{home}.multiprocessing")
    api = importlib.import_module(f"{home}.multiprocessing.api")
    errors = importlib.import_module(f"{home}.multiprocessing.errors")
    redirects = importlib.import_module(f"{home}.multiprocessing.redirects")
    tails = importlib.import_module(f"{home}.multiprocessing.tail_log")
    std = processes.Std

    def plain(value: Any) -> Any:
        return {rank: int(each) for rank, each in value.items()} if isinstance(value, dict) else int(value)

    yield "Std: values", lambda: [(each.name, int(each)) for each in (std.NONE, std.OUT, std.ERR, std.ALL)]
    for text in ["0", "1", "2", "3", "4", "", "00", "0:0", "0:3,1:2", "1:3", "0:4", "0:", ":1", "0:1,", "a", "10:3"]:
        yield f"Std.from_str({text!r})", lambda text=text: plain(std.from_str(text))
    for given in [std.OUT, {0: std.ALL}, {1: std.ERR, 9: std.OUT}, {}]:
        yield f"to_map({plain(given)}, 3)", lambda given=given: plain(processes.to_map(given, 3))

    def layout(where: str | None = None, log_dir: str | None = None, **given: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            specs = processes.DefaultLogsSpecs(log_dir or os.path.join(folder, where or "logs"), **given)
            envs = {
                rank: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2", "RANK": str(rank + 8)}
                for rank in range(3)
            }
            dest = specs.reify(envs)
            values = {name: getattr(dest, name) for name in _DESTINATIONS}
            values["environment"] = {rank: env["TORCHELASTIC_ERROR_FILE"] for rank, env in envs.items()}
            values["root"] = specs.root_log_dir
            text = json.dumps(values, sort_keys=True).replace(folder, "<folder>")
            found = [path.partition("/logs/")[2] for path, _, _ in os.walk(folder)]
        run = next((part for each in found for part in each.split("/") if part.startswith("job_")), "")
        return text.replace(run, "<run>") if run else text, bool(run)

    yield "logs: as they are", layout
    yield "logs: redirects", lambda: layout(redirects=std.ALL)
    yield "logs: one stream", lambda: layout(redirects=std.ERR)
    yield "logs: a map", lambda: layout(redirects={1: std.OUT}, tee={2: std.ALL, 0: std.ERR})
    yield "logs: tee", lambda: layout(tee=std.ALL)
    yield "logs: tee and redirects", lambda: layout(tee=std.OUT, redirects=std.ERR)
    yield "logs: a filter", lambda: layout(local_ranks_filter={1})
    yield "logs: a filter and redirects", lambda: layout(local_ranks_filter={1}, redirects=std.OUT)
    yield "logs: a filter and tee", lambda: layout(local_ranks_filter={0, 2}, tee=std.ALL)
    yield "logs: no files", lambda: layout(log_dir=os.devnull)
    yield "logs: no files, redirects", lambda: layout(log_dir=os.devnull, redirects=std.ALL)
    yield "logs: no files, tee", lambda: layout(log_dir=os.devnull, tee=std.OUT)
    yield "logs: no files, a filter", lambda: layout(log_dir=os.devnull, local_ranks_filter={1}, tee=std.OUT)
    yield "logs: folders are made", lambda: layout("logs/a/b")

    def a_file() -> Any:
        with tempfile.NamedTemporaryFile() as file:
            return processes.DefaultLogsSpecs(file.name)

    yield "logs: a file is no folder", a_file

    def values() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            one, same, other = (processes.DefaultLogsSpecs(folder, tee=tee) for tee in (std.OUT, std.OUT, std.ERR))
            return one == same, one == other, one == 3

    yield "logs: specs are values", values
    yield "LogsSpecs: is abstract", lambda: processes.LogsSpecs()

    def tailed(**options: Any) -> Any:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("a\nb\nab\n")
            file.flush()
            shown = io.StringIO()
            tail = tails.TailLog("name", {3: file.name}, shown, interval_sec=0.01, **options)
            was_stopped = tail.start().stopped()
            tail.stop()
            return shown.getvalue(), was_stopped, tail.stopped()

    yield "TailLog", tailed
    yield "TailLog: a prefix", lambda: tailed(log_line_prefixes={3: "three "})
    yield "TailLog: a prefix for another", lambda: tailed(log_line_prefixes={0: "zero "})
    yield "TailLog: a filter", lambda: tailed(log_line_filter=lambda line: "a" in line)

    def start(args: Any, envs: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            specs = processes.DefaultLogsSpecs(folder)
            return processes.start_processes("x", "/bin/true", args, envs, specs).close()

    def teed(stream: str) -> Any:
        shown = io.StringIO()
        redirect = contextlib.redirect_stdout if stream == "stdout" else contextlib.redirect_stderr
        with tempfile.TemporaryDirectory() as folder, redirect(shown):
            specs = processes.DefaultLogsSpecs(folder, tee=std.ALL)
            args = ("-c", f"import sys; print('a\\nb', file=sys.{stream})")
            started = processes.start_processes("x", sys.executable, {0: args, 1: args}, {0: {}, 1: {}}, specs)
            started.wait()
            started.close()
        return sorted(shown.getvalue().splitlines())

    yield "tee: redirect_stdout", lambda: teed("stdout")
    yield "tee: redirect_stderr", lambda: teed("stderr")
    for ranks in [(0, 1), (1, 2), (0,), (0, 1, 2), ()]:
        yield (
            f"_validate_full_rank: {ranks}",
            lambda ranks=ranks: api._validate_full_rank(dict.fromkeys(ranks), 2, "it"),
        )
    yield "start_processes: keys of args", lambda: start({1: ()}, {0: {}})
    yield "start_processes: keys of envs", lambda: start({0: ()}, {1: {}})
    yield "start_processes: more args than envs", lambda: start({0: (), 1: ()}, {0: {}})

    caught = processes.SignalException("stop", 15)
    yield "SignalException", lambda: (caught.sigval, str(caught), isinstance(caught, Exception))
    yield "get_std_cm: no file", lambda: type(api.get_std_cm("", redirects.redirect_stdout)).__name__
    yield "redirect: another stream", lambda: redirects.redirect("stdin", "/dev/null").__enter__()

    failure = errors.ProcessFailure
    yield "ProcessFailure: a signal", lambda: dataclasses.astuple(failure(1, 22, -15, "/none"))[:6]
    exited = failure(1, 22, 3, "")
    yield "ProcessFailure: an exit code", lambda: (exited.error_file_data, exited.error_file, type(exited.message))
    yield "ProcessFailure: its signal", lambda: [failure(1, 22, code, "").signal_name() for code in (-9, -999, 0, 9)]

    def from_file(content: Any) -> Any:
        with tempfile.NamedTemporaryFile("w") as file:
            json.dump(content, file)
            file.flush()
            made = failure(0, 1, 1, file.name)
            return made.message, made.timestamp, made.error_file == file.name

    whole = {"message": {"message": "E: x", "extraInfo": {"py_callstack": "T", "timestamp": "1717171717"}}}
    yield "ProcessFailure: an error file", lambda: from_file(whole)
    yield "ProcessFailure: the older form", lambda: from_file({"message": "text", "timestamp": 12})

    def first(*times: int) -> Any:
        failures = {}
        for rank, at in enumerate(times):
            failures[rank] = failure(rank, 100 + rank, 1, "")
            failures[rank].timestamp = at
        return errors.ChildFailedError("x", failures).get_first_failure()[0]

    yield "ChildFailedError: the first", lambda: (first(5, 3, 4), first(3, 3, 4))
    yield "ChildFailedError: without failures", lambda: errors.ChildFailedError("x", {})
    for error in [ValueError("x"), SystemExit(0), SystemExit(3), SystemExit("text"), KeyboardInterrupt()]:
        yield f"record: {error!r}", lambda error=error: recorded(errors, error)
    yield "record: a return", lambda: errors.record(lambda: 5)()


_DESTINATIONS = (
    "stdouts",
    "stderrs",
    "tee_stdouts",
    "tee_stderrs",
    "error_files",
    "filtered_stdout",
    "filtered_stderr",
)


def waits_within(wait: Callable[..., Any], *args: Any) -> Any:
    """Return what it returns, and whether it waited at least and at most as long as the arguments say."""
    began = time.monotonic()
    returned = wait(*args)
    bounds = args[0] if args else (0, 0.1)
    least = bounds[0] if isinstance(bounds, tuple) else bounds
    return returned, least <= time.monotonic() - began + 0.001 < 5


def logger_facts(events: Any, destination: str) -> Any:
    made = events._get_or_create_logger(destination)
    handlers = [
        next(each.__name__ for each in type(handler).__mro__ if each.__module__ == "logging")
        for handler in made.handlers
    ]
    return made.name, made.level, made.propagate, handlers, made is events._get_or_create_logger(destination)


def recorded(errors: Any, error: BaseException) -> Any:
    """What comes out of a recorded function, and whether an error file was written."""

    def main() -> None:
        raise error

    with tempfile.TemporaryDirectory() as folder:
        path = os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(folder, "error.json")
        try:
            came = repr(errors.record(main)())
        except BaseException as raised:
            came = repr(raised)
        finally:
            del os.environ["TORCHELASTIC_ERROR_FILE"]
        return came, os.path.exists(path)


def other_questions(home: str) -> Iterator[Question]:
    timer = importlib.import_module(f"{home}.timer")
    events = importlib.import_module(f"{home}.events")
    metrics = importlib.import_module(f"{home}.metrics")
    utils = importlib.import_module(f"{home}.utils")
    state = importlib.import_module(f"{home}.utils.process_state")
    level = importlib.import_module(f"{home}.utils.log_level")
    health = importlib.import_module(f"{home}.agent.server.health_check_server")

    request = timer.TimerRequest
    yield "TimerRequest: equality", lambda: [request(1, "a", 2.0) == request(*each) for each in _REQUESTS]
    file_request = timer.FileTimerRequest
    yield "FileTimerRequest: equality", lambda: [file_request(1, "a", 2.0) == file_request(*each) for each in _REQUESTS]
    yield "FileTimerRequest: its line", lambda: json.loads(file_request(7, "a", 2.5, 9).to_json())
    yield "FileTimerRequest: without a signal", lambda: json.loads(file_request(7, "a", -1).to_json())
    yield "expires: without a client", lambda: timer.expires(1).__enter__()
    for pid in (os.getpid(), 2**22 + 1):
        yield (
            f"FileTimerServer.is_process_running: {pid == os.getpid()}",
            lambda pid=pid: timer.FileTimerServer.is_process_running(pid),
        )
    for name in ("TimerClient", "TimerServer"):
        yield f"{name}: is abstract", lambda name=name: getattr(timer, name)()

    event = events.Event("name", events.EventSource.AGENT)
    yield "Event: defaults", lambda: (event.timestamp, event.metadata, json.loads(event.serialize()))
    yield "Event: there and back", lambda: events.Event.deserialize(event.serialize()) == event
    yield "_get_or_create_logger", lambda: logger_facts(events, "null")
    yield "_get_or_create_logger: console", lambda: logger_facts(events, "console")
    yield "_get_or_create_logger: the default", lambda: events._get_or_create_logger().name
    yield "_get_or_create_logger: unknown", lambda: events._get_or_create_logger("unknown")
    yield "EventSource", lambda: [(each.name, each.value) for each in events.EventSource]
    yield "NodeState", lambda: [(each.name, each.value) for each in events.NodeState]
    yield "record: to null", lambda: events.record(event)
    yield "record: to an unknown handler", lambda: events.record(event, "unknown")

    yield "MetricData", lambda: metrics.MetricData._fields
    yield "MetricHandler: is abstract", lambda: metrics.MetricHandler()
    name_of = importlib.import_module(f"{home}.metrics.api")._get_metric_name
    yield "_get_metric_name", lambda: [name_of(each) for each in (outcome, Store.get, len, SharedStore().wait)]
    yield "MetricsConfig", lambda: (metrics.MetricsConfig().params, metrics.MetricsConfig({"a": "b"}).params)
    yield "put_metric: no handler", lambda: metrics.put_metric("x", 1)
    yield "get_elapsed_time_ms", lambda: type(metrics.get_elapsed_time_ms(0.0)).__name__
    yield "getStream", lambda: type(metrics.getStream("group")).__name__

    os.environ["CATALOGUE"] = "there"
    yield "get_env_variable_or_raise", lambda: utils.get_env_variable_or_raise("CATALOGUE")
    yield "get_env_variable_or_raise: missing", lambda: utils.get_env_variable_or_raise("CATALOGUE_MISSING")
    yield "macros: the name", lambda: utils.macros.local_rank
    for args in (["${local_rank}", "a${local_rank}b", "x"], ["$local_rank"], [3, None], ["${other}", "$HOME"], ["$$"]):
        yield f"macros.substitute({args})", lambda args=args: utils.macros.substitute(args, "4")
    yield "get_log_level", level.get_log_level
    yield "read_proc_state: no process", lambda: state.read_proc_state(2**22 + 1)
    yield "read_proc_state: this one", lambda: state.read_proc_state(os.getpid())
    yield "is_uninterruptible_state", lambda: [state.is_uninterruptible_state(each) for each in ("D", "R", "S", None)]

    data = importlib.import_module(f"{home}.utils.data")

    def epochs(start: int) -> list[int]:
        return list(data.CyclingIterator(3, lambda epoch: iter([epoch, epoch * 10]), start))

    yield "CyclingIterator", lambda: (epochs(0), epochs(1), epochs(3))

    server = health.create_healthcheck_server(lambda: 1, 0, 60)
    yield "HealthCheckServer", lambda: (type(server).__name__, server.alive_callback())


_REQUESTS = [(1, "a", 2.0), (2, "a", 2.0), (1, "b", 2.0), (1, "a", 3.0)]


def launcher_questions(home: str, run: str, numa: str) -> Iterator[Question]:
    launcher = importlib.import_module("torch.distributed.launcher" if home.startswith("torch") else f"{home}.launcher")
    torchrun = importlib.import_module(run)
    binding = importlib.import_module(numa)
    config = launcher.LaunchConfig

    yield "LaunchConfig: a negative shutdown_timeout", lambda: config(1, 1, 1, shutdown_timeout=-1)
    for given in [{}, {"rdzv_timeout": 5}, {"rdzv_configs": {"timeout": 3}}, {"rdzv_timeout": 0}]:
        yield f"LaunchConfig: {given}", lambda given=given: config(1, 1, 1, **given).rdzv_configs
    for text in ["1", "1:4", "2:2", "1:2:3", "", "x", "1:", ":1", "0", "4:1", " 1"]:
        yield f"parse_min_max_nnodes({text!r})", lambda text=text: torchrun.parse_min_max_nnodes(text)
    for text in ["1", "4", "1.5", "0", "-1"]:
        yield f"determine_local_world_size({text!r})", lambda text=text: torchrun.determine_local_world_size(text)
    for line in _ENDPOINTS:
        yield (
            f"get_rdzv_endpoint: {line}",
            lambda line=line: torchrun.get_rdzv_endpoint(torchrun.parse_args([*line.split(), "t.py"])),
        )
    for line in _LINES:
        yield f"config_from_args: {line}", lambda line=line: configured(torchrun, line, _FIELDS)
        yield f"endpoint: {line}", lambda line=line: configured(torchrun, line, _MEETING)
    for line in _REJECTED:
        yield f"main: {line}", lambda line=line: torchrun.main([*line.split(), "--no-python", "true"])
    yield "main: nothing", lambda: torchrun.main([])
    yield "AffinityMode", lambda: [(each.name, each.value) for each in binding.AffinityMode]
    options = binding.NumaOptions(binding.AffinityMode.NODE)
    yield "NumaOptions: the default", lambda: options.should_fall_back_if_binding_fails
    yield "NumaOptions: cannot be changed", lambda: setattr(options, "affinity_mode", 1)


_ENDPOINTS = [
    "--rdzv-backend=static --master-addr=h --master-port=5",
    "--rdzv-backend=static --rdzv-endpoint=h:5",
    "--rdzv-backend=c10d --rdzv-endpoint=h:5",
    "--rdzv-backend=c10d",
]
_REJECTED = [
    "--nproc-per-node foo",
    "--nproc-per-node 1.5",
    "--nproc-per-node 0",
    "--nproc-per-node",
    "--nproc-per-node gpu",
    "--nproc-per-node xpu",
    "--nnodes x",
    "--nnodes 1:",
    "--nnodes 1:2:3",
    "--nnodes 0",
    "--nnodes 3:2",
    "--max-restarts -1",
    "--max-restarts x",
    "--rdzv-conf foo",
    "--rdzv-conf a=",
    "--rdzv-backend unknown --rdzv-endpoint h:1",
    "--rdzv-backend c10d --rdzv-endpoint h:x --nnodes 2",
    "-m",
    "--unknown 3",
    "--start-method x",
    "--redirects 9",
    "--tee x",
    "--local-ranks-filter a",
    "--monitor-interval x",
    "--monitor-interval 0",
    "--numa-binding x",
    "--shutdown-timeout -1",
    "--shutdown-timeout x",
    "--logs-specs unknown",
    "--event-log-handler unknown",
    "--node-rank x",
    "--master-port x",
    "--log-dir /etc/passwd",
]
_LINES = [
    "t.py",
    "t.py -x --lr 3",
    "--nproc-per-node 3 --max-restarts 2 --rdzv-id j --role r t.py",
    "-m pkg.mod a",
    "--no-python prog a",
    "--run-path t.py a",
    "-m --no-python pkg",
    "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:1 --rdzv-id j t.py",
    "--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint h:1 --rdzv-id j --rdzv-conf a=1,b=2 t.py",
    "--nnodes 2 --node-rank 1 --master-addr h --master-port 9 --rdzv-id j t.py",
    "--nnodes 2 --node-rank 1 --master-addr h --rdzv-id j t.py",
    "--nnodes 0 t.py",
    "--nnodes 3:2 t.py",
    "--max-restarts -1 t.py",
    "--master-port 7 t.py",
    "--signals-to-handle SIGTERM --shutdown-timeout 5 --virtual-local-rank --local-addr h t.py",
    "--duplicate-stdout-filters a,,b,c --duplicate-stderr-filters x --start-method fork --monitor-interval 2 t.py",
    "--log-dir /dev/null -r 3 -t 1 --local-ranks-filter 0 t.py",
    "--numa-binding node t.py",
    "--standalone t.py",
    "--event-log-handler console t.py",
]
_MEETING = ["run_id", "rdzv_endpoint", "rdzv_backend", "rdzv_configs"]
_FIELDS = [
    *("min_nodes", "max_nodes", "nproc_per_node", "role"),
    *("max_restarts", "monitor_interval", "start_method", "log_line_prefix_template", "local_addr"),
    *("event_log_handler", "signals_to_handle", "duplicate_stdout_filters", "duplicate_stderr_filters"),
    *("virtual_local_rank", "shutdown_timeout"),
]


def configured(torchrun: Any, line: str, names: list[str]) -> Any:
    """The config, the command and its arguments."""
    made, command, args = torchrun.config_from_args(torchrun.parse_args(line.split()))
    fields = {name: getattr(made, name) for name in names}
    fields["numa"] = made.numa_options and made.numa_options.affinity_mode.value
    name = command if isinstance(command, str) else command.__name__
    return {**fields, "command": name.replace(sys.executable, "<python>"), "args": list(args)}


def main(root: str) -> None:
    """Answer everything."""
    os.environ["OMP_NUM_THREADS"] = "1"  # so that neither launcher sets it and prints a note
    home = "torch.distributed.elastic" if root == "torch" else root
    run = "torch.distributed.run" if root == "torch" else f"{root}.run"
    numa = "torch.numa.binding" if root == "torch" else f"{root}.numa.binding"
    answers: dict[str, str] = {}
    for questions in (
        agent_questions(home),
        rendezvous_questions(home),
        multiprocessing_questions(home),
        other_questions(home),
        launcher_questions(home, run, numa),
    ):
        for question, ask in questions:
            assert question not in answers, f"{question} is a duplicate"
            answers[question] = outcome(ask)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
