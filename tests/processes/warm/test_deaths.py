"""Any process may be killed at any time: standby, template, keeper, agent. None is left, and none hangs."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from kit.jobs import Runner, Running, is_alive, until
from tenax._core.events import NodeCleared, WorkerExited, WorkerStarted
from tenax._io.helper_channel import Channel
from tenax._io.interfaces import Launch
from tenax._processes.keeper import KeeperProcess
from tenax._processes.template import Template, template_of
from tenax._processes.warm_pool import WarmPool

from .family import MARKED_KIT, STAYING, Family, kill, name_of, slow_module, started_at


def _start(
    runner: Runner,
    *words: str,
    source: str = STAYING,
    modules: str = "marked_kit",
    restarts: int = 3,
    program: list[str] | None = None,
) -> Family:
    runner.script(MARKED_KIT, "marked_kit.py")
    script = runner.script(source)
    flags = ["--nproc-per-node", "2", "--max-restarts", str(restarts), "--preload", modules, "--shutdown-timeout", "5"]
    return Family(runner, runner.start(*flags, *words, script, program=program))


def _was_warm(runner: Runner, attempt: int, workers: int = 2) -> bool:
    pids = runner.pids(workers, attempt)
    places = [int(runner.note("imported_in", rank, attempt)) for rank in range(workers)]
    assert [place == pid for place, pid in zip(places, pids, strict=True)] in ([True] * workers, [False] * workers)
    return places != pids


def _stop(running: Running) -> None:
    running.send(signal.SIGTERM)
    running.wait()


# --- restarts ---------------------------------------------------------------------------------------------------------


def test_a_restart_takes_the_standbys(runner: Runner) -> None:
    family = _start(runner)
    first = runner.pids(2)
    standbys = family.until_standbys(2, without=set(first))
    began = {pid: started_at(pid) for pid in standbys}
    kill(first[0])
    assert set(runner.pids(2, 1)) == standbys
    assert {pid: started_at(pid) for pid in standbys} == began  # they are older than their generation, and show it
    assert _was_warm(runner, 0)
    assert _was_warm(runner, 1)
    assert all(name_of(pid) != "tenax-standby" for pid in standbys)
    family.until_standbys(2, without=standbys)  # for the next one
    _stop(family.running)


def test_one_attempt_on_one_node_keeps_no_standbys(runner: Runner) -> None:
    """With ``elastic_launch``, which ``tenax.run.main`` calls; a ``Node`` decides that, as with ``tenax run``."""
    family = _start(runner, restarts=0, program=[sys.executable, "-c", "from tenax.run import main; main()"])
    runner.pids(2)
    assert _was_warm(runner, 0)
    deadline = time.monotonic() + 0.8  # longer than the keeper's delay before it forks standbys
    seen: set[int] = set()
    while time.monotonic() < deadline:
        seen |= family.standbys
        time.sleep(0.01)
    assert not seen
    _stop(family.running)


def test_a_stopped_run_leaves_no_standby(runner: Runner) -> None:
    family = _start(runner)
    runner.pids(2)
    family.until_standbys(2)
    family.running.send(signal.SIGTERM)
    assert family.running.wait().code == 128 + signal.SIGTERM
    assert not runner.alive()


# --- the death of one -------------------------------------------------------------------------------------------------


def test_a_killed_standby_is_replaced(runner: Runner) -> None:
    family = _start(runner)
    first = runner.pids(2)
    standbys = family.until_standbys(2)
    victim = min(standbys)
    kill(victim)
    replaced = family.until_standbys(2, without={victim})
    assert all(map(is_alive, first))
    kill(first[1])
    assert set(runner.pids(2, 1)) == replaced
    _stop(family.running)
    assert "cold" not in family.running.err


def test_all_standbys_and_a_worker_may_die_at_once(runner: Runner) -> None:
    family = _start(runner)
    first = runner.pids(2)
    standbys = family.until_standbys(2)
    for pid in (*standbys, first[0]):
        kill(pid)
    assert not set(runner.pids(2, 1)) & standbys
    assert _was_warm(runner, 1)
    _stop(family.running)


@pytest.mark.parametrize("which", ["root", "template"])
def test_without_a_template_restarts_are_cold_and_the_console_says_so(runner: Runner, which: str) -> None:
    family = _start(runner)
    first = runner.pids(2)
    standbys = family.until_standbys(2)
    root, template = family.root, family.template
    kill(root if which == "root" else template)
    family.running.until_printed("workers start cold: the template was killed by SIGKILL")
    until(lambda: not is_alive(root) and not is_alive(template), "the end of both")
    assert all(map(is_alive, (*first, *standbys)))
    kill(first[0])
    second = runner.pids(2, 1)
    assert set(second) == standbys  # existing standbys can still become workers
    kill(second[1])
    assert not _was_warm(runner, 2)
    assert family.running.err.count("workers start cold") == 1
    _stop(family.running)


def test_workers_start_cold_if_the_template_dies_while_importing(runner: Runner) -> None:
    slow_module(runner)
    family = _start(
        runner, source="import slow_kit\n" + "from worker_kit import *\nready()\nstay()", modules="slow_kit"
    )
    runner.note("importing")
    kill(family.root)
    family.running.until_printed("workers start cold: the template was killed by SIGKILL")
    runner.leave_note("go_on")
    runner.leave_note("go_on", 1)
    runner.pids(2)
    _stop(family.running)


# --- the death of all -------------------------------------------------------------------------------------------------


def test_no_process_outlives_the_agent(runner: Runner) -> None:
    family = _start(runner)
    workers = runner.pids(2)
    processes = {*workers, *family.until_standbys(2), family.root, family.template, family.keeper}
    kill(family.running.pid)
    family.running.process.wait()
    until(lambda: not any(map(is_alive, processes)), "the end of all processes")
    until(lambda: not runner.alive(), lambda: f"the end of {runner.alive()}")


def test_no_process_outlives_the_keeper(runner: Runner) -> None:
    family = _start(runner)
    workers = runner.pids(2)
    processes = {*workers, *family.until_standbys(2), family.root, family.template}
    kill(family.keeper)
    done = family.running.wait()
    assert done.code != 0
    assert "keeper" in done.err
    until(lambda: not any(map(is_alive, processes)), "the end of all processes")


def test_no_process_outlives_a_keeper_that_dies_while_the_template_imports(runner: Runner) -> None:
    slow_module(runner)
    family = _start(runner, modules="slow_kit")
    runner.note("importing")
    processes = {family.root, family.template}
    kill(family.keeper)
    family.running.wait()
    until(lambda: not any(map(is_alive, processes)), "the end of all processes")


# --- what workers leave behind ----------------------------------------------------------------------------------------

LEAVING = """
    import os, signal, sys, time
    import marked_kit
    from worker_kit import ATTEMPT, NOTES, RANK, daemon, note, ready, stay, wait_for

    def is_there(pid):
        try:
            return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    if ATTEMPT == 0:
        if RANK == 0:
            DAEMON
    else:
        left = int(open(f"{NOTES}/daemon.0.0").read())
        note("daemon_is_there", is_there(left))
    note("imported_in", marked_kit.IMPORTED_IN)
    ready()
    stay()
    """


def _leaves(runner: Runner, daemon: str) -> None:
    family = _start(runner, source=LEAVING.replace("DAEMON", daemon))
    first = runner.pids(2)
    left = int(runner.note("daemon"))
    standbys = family.until_standbys(2, but_for={left, *first})
    template = family.root, family.template
    until(lambda: os.getsid(left) != first[0], "a session of its own")
    kill(first[0])
    assert set(runner.pids(2, 1)) == standbys  # they were spared
    assert [runner.note("daemon_is_there", rank, 1) for rank in range(2)] == ["False", "False"]
    assert not is_alive(left)
    assert (family.root, family.template) == template
    _stop(family.running)


def test_a_daemon_is_gone_before_the_next_generation_starts(runner: Runner) -> None:
    _leaves(runner, 'daemon("daemon")')


def test_an_orphan_named_like_a_standby_is_killed(runner: Runner) -> None:
    _leaves(runner, 'open("/proc/self/comm", "w").write("tenax-standby"); daemon("daemon")')


# --- what a standby has missed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT], ids=str)
def test_a_signal_to_a_standby_does_not_reach_the_later_worker(runner: Runner, number: int) -> None:
    """Schedulers signal every process of a job; a later restart must not fail because of it."""
    family = _start(runner)
    first = runner.pids(2)
    standbys = family.until_standbys(2)
    for pid in (*standbys, family.root, family.template):
        kill(pid, signal.Signals(number))
    kill(first[0])
    until(
        lambda: "generation 3" in family.running.err or all(runner.noted("ready", rank, 1) for rank in range(2)),
        "the second generation",
    )
    assert "generation 3" not in family.running.err, family.running.err
    assert set(runner.pids(2, 1)) == standbys
    _stop(family.running)


# --- failures while standbys are forked -------------------------------------------------------------------------------


def test_a_killed_forker_does_not_delay_the_next_restart(runner: Runner) -> None:
    """It dies before it has announced its standbys to the keeper."""
    runner.script(
        """
        import os, time
        def hold():
            if os.path.exists("hold"):
                open("held", "w").close()
                while os.path.exists("hold"):
                    time.sleep(0.005)
        os.register_at_fork(after_in_child=hold)
        """,
        "held_kit.py",
    )
    family = _start(runner, modules="marked_kit,held_kit")
    first = runner.pids(2)
    standbys = family.until_standbys(2)
    (runner.home / "hold").touch()
    kill(min(standbys))
    until((runner.home / "held").exists, "the fork of another standby")
    (forker,) = family.forkers
    kill(forker)
    (runner.home / "hold").unlink()
    until(lambda: not is_alive(forker), "its end")
    kill(first[0])
    for rank in range(2):
        runner.note("ready", rank, 1, timeout_s=10)
    _stop(family.running)


class _FakeTemplate:
    """The other end of the keeper's channel to the template."""

    def __init__(self, standbys: int, *, is_gone: bool = False) -> None:
        ours, theirs = Channel.pair()
        self.channel = Channel(theirs)
        if is_gone:
            self.channel.close()
        self._output, printed = os.pipe()
        os.set_blocking(self._output, False)
        os.close(printed)
        plan = {"modules": ["json"], "late": [], "has_own_arguments": False, "standbys": standbys, "setups": []}
        self.pool = WarmPool(os.getpid(), ours, self._output, plan)

    def commands(self) -> list[str]:
        found = []
        for message, descriptors in self.channel.receive():
            found.append(message[0])
            for descriptor in descriptors:
                os.close(descriptor)
        return found


