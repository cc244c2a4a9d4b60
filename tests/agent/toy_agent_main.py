"""A launcher for TorchElastic with its own agent; the first argument is the root of its imports.

Prints the events and metrics of each case as a line of JSON. They must be the same with the modules of torch and of
tenax.
"""

import importlib
import json
import logging
import os
import subprocess
import sys


def main(root: str, codes: list[list[int]], max_restarts: int) -> None:
    api = importlib.import_module(f"{root}.agent.server.api")
    metrics = importlib.import_module(f"{root}.metrics")
    handlers = importlib.import_module(f"{root}.events.handlers")
    rendezvous = importlib.import_module(f"{root}.rendezvous")
    errors = importlib.import_module(f"{root}.multiprocessing.errors")
    recorded = {"events": [], "metrics": []}

    class EventRecorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            event = json.loads(record.getMessage())
            nested = json.loads(event["metadata"]["metadata"])
            plain = {key: value[0] if isinstance(value, list) else value for key, value in nested.items()}
            keys = sorted(event["metadata"])
            what = {
                key: event["metadata"][key] for key in ("global_rank", "group_rank", "role", "state", "agent_restarts")
            }
            for key in ("local_rank", "role_rank", "role_world_size", "group_world_size", "entry_point"):
                what[key] = plain.get(key)
            recorded["events"].append([event["name"], event["source"], keys, what])

    class MetricRecorder(metrics.MetricHandler):
        def emit(self, metric_data) -> None:
            is_counted = metric_data.name.startswith("workers.")  # the others are durations
            recorded["metrics"].append([metric_data.group_name, metric_data.name, is_counted and metric_data.value])

    class Handler(rendezvous.RendezvousHandler):
        def get_backend(self):
            return "toy"

        def next_rendezvous(self):
            info = rendezvous.RendezvousStoreInfo("localhost", 1)
            return rendezvous.RendezvousInfo(Store(), 0, 1, info)

        def is_closed(self):
            return False

        def set_closed(self):
            pass

        def num_nodes_waiting(self):
            return 0

        def get_run_id(self):
            return "toy-run"

        def shutdown(self):
            return True

    class Toy(api.SimpleElasticAgent):
        starts = 0

        def _start_workers(self, worker_group):
            self.children = [subprocess.Popen(["sh", "-c", f"exit {code}"]) for code in codes[self.starts]]
            self.starts += 1
            return {rank: child.pid for rank, child in enumerate(self.children)}

        def _stop_workers(self, worker_group, *args, **kwargs):
            for child in self.children:
                child.wait()

        def _monitor_workers(self, worker_group):
            ended = {rank: child.wait() for rank, child in enumerate(self.children)}
            if any(ended.values()):
                failures = {
                    rank: errors.ProcessFailure(rank, self.children[rank].pid, code, "")
                    for rank, code in ended.items()
                    if code
                }
                return api.RunResult(api.WorkerState.FAILED, failures=failures)
            return api.RunResult(api.WorkerState.SUCCEEDED, return_values=dict.fromkeys(ended))

        def _shutdown(self, *args, **kwargs):
            pass

    handlers._log_handlers["recorder"] = EventRecorder()
    metrics.configure(MetricRecorder())
    spec = api.WorkerSpec(
        role="toy",
        local_world_size=len(codes[0]),
        entrypoint="/bin/sh",
        rdzv_handler=Handler(),
        max_restarts=max_restarts,
        monitor_interval=0.01,
        event_log_handler="recorder",
    )
    Toy(spec).run()
    print(json.dumps(recorded), flush=True)


class Store:
    """The part of a store that the agent of a single node needs."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self.timeout = None

    def set(self, key, value):
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key):
        return self._values[key]

    def multi_get(self, keys):
        return [self._values[key] for key in keys]

    def multi_set(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key, amount):
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def wait(self, keys, *timeout):
        pass

    def set_timeout(self, timeout):
        self.timeout = timeout


if __name__ == "__main__":
    importlib.import_module(f"{sys.argv[1]}.agent.server.api")  # once: torch takes seconds
    for case in json.loads(sys.argv[2]):
        if os.fork() == 0:
            main(sys.argv[1], *case)
            os._exit(0)
        assert os.wait()[1] == 0
