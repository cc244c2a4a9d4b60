"""Another user of the host against a run with default flags: nothing can be read, joined or stopped."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable

import pytest

from kit.processes import needs_root
from tenax._core.link import wire
from tenax._core.requests import LogsRequest, StatusRequest, StopRequest
from tenax._engines.secret import user_secret
from tenax._engines.tcp.operator import AccessDenied, connect_to_agent, connect_to_coordinator
from tenax._io.endpoint import literal

from .kit import Operator, exchange
from .test_many_nodes import start

OTHER_USER = 12345


def as_another_user(attack: Callable[[], None]) -> None:
    """Run it in a child process of another user. Modules are loaded before: their files may be private too."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            attack()
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-60_000:])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        failed = file.read().decode()
    os.waitpid(child, 0)
    assert not failed, failed


def handshake(endpoint: str, hello: wire.Hello, secret: bytes) -> tuple[bytes, bytes]:
    """Return all bytes of the coordinator's two answers."""
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), 30.0) as sock:
        sock.sendall(wire.encode(hello))
        challenge = sock.recv(4096)
        nonce = wire.decode_from_server(challenge[4:]).nonce  # type: ignore[union-attr]
        who = "operator" if hello.is_operator else "agent"
        sock.sendall(wire.encode(wire.Proof(wire.prove(secret, who, hello, nonce))))
        return challenge, sock.recv(4096)


@needs_root
def test_another_user_cannot_read_join_or_stop_a_run_with_default_flags(operator: Operator) -> None:
    """Even if the attacker knows the run id. The run is not affected."""
    serving, _ = start(operator)
    workers = operator.cluster.hub.generation(2)
    endpoint = operator.cluster.endpoint
    host, _, port = endpoint.rpartition(":")
    sockets, control_socket = operator.sockets, operator.control_socket(serving)
    requests = [wire.encode(wire.Ask(1, request)) for request in (StatusRequest(), LogsRequest("0"), StopRequest("x"))]
    assert len(user_secret({"TENAX_PRIVATE_DIR": sockets}, create=False)) == 32
    handshake(endpoint, wire.Hello(wire.VERSION, "run", "first", b"n" * 16), b"")  # loads what the attack imports

    def attack() -> None:
        for path in (sockets, os.path.join(sockets, "secret")):
            with pytest.raises(PermissionError):
                os.listdir(path) if path == sockets else os.open(path, os.O_RDONLY)
        with pytest.raises(OSError, match="cannot store the secret of this user in"):
            user_secret({"TENAX_PRIVATE_DIR": sockets}, create=False)
        with pytest.raises(Exception, match="Permission denied"):
            connect_to_agent(control_socket)
        answers = set()
        for run_id in ("run", "another"):
            for secret in (b"", b"a guess", os.urandom(32)):
                for is_operator in (False, True):
                    nonce = os.urandom(wire.NONCE_BYTES)
                    hello = wire.Hello(wire.VERSION, run_id, "attacker", nonce, is_operator)
                    challenge, answer = handshake(endpoint, hello, secret)
                    assert b"run" not in challenge + answer, "the run id"
                    answers.add(answer)
        assert answers == {wire.encode(wire.Refused("", True, wire.VERSION))}
        for request in requests:
            assert exchange(endpoint, request) == b"", "a request without a handshake closes the connection"
        with pytest.raises(AccessDenied):
            connect_to_coordinator(literal(host, int(port)), "run", b"")

    as_another_user(attack)
    status = operator.json("status", "run", "--endpoint", endpoint)
    assert (status["generation"], len(status["nodes"])) == (1, 2), "its own user operates it without a flag"
    operator.cluster.finish(workers)