def test_a_template_that_cannot_fork_is_given_up() -> None:
    """A cold start then reports that no process can be created."""
    template = _FakeTemplate(standbys=2)
    template.channel.send(("ready", 0.1, ["json"], {}))
    template.pool.receive()
    template.commands()
    asked = 0
    for _ in range(10):  # what the keeper does whenever it wakes while a worker waits
        template.pool.receive()
        template.pool.request(2)
        if not template.pool.is_worth_waiting:
            break
        asked += template.commands().count("fork")
        template.channel.send(("forked", 1, []))
    assert not template.pool.is_worth_waiting, f"{asked} requests to fork"
    template.channel.close()


def test_a_template_that_died_at_once_does_not_end_the_keeper() -> None:
    """Its closed channel is not taken for that of the agent; the keeper reports its death when it reaps it."""
    template = _FakeTemplate(standbys=2, is_gone=True)
    template.pool.receive()
    template.pool.request(2)
    template.pool.on_child_death(os.getpid(), 1)
    assert [message[0] for message in template.pool.take_messages()] == ["cold"]


def test_slow_imports_leave_the_full_time_for_a_fork() -> None:
    """Workers that waited 50 s for the imports wait another minute for a fork, which takes long on a busy machine."""
    template = _FakeTemplate(standbys=0)
    began = time.monotonic()
    template.pool.set_waiting(2, began - 50)
    template.channel.send(("ready", 50, ["json"], {}))
    template.pool.receive()
    template.pool.request(2)
    template.pool.take_messages()
    assert not template.pool.has_timed_out(began + 30)
    assert template.pool.take_messages() == [("slow", 10.0, 60.0)]
    assert template.pool.has_timed_out(time.monotonic() + 60)
    assert template.pool.take_messages()[-1] == ("cold", {"": "the template does not respond"})
    template.channel.close()


