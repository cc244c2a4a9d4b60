"""Private names of TorchElastic that two large launchers import."""

from __future__ import annotations

import socket

from tenax.agent.server.api import _RoleInstanceInfo
from tenax.launcher.api import _get_entrypoint_name
from tenax.multiprocessing.api import SubprocessHandler
from tenax.rendezvous import RendezvousHandlerRegistry, c10d_rendezvous_backend
from tenax.rendezvous._engine_handler import LocalRendezvousHandler
from tenax.rendezvous.utils import _matches_machine_hostname


def test_role_instance_info_can_be_sorted_and_searched() -> None:
    """Launchers sort the values of all agents and find their own role."""
    infos = [_RoleInstanceInfo("b", 0, 2), _RoleInstanceInfo("a", 2, 4), _RoleInstanceInfo("a", 1, 8)]
    again = [_RoleInstanceInfo.deserialize(each.serialize()) for each in infos]
    assert [(each.role, each.rank, each.local_world_size) for each in again] == [("b", 0, 2), ("a", 2, 4), ("a", 1, 8)]
    compare = _RoleInstanceInfo.compare
    assert (compare(infos[0], infos[1]), compare(infos[2], infos[1]), compare(infos[0], infos[0])) == (1, -1, 0)
    in_order = [infos[2], infos[1], infos[0]]
    assert _RoleInstanceInfo.find_role_boundaries(in_order, "a") == (0, 1)
    assert _RoleInstanceInfo.find_role_boundaries(in_order, "b") == (2, 2)
    assert _RoleInstanceInfo.find_role_boundaries(in_order, "c") == (-1, -2)


def test_a_registered_backend_can_be_removed() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("c10d", lambda params: LocalRendezvousHandler(params.run_id, backend="c10d"))
    del registry._registry["c10d"]
    assert "c10d" not in registry


def test_this_host_is_recognised_by_its_names() -> None:
    for name in ("localhost", socket.gethostname(), "127.0.0.1", "::1"):
        assert _matches_machine_hostname(name), name
    assert not _matches_machine_hostname("192.0.2.7")
    assert c10d_rendezvous_backend._matches_machine_hostname is _matches_machine_hostname


def test_create_backend_calls_the_replaceable_function_for_its_store() -> None:
    """It looks the function up in its module at every call, and passes only the parameters."""
    from inspect import signature

    assert list(signature(c10d_rendezvous_backend._create_tcp_store).parameters) == ["params"]
    assert "_create_tcp_store" in c10d_rendezvous_backend.create_backend.__code__.co_names


def test_private_names_can_be_imported() -> None:
    assert _get_entrypoint_name("python", ["-u", "train.py"]) == "train.py"
    assert SubprocessHandler.__name__ == "SubprocessHandler"
