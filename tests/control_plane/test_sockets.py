"""Worker sockets: their paths, their permissions, and their removal."""

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


def test_every_worker_gets_its_own_path(tmp_path: Path) -> None:
    """By its global rank, in a folder of this user; sockets and folder are removed at the end."""
    folder = tmp_path / "deep" / "job"
    sockets = open_sockets({VARIABLE: str(folder)})
    assert sockets is not None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sockets.env(3) == {VARIABLE: str(folder / "rank3")}
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "rank3"))
        assert os.path.lexists(folder / "rank3")
    sockets.env(3)
    assert not os.path.lexists(folder / "rank3")  # removed for the next generation
    with socket.socket(socket.AF_UNIX) as another:
        another.bind(str(folder / "rank3"))
    sockets.close()
    assert not folder.exists()


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    """With its other files."""
    (tmp_path / "other").write_text("data")
    tmp_path.chmod(0o700)
    sockets = open_sockets({VARIABLE: str(tmp_path)})
    assert sockets is not None
    sockets.env(0)
    sockets.close()
    assert os.listdir(tmp_path) == ["other"]


def test_a_served_socket_is_not_removed(tmp_path: Path) -> None:
    """A worker of another agent may have the rank now."""
    sockets = WorkerSockets(str(tmp_path / "job"))
    sockets.open()
    path = sockets.env(1)[VARIABLE]
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(path)
        served.listen()
        sockets.close()
        assert os.path.lexists(path)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write_to_is_rejected(tmp_path: Path, mode: int) -> None:
    """Another user could listen at a worker's path. Nothing is created in the folder."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(RequestRefused, match=f"other users can write to {str(folder)!r}; "):
        open_sockets({VARIABLE: str(folder)})
    assert os.listdir(folder) == []


def test_the_variable_names_a_folder(tmp_path: Path) -> None:
    """Not a file, and not a path that is too long. Unset or empty: there are no sockets."""
    assert socket_folder({}) == socket_folder({VARIABLE: ""}) == ""
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="which is not a folder; expected a folder for the workers' sockets"):
        socket_folder({VARIABLE: str(tmp_path / "file")})
    with pytest.raises(ValueError, match=r"which is too long; expected at most 9[51] bytes"):
        socket_folder({VARIABLE: "/tmp/" + "x" * 100})


def test_inside_a_worker_the_variable_is_its_own_socket(tmp_path: Path) -> None:
    """A launcher that runs in a worker puts its workers' sockets next to it."""
    path = str(tmp_path / "rank0")
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(path)
        assert socket_folder({VARIABLE: path}) == f"{path}.d"
