"""The launcher that TorchElastic's customization page prints, with its placeholders filled in."""

import argparse
import sys

from tenax.agent.server import WorkerSpec
from tenax.agent.server.local_elastic_agent import LocalElasticAgent
from tenax.rendezvous import RendezvousParameters
from tenax.rendezvous.registry import get_rendezvous_handler


def trainer_entrypoint_fn(exit_code, greeting=""):
    if exit_code:
        sys.exit(exit_code)
    return greeting


def parse_args(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc_per_node", type=int, default=1)
    parser.add_argument("--max_restarts", type=int, default=3)
    parser.add_argument("--monitor_interval", type=float, default=5)
    parser.add_argument("--backend", default="c10d")
    parser.add_argument("fn_args", nargs="*")
    return parser.parse_args(argv)


if __name__ == "__main__":
    args = parse_args(sys.argv[1:])
    rdzv_handler = get_rendezvous_handler(
        RendezvousParameters(backend=args.backend, endpoint="localhost:0", run_id="mine", min_nodes=1, max_nodes=1)
    )
    spec = WorkerSpec(
        local_world_size=args.nproc_per_node,
        fn=trainer_entrypoint_fn,
        args=(int(args.fn_args[0]), *args.fn_args[1:]),
        rdzv_handler=rdzv_handler,
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
    )

    agent = LocalElasticAgent(spec, start_method="spawn")
    try:
        run_result = agent.run()
        if run_result.is_failed():
            print(f"worker 0 failed with: {run_result.failures[0]}")
        else:
            print(f"worker 0 return value is: {run_result.return_values[0]}")
    except Exception as ex:
        print(f"the agent gave up: {ex}")
