"""One agent of a test's cluster: ``launch`` as the command line calls it, configured by one JSON argument."""

from __future__ import annotations

import json
import os
import sys

from tenax._core.policy import BudgetPolicy
from tenax.cli.run import launch
from tenax.launcher.api import LaunchConfig, elastic_launch, job_of


def identity() -> tuple[int, int]:
    """Return the global rank and the world size of a function worker."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main() -> int:
    options = json.loads(sys.argv[1])
    fatal = tuple(options["fatal_exit_codes"])
    config = LaunchConfig(
        *options["nodes"],
        options["workers"],
        run_id=options["run_id"],
        role=options["role"],
        rdzv_backend=options["backend"],
        rdzv_endpoint=options["endpoint"],
        rdzv_configs=options["conf"],
        max_restarts=options["max_restarts"],
        shutdown_timeout=options["grace_s"],
        restart_policy=BudgetPolicy(fatal_exit_codes=fatal) if fatal else None,
    )
    if options["script"] == "a function":
        print(json.dumps(elastic_launch(config, identity)()), flush=True)
        return 0
    script = options["script"] or os.path.join(os.path.dirname(__file__), "worker_main.py")
    return launch(job_of(config, sys.executable, [script]), os.environ, report_path=options["report"])


if __name__ == "__main__":
    sys.exit(main())
