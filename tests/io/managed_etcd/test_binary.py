"""Which etcd program is used, and the messages if none is usable."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes import Program
from tenax._io.etcd.binary import EtcdUnusable, find_etcd, judge_version, server_environ

from .kit import control_hosts

_START_A_MEMBER = """
    import sys
    from tenax._engines.etcd.managed import ManagedMember, ManagedSettings
    from tenax._io.loop import Loop

    loop, messages = Loop(), []
    settings = ManagedSettings((sys.argv[1],), "run", data_root=sys.argv[2])
    member = ManagedMember(loop, settings, messages.append, messages.append)
    member.start()
    loop.next_event(lambda: loop.now() if messages else None)
    print(messages[0], flush=True)
    member.close()
"""


def _script(folder: Path, text: str) -> Path:
    script = folder / "etcd"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o700)
    return script


def test_the_program_is_searched_in_order(tmp_path: Path) -> None:
    """The variables, PATH, next to this Python."""
    paths = {}
    for folder in ("first", "second", "path"):
        (tmp_path / folder).mkdir()
        paths[folder] = str(_script(tmp_path / folder, "exit 0"))
    environ = {"PATH": str(tmp_path / "path")}
    assert find_etcd(environ) == paths["path"]
    assert find_etcd({**environ, "TENAX_ETCD": paths["second"]}) == paths["second"]
    both = {"TENAX_ETCD": paths["second"], "TORCHELASTIC_ETCD_BINARY_PATH": paths["first"]}
    assert find_etcd({**environ, **both}) == paths["first"]
    assert find_etcd({"PATH": str(tmp_path)}, beside=str(tmp_path / "second" / "python")) == paths["second"]


def test_an_unusable_program_in_a_variable_is_an_error() -> None:
    """There is no fallback to a program on PATH."""
    expected = "TENAX_ETCD is '/none/etcd', which is not an executable program; change or unset it"
    with pytest.raises(EtcdUnusable, match=expected):
        find_etcd({**os.environ, "TENAX_ETCD": "/none/etcd"})


def test_a_missing_program_is_reported_with_the_install_command(tmp_path: Path) -> None:
    with pytest.raises(EtcdUnusable, match=r"found no etcd program .*apt-get install etcd-server.*, or set TENAX_ETCD"):
        find_etcd({"PATH": str(tmp_path)}, beside=str(tmp_path / "python"))


@pytest.mark.parametrize(
    ("printed", "number"),
    [("etcd Version: 3.4.23\nGit SHA: x", (3, 4, 23)), ("etcd Version: 3.6.0-rc.1", (3, 6, 0))],
)
def test_supported_versions_are_accepted(printed: str, number: tuple[int, int, int]) -> None:
    version = judge_version("/bin/etcd", printed)
    assert (version.number, version.warning) == (number, "")


def test_unsupported_versions_are_rejected() -> None:
    with pytest.raises(EtcdUnusable, match=r"/bin/etcd is etcd 3\.3\.25; tenax needs 3\.4 or later"):
        judge_version("/bin/etcd", "etcd Version: 3.3.25\n")
    with pytest.raises(EtcdUnusable, match=r"--version printed 'hello'; expected 'etcd Version: 3\.4' or later"):
        judge_version("/bin/etcd", "hello\nworld")


@pytest.mark.parametrize("number", ["3.5.0", "3.5.1", "3.5.2"])
def test_versions_with_known_bugs_get_a_warning(number: str) -> None:
    assert (
        "does not recommend 3.5.0 to 3.5.2 for production"
        in judge_version("/bin/etcd", f"etcd Version: {number}").warning
    )


def test_etcd_and_proxy_variables_are_not_inherited() -> None:
    """An ETCD_ variable acts as a flag, and a proxy would separate the members."""
    found = server_environ({"PATH": "/bin", "ETCD_NAME": "theirs", "HTTPS_PROXY": "http://p", "http_proxy": "http://p"})
    assert found["PATH"] == "/bin"
    assert not {"ETCD_NAME", "HTTPS_PROXY", "http_proxy"} & set(found)


def test_a_member_reports_an_unsupported_version(program: Callable[..., Program], tmp_path: Path) -> None:
    """And leaves nothing in the data root."""
    script = _script(tmp_path, 'echo "etcd Version: 3.3.25"')
    agent = program(_START_A_MEMBER, control_hosts(1)[0], tmp_path / "data", env={"TENAX_ETCD": str(script)})
    assert agent.pipe.line().startswith(f"{script} is etcd 3.3.25; tenax needs 3.4 or later; install etcd")
    assert agent.wait() == 0
    assert not list((tmp_path / "data").iterdir())


def test_a_member_reports_a_missing_program(program: Callable[..., Program], tmp_path: Path) -> None:
    agent = program(_START_A_MEMBER, control_hosts(1)[0], tmp_path / "data", env={"TENAX_ETCD": "/none/etcd"})
    assert agent.pipe.line().startswith("TENAX_ETCD is '/none/etcd', which is not an executable program")
    assert agent.wait() == 0
