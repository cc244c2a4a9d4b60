from __future__ import annotations
from collections.abc import Callable
from etcd_servers import EtcdCluster
from .kit import Cluster

def test_words(cluster: Cluster, make_etcd: Callable[..., EtcdCluster]) -> None:
    etcd = make_etcd(1, tls="mutual", users=True)
    cluster.use_etcd(etcd)
    certs = etcd.certificates
    assert certs
    cert, key = certs.strange_client
    tries = {
        "password": {"password": "wrong"},
        "nouser": {"user": "nobody"},
        "user without rights": {"user": "tenax", "password": "the user's password"},
        "strange": {"ssl_cert": cert, "ssl_cert_key": key},
        "ca": {"ca_cert": certs.strange_ca},
    }
    for name, conf in tries.items():
        (agent,) = cluster.start(conf={**conf, "join_timeout": 4})
        print(name, agent.wait(), agent)
    (agent,) = cluster.start(conf={"join_timeout": 3}, endpoint="127.9.9.9:2379,127.9.9.8:2379")
    print("none", agent.wait(), agent)
    conf = cluster.told["conf"]
    for k in ("ssl_cert","ssl_cert_key","ca_cert"): conf.pop(k)
    (agent,) = cluster.start(conf={"join_timeout": 3})
    print("plain", agent.wait(), agent)
    cluster.bench.leaves_within_s=1
