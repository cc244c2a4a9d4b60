"""``tenax start`` on four hosts with a real sshd."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote

import pytest

from kit.addresses import own_endpoint
from kit.processes import TIMEOUT_S, gone, until

from .ssh_hosts import SshHosts, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

SCRIPT = """
import os, signal, sys
rank, generation, what = os.environ["RANK"], int(os.environ["TENAX_GENERATION"]), sys.argv[1]
secrets = [name for name in os.environ if "TOKEN" in name]
print("rank", rank, "node", os.environ["GROUP_RANK"], os.environ["FROM_HERE"], *secrets, flush=True)
if what == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if what == "fail" and rank == "1":
    sys.exit(3)
if what in ("wait", "deaf", "fail") or (what == "once" and generation == 1):
    open(f"running{rank}", "w").close()
    while True:
        signal.pause()
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    made = SshHosts(tmp_path_factory.mktemp("ssh"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


class Started:
    """A ``tenax start`` in its own process."""

    def __init__(self, hosts: SshHosts, folder: Path, names: str, what: str) -> None:
        (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
        self.hosts = hosts
        self.folder = folder
        self._output = folder / "output"
        flags = ["--hosts", names, "--ssh", f"ssh -F {quote(str(hosts.config))}"]
        flags += ["--env", "FROM_HERE,TMPDIR,TENAX_PRIVATE_DIR"]
        run_flags = ["--rdzv-endpoint", own_endpoint(), "--preload", "none", "train.py", what]
        environ = {**os.environ, "TMPDIR": str(folder), "FROM_HERE": "passed", "NOT_PASSED": "1"}
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tenax", "start", *flags, "--", *run_flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environ,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait(self) -> int:
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {TIMEOUT_S:g} s:\n{self.output}")

    def wait_until_running(self, count: int) -> None:
        def check() -> bool:
            assert self.process.poll() is None, self.output
            return len(list(self.folder.glob("running*"))) == count

        until(check, "the workers")

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(TIMEOUT_S)
        assert gone(self.hosts.processes())


@pytest.fixture
def start(hosts: SshHosts, tmp_path: Path) -> Iterator[object]:
    made: list[Started] = []

    def begin(names: str, what: str) -> Started:
        made.append(Started(hosts, tmp_path, names, what))
        return made[-1]

    yield begin
    for started in made:
        started.close()


def test_four_hosts_are_one_run(start) -> None:
    """Ranks follow the list of hosts, lines have their host, and the secret is in no command line."""
    started = start("h[0-3]", "end")
    assert started.wait() == 0, started.output
    for number in range(4):
        assert f"[h{number}] rank {number} node {number} passed\n" in started.output
    assert started.output.count("the run succeeded: all 4 workers succeeded") == 4


def test_the_exit_code_is_that_of_the_worker_and_the_report_is_printed_once(start) -> None:
    started = start("h[0-1]", "fail")
    assert started.wait() == 3, started.output
    assert started.output.count("the first node prints the report") == 1


def test_ctrl_c_stops_all_hosts(start, hosts: SshHosts) -> None:
    started = start("h[0-3]", "wait")
    started.wait_until_running(4)
    commands = " ".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in hosts.processes())
    assert not re.search("[0-9a-f]{64}", commands)  # the secret
    started.process.send_signal(signal.SIGINT)
    assert started.wait() == 130, started.output
    assert gone(hosts.processes(), 2.0)
    assert "received SIGINT; stopping all agents" in started.output


def test_a_second_ctrl_c_kills(start, hosts: SshHosts) -> None:
    started = start("h[0-1]", "deaf")
    started.wait_until_running(2)
    started.process.send_signal(signal.SIGINT)
    until(lambda: "grace" in started.output, "the first signal")
    began = time.monotonic()
    started.process.send_signal(signal.SIGINT)
    assert started.wait() == 130, started.output
    assert gone(hosts.processes(), 2.0)
    assert time.monotonic() - began < 10  # not the grace period of 30 s


def test_nothing_is_left_when_the_starter_is_killed(start, hosts: SshHosts) -> None:
    started = start("h[0-3]", "deaf")
    started.wait_until_running(4)
    left = hosts.processes()
    assert len(left) >= 16  # guard, agent, keeper and worker on each
    started.process.kill()
    assert gone(left, 2.0)
    assert not hosts.processes()


@pytest.mark.parametrize("lost", ["agent", "connection"])
def test_a_lost_agent_is_started_again(start, hosts: SshHosts, lost: str) -> None:
    started = start("h[0-1]", "once")
    started.wait_until_running(2)
    if lost == "connection":
        children = Path(f"/proc/{started.process.pid}/task/{started.process.pid}/children").read_text().split()
        victim = int(children[1])
    else:
        victim = hosts.processes("tenax.cli.main", "train.py")[1]
    os.kill(victim, signal.SIGKILL)
    assert started.wait() == 0, started.output
    assert "its agent is started again in 1 s" in started.output
    assert started.output.count("rank 0 node 0") == 2


def test_a_host_that_is_down_is_named_and_nothing_starts(start) -> None:
    started = start("h0,bad,h1", "wait")
    assert started.wait() == 71
    assert re.fullmatch(r"tenax start: bad: cannot connect: ssh: connect to .*Connection refused\n", started.output)
