"""Operator commands for runs of several nodes: from any node, or from elsewhere with the secret."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kit.cluster import Agent, etcd_conf
from kit.etcd import EtcdCluster
from tenax._core.link import wire
from tenax._core.messages import NodeInfo, NodeJoined
from tenax._core.requests import LogsRequest, StatusRequest
from tenax._engines.secret import user_secret
from tenax._engines.tcp.operator import AccessDenied, Declined, OperatorConnection, connect_to_coordinator
from tenax._io.endpoint import literal
from tenax._processes.py_spy import find_py_spy
from tenax._view.status import RunStatus

from .kit import Operator, greeting, self_signed

FAR = 1e6  # on the system's clock; a socket waits no longer than 30 s for it


def line_to(endpoint: str, secret: bytes = b"", run_id: str = "run") -> OperatorConnection:
    host, _, port = endpoint.rpartition(":")
    return connect_to_coordinator(literal(host, int(port)), run_id, secret)


def working(status: RunStatus) -> bool:
    return {node.state for node in status.nodes} == {"working"}


def start(operator: Operator, count: int = 2, **options: object) -> list[Agent]:
    agents = operator.cluster.start_in_order(count, **options)
    operator.until_found(*agents)
    operator.until_status(agents[0], lambda status: len(status.nodes) == count and working(status))
    return agents


def test_every_node_answers_for_the_run(operator: Operator) -> None:
    serving, other = start(operator)
    workers = operator.cluster.hub.generation(2)
    by_pid = [operator.json("status", str(agent.process.pid)) for agent in (serving, other)]
    for status in by_pid:
        assert [node["state"] for node in status["nodes"]] == ["working", "working"]
        assert [node.get("is_coordinator", False) for node in status["nodes"]].count(True) == 1
    (run,) = operator.json("ps")
    assert (run["run_id"], run["nodes"], run["workers"], len(run["pids"])) == ("run", 2, 2, 2)
    assert run["coordinator"] == f"at {operator.cluster.endpoint}"
    operator.cluster.finish(workers)


@pytest.mark.skipif(not find_py_spy(), reason="py-spy is not installed")
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, or the right to trace processes that are not children")
def test_py_spy_adds_native_frames(operator: Operator) -> None:
    """They do not tell workers apart."""
    start(operator)
    workers = operator.cluster.hub.generation(2)
    shown = operator.tenax("stacks", "run", "--native")
    assert shown.code == 0, shown
    assert shown.out.startswith("ranks 0, 1: at "), shown
    assert re.search(r"^    /\S+\.so\S* in \w+$", shown.out, re.MULTILINE), shown
    one = operator.tenax("stacks", "run", "--rank", "1", "--native")
    assert one.out.startswith(f"rank 1 (pid {workers[1].pid} on ")
    assert re.search(r'^    File "\S+\.so\S*" in \w+$', one.out, re.MULTILINE), one
    operator.cluster.finish(workers)


def test_the_stacks_of_all_workers_are_shown(operator: Operator) -> None:
    """Those at one location once; of one rank all threads."""
    start(operator)
    workers = operator.cluster.hub.generation(2)
    shown = operator.tenax("stacks", "run")
    assert shown.code == 0, shown
    assert shown.out.startswith("ranks 0, 1: at ")
    assert " in <module>" in shown.out
    one = operator.tenax("stacks", "run", "--rank", "1")
    assert one.out.startswith(f"rank 1 (pid {workers[1].pid} on ")
    assert "Current thread 0x" in one.out
    assert [each["rank"] for each in operator.json("stacks", "run")] == [0, 1]
    missing = operator.tenax("stacks", "run", "--rank", "2")
    assert missing.code == 1
    assert "rank 2 does not run in the run 'run': generation 1 is running" in missing.err
    operator.cluster.finish(workers)


def test_a_node_is_drained_and_the_others_continue(operator: Operator) -> None:
    agents = start(operator, 3, nodes=(2, 3))
    first = operator.cluster.hub.generation(3)
    leaving = next(agent for agent in agents[1:] if agent.name == first[2].agent or agent.name == first[1].agent)
    rank = next(worker.rank for worker in first if worker.agent == leaving.name)
    done = operator.tenax("drain", str(rank), "run", "--yes", "--why", "many errors")
    assert done.code == 0
    assert done.out.startswith("draining ")
    workers = operator.cluster.hub.generation(2, 2)
    assert leaving.name not in {worker.agent for worker in workers}
    assert leaving.wait() == 130, "cancelled, by no signal"
    staying = next(agent for agent in agents if agent is not leaving)
    status = operator.until_status(staying, lambda status: working(status) and len(status.nodes) == 2)
    assert (status.generation, status.restarts_used, status.drains) == (2, 0, 1)
    texts = [event.text for event in status.events]
    assert not any("was lost" in text for text in texts), "it was asked to leave, and left"
    assert any(" left: " in text or text.endswith(" has left") for text in texts), texts
    missing = operator.tenax("drain", "unknown", "--yes")
    assert missing.code == 1
    assert "no node 'unknown'; known nodes: " in missing.err
    operator.cluster.finish(workers)


def test_an_unknown_node_is_rejected_before_the_confirmation(operator: Operator) -> None:
    """A name that the status does not show is known all the same."""
    (named,) = operator.cluster.start(env={"TENAX_NODE_NAME": "first-of-rack-7"})
    named.until_printed("this node serves the coordinator")
    operator.cluster.start()
    operator.until_found()
    status = operator.until_status(named, lambda status: len(status.nodes) == 2 and working(status))
    workers = operator.cluster.hub.generation(2)
    terminal = operator.terminal("drain", "vmm", columns=300)
    assert terminal.wait() == 1
    names = ", ".join(f"{node.name} (rank {node.rank})" for node in status.nodes)
    assert terminal.seen == f"tenax drain: no node 'vmm'; known nodes: {names}\r\n"
    terminal = operator.terminal("drain", "first-of-rack-7", columns=300)
    terminal.until("Continue? [y/N] ")
    first = next(node.name for node in status.nodes if node.is_coordinator)
    assert f"This drains {first} of the run 'run' and stops its worker; " in terminal.seen
    terminal.type(b"n\n")
    assert terminal.wait() == 1
    operator.cluster.finish(workers)


def test_stopping_a_run_without_workers_says_so(operator: Operator) -> None:
    (agent,) = operator.cluster.start(workers=2)
    operator.until_found(agent)
    terminal = operator.terminal("stop")
    terminal.until("Continue? [y/N] ")
    assert "This stops the run 'run', which has no running worker." in terminal.seen
    terminal.type(b"y\n")
    assert terminal.wait() == 0
    assert agent.wait() == 130


def test_stop_ends_every_node_as_cancelled(operator: Operator) -> None:
    agents = start(operator)
    operator.cluster.hub.generation(2)
    done = operator.tenax("stop", "run", "--endpoint", operator.cluster.endpoint, "--yes", "--wait", "--why", "enough")
    assert (done.code, done.out) == (0, "stopping the run on every node\n")
    for agent in agents:
        assert agent.wait() == 130
        assert "enough" in agent.text
    gone = operator.tenax("status", "run", "--endpoint", operator.cluster.endpoint)
    assert gone.code == 1
    assert f"no coordinator at {operator.cluster.endpoint}: Connection refused" in gone.err


def test_an_operators_restart_of_all_nodes_is_uncharged(operator: Operator) -> None:
    _, other = start(operator)
    operator.cluster.hub.generation(2)
    assert operator.tenax("restart", str(other.process.pid), "--yes").code == 0
    workers = operator.cluster.hub.generation(2, 2)
    status = operator.until_status(other, working)
    assert (status.generation, status.restarts_used, status.requests, status.max_restarts) == (2, 0, 1, 3)
    operator.cluster.finish(workers)


def test_an_endpoint_requires_the_secret(operator: Operator, tmp_path: Path) -> None:
    for name, content in (("right", "an open sesame of tests"), ("wrong", "a password of tests")):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
    start(operator, conf={"token_file": str(tmp_path / "right")})
    workers = operator.cluster.hub.generation(2)
    place = ("--endpoint", operator.cluster.endpoint)
    right, wrong = (("--rdzv-conf", f"token_file={tmp_path / name}") for name in ("right", "wrong"))
    assert operator.json("status", "run", *place, *right)["run_id"] == "run"
    assert (
        operator.json("status", "run", *place, env={"TENAX_RDZV_TOKEN": "an open sesame of tests"})["run_id"] == "run"
    )
    for words in ((*place, *wrong), place):
        done = operator.tenax("stop", "run", "--yes", *words)
        assert done.code == 1
        assert "denied access: it serves another run or has another secret" in done.err
        assert "sesame" not in done.err
    other = operator.tenax("stop", "walk", "--yes", *place, *right)
    assert other.code == 1
    assert other.err == done.err, "the message does not name the wrong one"
    assert operator.json("status", "run")["generation"] == 1  # the control socket needs no secret
    operator.cluster.finish(workers)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")
def test_a_run_with_tls_answers_operators_over_tls(operator: Operator, tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path, operator.cluster.endpoint.partition(":")[0])
    conf = {"ssl_cert": cert, "ssl_cert_key": key, "ca_cert": cert}
    start(operator, conf=conf)
    workers = operator.cluster.hub.generation(2)
    place = ("--endpoint", operator.cluster.endpoint)
    files = ("--rdzv-conf", ",".join(f"{name}={path}" for name, path in conf.items()))
    assert operator.json("status", "run", *place, *files)["run_id"] == "run"
    without = operator.tenax("status", "run", *place)
    assert without.code == 1
    assert "if the run uses TLS, add its files to --rdzv-conf" in without.err
    unknown = operator.tenax("status", "run", *place, "--rdzv-conf", f"ca_cert={cert}")
    assert unknown.code == 1, "a coordinator that checks nodes checks operators as well"
    operator.cluster.finish(workers)


def test_invalid_input_from_an_operator_does_not_affect_the_run(operator: Operator) -> None:
    serving, _ = start(operator, conf={"token": "a secret of tests"})
    workers = operator.cluster.hub.generation(2)
    endpoint = operator.cluster.endpoint
    nodes = {node.node_id for node in operator.until_status(serving, working).nodes}
    joined = wire.Message(NodeJoined(NodeInfo("intruder", "intruder")))
    for frame in (joined, wire.Beat(1), wire.Cancel("by force"), wire.Answer(1), greeting("run"), wire.Proof(b"")):
        line = line_to(endpoint, b"a secret of tests")
        line.send_frame(frame)
        line.until_closed(StatusRequest())
        line.close()
    host, _, port = endpoint.rpartition(":")
    for garbage in (b"\xff" * 64, wire.encode(wire.Ask(1, StatusRequest())), wire.encode(joined)):
        with socket.create_connection((host, int(port)), 30.0) as sock:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(4096) == b"", "a peer without the secret gets no answer"
    line = line_to(endpoint, b"a secret of tests")
    with pytest.raises(Declined, match="no node 'x'"):
        line.ask(LogsRequest("x"), 30.0)
    with pytest.raises(Declined, match="no node '999"):
        line.ask(LogsRequest("9" * 255), 30.0)
    status = msgspec.json.decode(line.ask(StatusRequest(), 30.0), type=RunStatus)
    line.close()
    assert {node.node_id for node in status.nodes} == nodes
    assert (status.generation, status.phase) == (1, "running")
    operator.cluster.finish(workers)


def test_a_peer_with_a_wrong_proof_is_rejected(operator: Operator, tmp_path: Path) -> None:
    start(operator)
    workers = operator.cluster.hub.generation(2)
    with pytest.raises(AccessDenied, match="another secret"):
        line_to(operator.cluster.endpoint, b"guess")
    if shutil.which("openssl") is not None:
        cert, _ = self_signed(tmp_path, operator.cluster.endpoint.partition(":")[0])
        tls = ("--rdzv-conf", f"ca_cert={cert}")
        done = operator.tenax("status", "run", "--endpoint", operator.cluster.endpoint, *tls)
        assert done.code == 1
        assert "TLS handshake failed" in done.err
    # The proof of a node does not let an operator in, nor the other way round.
    host, _, port = operator.cluster.endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), 30.0) as sock:
        line, hello = OperatorConnection(sock), greeting("run")
        line.send_frame(hello)
        challenge = line.receive(FAR)
        assert isinstance(challenge, wire.Challenge)
        line.send_frame(
            wire.Proof(
                wire.prove(user_secret({"TENAX_PRIVATE_DIR": operator.sockets}), "agent", hello, challenge.nonce)
            )
        )
        assert isinstance(line.receive(FAR), wire.Refused)
    operator.cluster.finish(workers)


def test_through_etcd_the_leader_is_found(operator: Operator, etcd: EtcdCluster, tmp_path: Path) -> None:
    operator.cluster.use_etcd(etcd, token="a secret of tests")
    run_id = operator.cluster.options["run_id"]
    agents = operator.cluster.start(2)
    operator.until_found(*agents)
    workers = operator.cluster.hub.generation(2)
    status = operator.until_status(agents[1], working)
    assert len(status.nodes) == 2
    place = ("--endpoint", etcd.endpoints, "--rdzv-backend", "etcd")
    found = operator.json("status", run_id, *place, env={"TENAX_RDZV_TOKEN": "a secret of tests"})
    assert [node["state"] for node in found["nodes"]] == ["working", "working"]
    wrong = operator.tenax("stop", run_id, "--yes", *place)
    assert wrong.code == 1
    assert "denied access: it serves another run or has another secret" in wrong.err
    missing = operator.tenax("status", f"{run_id}-not", *place)
    assert missing.code == 1
    assert "has no coordinator for it" in missing.err
    (run,) = operator.json("ps")
    assert (run["nodes"], run["coordinator"]) == (2, f"on {os.uname().nodename}")
    operator.cluster.finish(workers)


def test_through_an_open_etcd_a_run_without_a_secret_is_operated_on_its_nodes_only(
    operator: Operator, etcd: EtcdCluster
) -> None:
    """Any client of etcd can read the secret of the links there, so that secret does not admit operators."""
    operator.cluster.use_etcd(etcd)
    run_id = operator.cluster.options["run_id"]
    agents = operator.cluster.start(2)
    operator.until_found(*agents)
    workers = operator.cluster.hub.generation(2)
    rejected = operator.tenax("stop", run_id, "--yes", "--endpoint", etcd.endpoints, "--rdzv-backend", "etcd")
    assert rejected.code == 1
    assert "a run without a secret is operated only on its nodes" in rejected.err
    assert len(operator.json("status", run_id)["nodes"]) == 2
    operator.cluster.finish(workers)


def test_through_etcd_with_tls_and_users(
    operator: Operator, make_etcd: Callable[..., EtcdCluster], tmp_path: Path
) -> None:
    """An operator needs the same certificate, user name and password as a node; each missing one is named."""
    etcd = make_etcd(tls="mutual", users=True)
    operator.cluster.use_etcd(etcd)
    run_id = operator.cluster.options["run_id"]
    agents = operator.cluster.start(2)
    operator.until_found(*agents)
    workers = operator.cluster.hub.generation(2)
    place = ("--endpoint", etcd.endpoints, "--rdzv-backend", "etcd")

    def conf(**without: str) -> tuple[str, str]:
        settings = {**etcd_conf(etcd), **without}
        password = tmp_path / "password"
        password.write_text(settings.pop("password"))
        password.chmod(0o600)
        settings["password_file"] = str(password)
        return "--rdzv-conf", ",".join(f"{key}={value}" for key, value in settings.items() if value)

    found = operator.json("status", run_id, *place, *conf())
    assert [node["state"] for node in found["nodes"]] == ["working", "working"]
    for lack, sentence in (({"password": "wrong"}, "password"), ({"ssl_cert": "", "ssl_cert_key": ""}, "certificate")):
        done = operator.tenax("status", run_id, *place, *conf(**lack))
        assert done.code == 1, done
        assert sentence in done.err
    restarted = operator.tenax("restart", run_id, "--yes", *place, *conf())
    assert restarted.code == 0, restarted
    workers = operator.cluster.hub.generation(2, 2)
    operator.cluster.finish(workers)
