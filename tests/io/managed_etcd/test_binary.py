"""Which etcd program is used, and what is said when there is none that can be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes import Program
from tenax._io.etcd.binary import EtcdUnusable, find_etcd, judge_version, server_environ

from .kit import control_hosts

_TRIES = """
    import sys
    from tenax._io.etcd.managed import ManagedMember, ManagedSettings
    from tenax._io.loop import Loop

    loop, said = Loop(), []
    settings = ManagedSettings((sys.argv[1],), "run", data_root=sys.argv[2])
    member = ManagedMember(loop, settings, said.append, said.append)
    member.start()
    loop.next_event(lambda: loop.now() if said else None)
    print(said[0], flush=True)
    member.close()
"""


def _script(folder: Path, text: str) -> Path:
    script = folder / "etcd"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o700)
    return script


def test_where_it_is_looked_for(tmp_path: Path) -> None:
    """The variables in their order, then PATH, then beside this Python."""
    places = {}
    for place in ("first", "second", "path"):
        (tmp_path / place).mkdir()
        places[place] = str(_script(tmp_path / place, "exit 0"))
    environ = {"PATH": str(tmp_path / "path")}
    assert find_etcd(environ) == places["path"]
    assert find_etcd({**environ, "TENAX_ETCD": places["second"]}) == places["second"]
    both = {"TENAX_ETCD": places["second"], "TORCHELASTIC_ETCD_BINARY_PATH": places["first"]}
    assert find_etcd({**environ, **both}) == places["first"]
    assert find_etcd({"PATH": str(tmp_path)}, beside=str(tmp_path / "second" / "python")) == places["second"]


def test_a_program_that_was_named_is_not_passed_over() -> None:
    """There may be another on PATH; the user did not mean that one."""
    with pytest.raises(
        EtcdUnusable, match=r"TENAX_ETCD is '/none/etcd', which is not an executable program; change or unset it"
    ):
        find_etcd({**os.environ, "TENAX_ETCD": "/none/etcd"})


def test_there_is_none(tmp_path: Path) -> None:
    """The sentence says how to get one."""
    with pytest.raises(EtcdUnusable, match=r"found no etcd program .*apt-get install etcd-server.*, or set TENAX_ETCD"):
        find_etcd({"PATH": str(tmp_path)}, beside=str(tmp_path / "python"))


@pytest.mark.parametrize(
    ("printed", "number"),
    [("etcd Version: 3.4.23\nGit SHA: x", (3, 4, 23)), ("etcd Version: 3.6.0-rc.1", (3, 6, 0))],
)
def test_versions_that_can_be_used(printed: str, number: tuple[int, int, int]) -> None:
    version = judge_version("/bin/etcd", printed)
    assert (version.number, version.warning) == (number, "")


def test_versions_that_can_not_be_used() -> None:
    """What was found, what is needed."""
    with pytest.raises(EtcdUnusable, match=r"/bin/etcd is etcd 3\.3\.25; tenax needs 3\.4 or later"):
        judge_version("/bin/etcd", "etcd Version: 3.3.25\n")
    with pytest.raises(EtcdUnusable, match=r"--version printed 'hello'; expected 'etcd Version: 3\.4' or later"):
        judge_version("/bin/etcd", "hello\nworld")


@pytest.mark.parametrize("number", ["3.5.0", "3.5.1", "3.5.2"])
def test_versions_with_a_warning(number: str) -> None:
    assert (
        "does not recommend 3.5.0 to 3.5.2 for production"
        in judge_version("/bin/etcd", f"etcd Version: {number}").warning
    )


def test_the_sites_own_settings_do_not_reach_our_server() -> None:
    """Each ETCD_ variable would stand in for a flag, and a proxy would stand between the members."""
    found = server_environ({"PATH": "/bin", "ETCD_NAME": "theirs", "HTTPS_PROXY": "http://p", "http_proxy": "http://p"})
    assert found["PATH"] == "/bin"
    assert not {"ETCD_NAME", "HTTPS_PROXY", "http_proxy"} & set(found)


def test_a_member_says_so(program: Callable[..., Program], tmp_path: Path) -> None:
    """The wrong version, by variable; nothing is left in the data root."""
    script = _script(tmp_path, 'echo "etcd Version: 3.3.25"')
    tries = program(_TRIES, control_hosts(1)[0], tmp_path / "data", env={"TENAX_ETCD": str(script)})
    assert tries.pipe.line().startswith(f"{script} is etcd 3.3.25; tenax needs 3.4 or later; install etcd")
    assert tries.wait() == 0
    assert not list((tmp_path / "data").iterdir())


def test_a_member_says_that_there_is_none(program: Callable[..., Program], tmp_path: Path) -> None:
    tries = program(_TRIES, control_hosts(1)[0], tmp_path / "data", env={"TENAX_ETCD": "/none/etcd"})
    assert tries.pipe.line().startswith("TENAX_ETCD is '/none/etcd', which is not an executable program")
    assert tries.wait() == 0
