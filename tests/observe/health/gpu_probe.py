"""Prints the health of this machine's GPUs. A tool for people on a machine with GPUs, not a test.

python tests/observe/health/gpu_probe.py
"""

from __future__ import annotations

import json
import time
import urllib.request

from tenax.agent.server.health_check_server import create_gpu_healthcheck_server
from tenax.utils.gpu_health_check import create_gpu_health_check


def main() -> None:
    check = create_gpu_health_check()
    print("available:", check.enabled, check.why_not)
    for gpu in check.check():
        print(gpu)
    print("healthy:", check())
    server = create_gpu_healthcheck_server(lambda: int(time.time()), 0, 60)
    server.start()
    try:
        server.wait_for_first_check(60)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/healthz?format=json", timeout=10) as answer:
            print(answer.status, json.dumps(json.load(answer), indent=1))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
