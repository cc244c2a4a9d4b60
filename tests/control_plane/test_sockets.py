"""Worker sockets: where they are, whose they are, and that they go."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from kit.processes import on_linux
from tenax._io.interfaces import RequestRefused
from tenax.control_plane._sockets import VARIABLE, WorkerSockets, open_sockets, socket_folder

pytestmark = [on_linux, pytest.mark.unit]


def test_every_worker_gets_a_path_of_its_own(tmp_path: Path) -> None:
    """By its global rank, in a folder of this user alone; sockets and folder go at the end."""
    folder = tmp_path / "deep" / "job"
    sockets = open_sockets({VARIABLE: str(folder)})
    assert sockets is not None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sockets.env(3) == {VARIABLE: str(folder / "rank3")}
    with socket.socket(socket.AF_UNIX) as left_by_a_killed_worker:
        left_by_a_killed_worker.bind(str(folder / "rank3"))
        assert os.path.lexists(folder / "rank3")
    sockets.env(3)
    assert not os.path.lexists(folder / "rank3")  # the next generation finds none
    with socket.socket(socket.AF_UNIX) as another:
        another.bind(str(folder / "rank3"))
    sockets.close()
    assert not folder.exists()


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    """With whatever else is in it."""
    (tmp_path / "precious").write_text("data")
    tmp_path.chmod(0o700)
    sockets = open_sockets({VARIABLE: str(tmp_path)})
    assert sockets is not None
    sockets.env(0)
    sockets.close()
    assert os.listdir(tmp_path) == ["precious"]


def test_a_rank_that_went_to_another_agent_is_left_alone(tmp_path: Path) -> None:
    """Its socket is being served."""
    sockets = WorkerSockets(str(tmp_path / "job"))
    sockets.open()
    path = sockets.env(1)[VARIABLE]
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(path)
        served.listen()
        sockets.close()
        assert os.path.lexists(path)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_of_everybody_is_not_used(tmp_path: Path, mode: int) -> None:
    """Another user could answer in a worker's place: the folder is refused, and nothing is made in it."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(RequestRefused, match=f"others may write to {str(folder)!r}; "):
        open_sockets({VARIABLE: str(folder)})
    assert os.listdir(folder) == []


def test_the_variable_names_a_folder(tmp_path: Path) -> None:
    """Not a file, not a path that is too long; unset or empty: nobody can be asked."""
    assert socket_folder({}) == socket_folder({VARIABLE: ""}) == ""
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="which is not a folder; name one for the workers' sockets"):
        socket_folder({VARIABLE: str(tmp_path / "file")})
    with pytest.raises(ValueError, match=r"too long for a folder of sockets; expected at most 9[51] bytes"):
        socket_folder({VARIABLE: "/tmp/" + "x" * 100})


def test_inside_a_worker_the_variable_is_its_own_socket(tmp_path: Path) -> None:
    """A launcher that runs in a worker puts its workers' sockets next to it."""
    path = str(tmp_path / "rank0")
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(path)
        assert socket_folder({VARIABLE: path}) == f"{path}.d"
