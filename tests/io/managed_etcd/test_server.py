"""A server ends with the process that started it, however that ends, and its end is reported."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.etcd import needs_etcd
from kit.processes import Program, gone, is_alive, leaving_nothing, on_linux, until
from tenax._io.loop import Loop
from tenax._processes.server_process import ServerProcess

from .kit import ManagedCluster, control_hosts

_HOLDS_A_MEMBER = """
    import sys
    from tenax._engines.etcd.managed import ManagedMember, ManagedSettings
    from tenax._io.loop import Loop

    def report(text):
        print(text, flush=True)

    loop = Loop()
    settings = ManagedSettings((sys.argv[1],), "run", data_root=sys.argv[2])
    member = ManagedMember(loop, settings, lambda text: None, lambda text: report("failed: " + text))
    member.start()
    loop.next_event(lambda: loop.now() if member.is_serving else None)
    report(member.server.pid)
    report(member.directory.path)
    loop.next_event(lambda: None)
"""

_STUBBORN = """\
#!/bin/sh
trap '' TERM
echo up
while :; do read line < "$0.fifo"; done
"""


@needs_etcd
@on_linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_with_its_agent(
    program: Callable[..., Program], tmp_path: Path, number: signal.Signals
) -> None:
    """M1: no process is left. The data stays for a restarted agent."""
    (name,) = control_hosts(1)
    agent = program(_HOLDS_A_MEMBER, name, tmp_path / "data")
    pid, directory = int(agent.pipe.line()), Path(agent.pipe.line())
    keeper = _parent(pid)
    assert is_alive(pid)
    assert Path(f"/proc/{keeper}/comm").read_text() == "tenax-etcd\n"
    agent.send(number)
    agent.wait()
    assert gone([pid, keeper])
    assert (directory / "data" / "member").is_dir()


@on_linux
def test_the_server_ends_with_its_keeper(make_cluster: Callable[..., ManagedCluster]) -> None:
    """By the kernel and by the agent. The agent starts another server."""
    cluster = make_cluster(1)
    (member,) = cluster.add_all()
    pid = member.server.pid
    os.kill(_parent(pid), signal.SIGKILL)
    assert gone([pid])
    cluster.until(lambda: member.is_serving and member.server.pid not in (0, pid), "another server")


@on_linux
def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """After the grace period, with everything that it started."""
    script = tmp_path / "server"
    script.write_text(_STUBBORN)
    script.chmod(0o700)
    os.mkfifo(f"{script}.fifo")
    log = tmp_path / "log"
    ended: list[tuple[str, bool]] = []
    with leaving_nothing():
        loop = Loop()
        server = ServerProcess(loop, lambda how, by_itself: ended.append((how, by_itself)))
        server.start([str(script)], {"PATH": os.environ["PATH"]}, str(log))
        loop.next_event(lambda: loop.now() if server.pid else None)
        pid = server.pid
        until(lambda: log.exists() and log.read_text() == "up\n", "the script to ignore SIGTERM")
        server.stop(grace_s=0.1)
        loop.next_event(lambda: loop.now() if ended else None)
        assert ended == [("was killed by SIGKILL", False)]
        assert gone([pid])
        server.kill()
        loop.close()


@on_linux
def test_kill_returns_when_the_server_is_gone(tmp_path: Path) -> None:
    """Even if the server is stopped (SIGSTOP)."""
    ended: list[str] = []
    loop = Loop()
    server = ServerProcess(loop, lambda how, _: ended.append(how))
    server.start(["/bin/sleep", "1000"], {}, str(tmp_path / "log"))
    loop.next_event(lambda: loop.now() if server.pid else None)
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.kill()
    assert not is_alive(pid)
    assert not ended
    loop.close()


def test_a_missing_program_is_reported(tmp_path: Path) -> None:
    ended: list[tuple[str, bool]] = []
    loop = Loop()
    server = ServerProcess(loop, lambda how, by_itself: ended.append((how, by_itself)))
    server.start([str(tmp_path / "none")], {}, str(tmp_path / "log"))
    loop.next_event(lambda: loop.now() if ended else None)
    assert ended == [(f"could not be started: No such file or directory: {str(tmp_path / 'none')!r}", False)]
    server.kill()
    loop.close()


def test_a_server_that_keeps_exiting_is_given_up(make_cluster: Callable[..., ManagedCluster], tmp_path: Path) -> None:
    """Each message has its last log messages; the final one has the number of attempts."""
    script = tmp_path / "etcd"
    script.write_text(
        "#!/bin/sh\n"
        'case "$1" in --version) echo "etcd Version: 3.5.16"; exit;; esac\n'
        f"echo '{json.dumps({'level': 'fatal', 'msg': 'cannot go on', 'error': 'the disk is full'})}'\n"
        "exit 1\n"
    )
    script.chmod(0o700)
    cluster = make_cluster(1, program=str(script))
    member = cluster.add(cluster.names[0], {"pauses_s": (0.01,) * 3})
    cluster.until(lambda: cluster.messages, "its end to be reported")
    assert "exited with code 1; last log messages: cannot go on: the disk is full; retrying" in cluster.messages[0]
    cluster.until(lambda: cluster.failures, "it to be given up", may_fail=True)
    assert "cannot go on: the disk is full; gave up after 4 attempts" in cluster.failures[0]
    assert not member.is_here


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
