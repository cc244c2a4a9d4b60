"""One agent of a test's cluster: ``launch`` as the command line calls it, told by one argument of JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tenax._core.policy import BudgetPolicy
from tenax.launcher._config import LaunchConfig
from tenax.launcher.api import elastic_launch, launch


def identity() -> tuple[int, int]:
    """What a function worker returns: its global rank and how many there are."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main() -> int:
    told = json.loads(sys.argv[1])
    fatal = tuple(told["fatal_exit_codes"])
    config = LaunchConfig(
        *told["nodes"],
        told["workers"],
        run_id=told["run_id"],
        role=told["role"],
        rdzv_backend=told["backend"],
        rdzv_endpoint=told["endpoint"],
        rdzv_configs=told["conf"],
        max_restarts=told["max_restarts"],
        shutdown_timeout=told["grace_s"],
        restart_policy=BudgetPolicy(fatal_exit_codes=fatal) if fatal else None,
    )
    if told["script"] == "a function":
        print(json.dumps(elastic_launch(config, identity)()), flush=True)
        return 0
    script = told["script"] or str(Path(__file__).parent / "worker_main.py")
    return launch(config, sys.executable, [script], report_path=told["report"])


if __name__ == "__main__":
    sys.exit(main())