def test_a_standby_that_died_before_it_was_announced_is_skipped(tmp_path: Path) -> None:
    """It was reaped before the template announced it."""
    template = _FakeTemplate(standbys=0)
    template.channel.send(("ready", 0.1, ["json"], {}))
    template.pool.receive()
    template.pool.request(1)
    template.commands()  # and its end of the socket is closed, as at its death
    template.pool.on_child_death(4194305, -9)
    template.channel.send(("forked", 1, [4194305]))
    template.pool.receive()
    spec = {"argv": [], "env": {}, "cwd": b"", "cpus": [], "numbers": [], "local_rank": 0}
    read, write = os.pipe()
    assert template.pool.activate(spec, [], write) == 0
    os.close(read)
    os.close(write)
    assert not template.pool.is_worth_waiting
    template.channel.close()


def test_a_worker_that_is_still_a_child_of_its_forker_dies_before_its_node_is_cleared(tmp_path: Path) -> None:
    """A library that delays process exit keeps the forker, the parent of a warm worker, alive."""
    (tmp_path / "slow_end_kit.py").write_text(
        "import os, time\nend = os._exit\ndef slowly(code):\n    time.sleep(0.5)\n    end(code)\nos._exit = slowly\n"
    )
    (tmp_path / "late.py").write_text("import os\nopen(f'ran-{os.getpid()}', 'w').close()\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    launch = Launch(env=env, argv=[sys.executable, "-u", "late.py"], cwd=str(tmp_path), descriptors={})
    template = template_of(launch, [launch], "slow_end_kit", [], 0)
    assert isinstance(template, Template)
    received: list[object] = []
    keeper = KeeperProcess()
    keeper.open(received.append)
    try:
        keeper.prepare(template, lambda _: None)
        for rank in range(2):
            keeper.start(1, rank, launch)
        is_killed = False
        while not any(isinstance(event, NodeCleared) for event in received):
            assert select.select([keeper.fileno()], [], [], 30)[0], received
            keeper.on_readable()
            if not is_killed and sum(isinstance(event, WorkerStarted) for event in received) == 2:
                is_killed = True
                keeper.kill(1)
        pids = [event.pid for event in received if isinstance(event, WorkerStarted)]
        assert [event.exit_code for event in received if isinstance(event, WorkerExited)] == [-signal.SIGKILL] * 2
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        assert not list(tmp_path.glob("ran-*"))
    finally:
        keeper.close()
