import subprocess
from .cluster import Cluster
from .lab import Lab
import pytest

def test_reset(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3", script="/tmp/exp/slow_worker.py", words=("1.0",))
    agents = cluster.start(*lab)
    whole = cluster.until_at_work(3)
    print(subprocess.run([*lab[2].network.enter, "ss", "-K", "dport", "=", ":29400"], capture_output=True, text=True))
    cluster.until(lambda: len(cluster.history.generations)>1, "another")
    g = cluster.until_at_work(3, after=whole)
    cluster.finish()
