import signal, pytest
from .cluster import Cluster
from .lab import Lab

@pytest.mark.parametrize("turn", range(6))
def test_kill(lab: Lab, turn) -> None:
    cluster = Cluster(lab, "2:3", nproc=4, words=("--beat-s", "0.001"))
    agents = cluster.start(*lab)
    whole = cluster.until_at_work(12)
    agents[2].send(signal.SIGKILL)
    fewer = cluster.until_at_work(8, after=whole)
    cluster.history.update()
    gap = fewer.first_born_at - max(w.last_at for w in whole.workers.values() if w.host == "node2")
    print("GAP", gap)
    with open("/tmp/exp/gaps","a") as f: f.write(f"kill {gap:.4f} {[w.alive_before for w in fewer.workers.values()]}\n")

@pytest.mark.parametrize("turn", range(2))
def test_in(lab: Lab, turn) -> None:
    cluster = Cluster(lab, "2:3", nproc=4, words=("--beat-s", "0.001"))
    agents = cluster.start(*lab)
    whole = cluster.until_at_work(12)
    lab[2].cut("in")
    fewer = cluster.until_at_work(8, after=whole)
    cluster.history.update()
    gap = fewer.first_born_at - max(w.last_at for w in whole.workers.values() if w.host == "node2")
    print("GAP", gap)
    with open("/tmp/exp/gaps","a") as f: f.write(f"in {gap:.4f} {[w.alive_before for w in fewer.workers.values()]}\n")
