"""One agent of the lane: ``launch`` as the command line calls it, configured by one JSON argument."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tenax.cli.run import launch
from tenax.launcher.api import LaunchConfig, job_of


def main() -> int:
    options = json.loads(sys.argv[1])
    config = LaunchConfig(
        *options["nodes"],
        1,
        run_id=options["run_id"],
        rdzv_backend="etcd",
        rdzv_endpoint=options["endpoint"],
        rdzv_configs=options["conf"],
        max_restarts=options["max_restarts"],
        shutdown_timeout=options["grace_s"],
        local_addr=options["local_addr"],
    )
    script = str(Path(__file__).parent / "worker_main.py")
    args = [script, *(["ignore-sigterm"] if options["ignores_sigterm"] else [])]
    return launch(job_of(config, sys.executable, args), os.environ)


if __name__ == "__main__":
    sys.exit(main())
