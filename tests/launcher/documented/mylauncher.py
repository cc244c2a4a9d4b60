"""The older launcher, from the documents of TorchElastic 0.2, with its placeholders filled in."""

import sys

from mymetrics import MyMetricHandler
from myrdzv import MyRendezvousHandler

import tenax.metrics as metrics
from tenax.agent.server import WorkerSpec
from tenax.agent.server.local_elastic_agent import LocalElasticAgent


def trainer_entrypoint_fn(path):
    with open(path, "a") as file:
        file.write("trained\n")


if __name__ == "__main__":
    nproc_per_node, max_restarts, monitor_interval, start_method = 2, 0, 0.01, "spawn"
    rdzv_handler = MyRendezvousHandler({"run_id": "older"})
    spec = WorkerSpec(
        local_world_size=nproc_per_node,
        fn=trainer_entrypoint_fn,
        args=(sys.argv[1],),
        rdzv_handler=rdzv_handler,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
    )
    metrics.initialize_metrics()
    metrics.configure(MyMetricHandler(sys.argv[2]))

    elastic_agent = LocalElasticAgent(spec, start_method=start_method)
    try:
        elastic_agent.run(spec.role)
    except Exception as ex:
        print(f"the agent gave up: {ex}")
