"""One agent of the lane: ``launch`` as the command line calls it, told by one argument of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tenax.launcher._config import LaunchConfig
from tenax.launcher.api import launch


def main() -> int:
    told = json.loads(sys.argv[1])
    config = LaunchConfig(
        *told["nodes"],
        1,
        run_id=told["run_id"],
        rdzv_backend="etcd",
        rdzv_endpoint=told["endpoint"],
        rdzv_configs=told["conf"],
        max_restarts=told["max_restarts"],
        shutdown_timeout=told["grace_s"],
        local_addr=told["local_addr"],
    )
    script = str(Path(__file__).parent / "worker_main.py")
    return launch(config, sys.executable, [script, *(["deaf"] if told["deaf"] else [])])


if __name__ == "__main__":
    sys.exit(main())
