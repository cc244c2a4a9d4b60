"""The contract of ``ports.Processes``: the same tests for the real keeper and the fake one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from kit.processes import EventCollector, Pipe, gone, launch, leaving_nothing, on_linux, python, until
from tenax._core import events
from tenax._io.interfaces import Processes
from tenax._processes.keeper import KeeperProcess
from tenax.testing.processes import FakeProcesses

pytestmark = on_linux

# A worker that prints its pid and then executes commands from its standard input.
COMMANDED = """
import os, signal, sys
for number in map(int, sys.argv[1:]):
    signal.signal(number, signal.SIG_IGN)
print(os.getpid(), flush=True)
def leave_behind(own_session, ignores_term):
    pid = os.fork()
    if pid == 0:
        os.close(0)
        if own_session:
            os.setsid()
        if ignores_term:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        while True:
            signal.pause()
for line in sys.stdin:
    command, *rest = line.split()
    if command == "exit":
        os._exit(int(rest[0]))
    leave_behind(rest[0] == "session", rest[1] == "ignore")
"""


class World:
    """How a test causes events, with real or fake processes."""

    processes: Processes

    def start(self, rank: int, generation: int = 1, ignores: tuple[int, ...] = ()) -> None:
        raise NotImplementedError

    def start_impossible(self, rank: int) -> None:
        raise NotImplementedError

    def exit(self, rank: int, code: int) -> None:
        raise NotImplementedError

    def leave_behind(self, rank: int, *, in_group: bool, ignores_term: bool) -> None:
        raise NotImplementedError

    def left_alive(self) -> int:
        """Return how many leftover processes are alive."""
        raise NotImplementedError

    def lose(self) -> None:
        raise NotImplementedError

    def end_lease(self) -> None:
        """Let the lease expire, if there is one."""
        raise NotImplementedError

    def cannot_dump_stacks(self, rank: int) -> None:
        """Make this worker unable to dump its stacks."""

    def close(self) -> None:
        self.processes.close()


class Real(World):
    def __init__(self) -> None:
        self.processes = self._keeper = KeeperProcess()
        self._pipes: dict[int, tuple[int, Pipe]] = {}  # by rank: its standard input, its standard output
        self._left: list[int] = []

    def start(self, rank: int, generation: int = 1, ignores: tuple[int, ...] = ()) -> None:
        self._forget(rank)
        stdin, stdin_writer = os.pipe()
        output = Pipe()
        command = launch(python(COMMANDED, *map(int, ignores)), descriptors={0: stdin, 1: output.writer})
        self.processes.start(generation, rank, command)
        os.close(stdin)
        output.close_writer()
        self._pipes[rank] = (stdin_writer, output)
        output.line()  # from now on it ignores its signals

    def start_impossible(self, rank: int) -> None:
        self.processes.start(1, rank, launch(["/nowhere/program"]))

    def exit(self, rank: int, code: int) -> None:
        os.write(self._pipes[rank][0], b"exit %d\n" % code)

    def leave_behind(self, rank: int, *, in_group: bool, ignores_term: bool) -> None:
        stdin, output = self._pipes[rank]
        command = f"leave {'group' if in_group else 'session'} {'ignore' if ignores_term else 'default'}\n"
        os.write(stdin, command.encode())
        self._left.append(int(output.line()))

    def left_alive(self) -> int:
        return sum(not gone([pid], 0) for pid in self._left)

    def lose(self) -> None:
        os.kill(self._keeper.pid, signal.SIGKILL)

    def end_lease(self) -> None:
        """It expires by itself: every real lease in these tests is short."""

    def _forget(self, rank: int) -> None:
        if rank in self._pipes:
            stdin, output = self._pipes.pop(rank)
            os.close(stdin)
            output.close()

    def close(self) -> None:
        super().close()
        for rank in list(self._pipes):
            self._forget(rank)


class Fake(World):
    def __init__(self) -> None:
        self.processes = self._fake = FakeProcesses()

    def start(self, rank: int, generation: int = 1, ignores: tuple[int, ...] = ()) -> None:
        self._fake.will_ignore(rank, *ignores)
        self._fake.start(generation, rank, launch(["program"]))

    def start_impossible(self, rank: int) -> None:
        self._fake.refuse(rank, "No such file or directory: '/nowhere/program'", 127)
        self._fake.start(1, rank, launch(["/nowhere/program"]))

    def exit(self, rank: int, code: int) -> None:
        self._fake.exit(rank, code)

    def leave_behind(self, rank: int, *, in_group: bool, ignores_term: bool) -> None:
        self._fake.leave_behind(rank, in_group=in_group, ignores_term=ignores_term)

    def left_alive(self) -> int:
        return sum(len(worker.children) for worker in self._fake.workers.values())

    def lose(self) -> None:
        self._fake.lose()

    def end_lease(self) -> None:
        self._fake.end_lease()

    def cannot_dump_stacks(self, rank: int) -> None:
        self._fake[rank].shows_stacks = False


@pytest.fixture(params=[Real, Fake], ids=["keeper", "fake"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with leaving_nothing():
        made: World = request.param()
        yield made
        made.close()


class TestProcesses:
    """The contract."""

    def test_a_started_worker_is_announced_with_its_pid(self, world: World) -> None:
        """Every start has one answer, with its own pid."""
        hearing = EventCollector(world.processes)
        for rank in range(3):
            world.start(rank)
        started = [hearing.take(events.WorkerStarted, generation=1, local_rank=rank) for rank in range(3)]
        assert len({event.pid for event in started}) == 3
        assert min(event.pid for event in started) > 1

    def test_no_event_is_delivered_inside_a_command(self, world: World) -> None:
        """Events are delivered when the descriptor is served, so a command never calls back."""
        hearing = EventCollector(world.processes)
        world.start(0)
        world.exit(0, 0)
        assert hearing.events == []
        hearing.take(events.WorkerStarted)

    @pytest.mark.parametrize("code", [0, 1, 3, 255])
    def test_an_exit_is_announced_with_its_code(self, world: World, code: int) -> None:
        """As an exit without a stop request."""
        hearing = EventCollector(world.processes)
        world.start(0)
        world.exit(0, code)
        assert hearing.take(events.WorkerExited) == events.WorkerExited(1, 0, code, before_stop=True)

    def test_a_failed_start_is_announced_with_its_reason(self, world: World) -> None:
        """With the system's message and a shell's exit code, and never as an exit."""
        hearing = EventCollector(world.processes)
        world.start_impossible(0)
        failed = hearing.take(events.WorkerStartFailed)
        assert (failed.generation, failed.local_rank, failed.exit_code) == (1, 0, 127)
        assert failed.reason == "No such file or directory: '/nowhere/program'"
        world.processes.clear(1)
        hearing.take(events.NodeCleared)
        assert not [event for event in hearing.events if isinstance(event, events.WorkerExited)]

    def test_a_signal_reaches_every_live_worker_of_its_generation(self, world: World) -> None:
        """Those that die of it are announced with the signal's number, as stopped."""
        hearing = EventCollector(world.processes)
        for rank in range(3):
            world.start(rank)
        world.exit(1, 0)
        hearing.take(events.WorkerExited, local_rank=1)
        world.processes.signal(1, signal.SIGTERM)
        for rank in (0, 2):
            exited = hearing.take(events.WorkerExited, local_rank=rank)
            assert exited == events.WorkerExited(1, rank, -signal.SIGTERM, before_stop=False)

    def test_a_signal_to_another_generation_has_no_effect(self, world: World) -> None:
        """A late command for an old generation does not affect the new one."""
        hearing = EventCollector(world.processes)
        world.start(0, generation=2)
        hearing.take(events.WorkerStarted)
        world.processes.signal(1, signal.SIGKILL)
        world.exit(0, 5)
        assert hearing.take(events.WorkerExited).exit_code == 5

    def test_a_worker_that_ignores_the_signal_lives_until_it_is_killed(self, world: World) -> None:
        hearing = EventCollector(world.processes)
        world.start(0, ignores=(signal.SIGTERM,))
        hearing.take(events.WorkerStarted)
        world.processes.signal(1, signal.SIGTERM)
        assert hearing.receives_nothing()
        world.processes.kill(1)
        assert hearing.take(events.WorkerExited) == events.WorkerExited(1, 0, -signal.SIGKILL, before_stop=False)
        assert hearing.take(events.NodeCleared) == events.NodeCleared(1)

    def test_a_single_worker_can_be_ended(self, world: World) -> None:
        """Only it gets the signal; the other continues."""
        hearing = EventCollector(world.processes)
        world.start(0)
        world.start(1)
        hearing.take(events.WorkerStarted, local_rank=1)
        world.processes.end(1, 0, signal.SIGTERM)
        assert hearing.take(events.WorkerExited) == events.WorkerExited(1, 0, -signal.SIGTERM, before_stop=False)
        world.processes.end(1, 0, signal.SIGTERM)  # it is dead already
        world.exit(1, 5)
        assert hearing.take(events.WorkerExited) == events.WorkerExited(1, 1, 5, before_stop=True)

    def test_ending_a_worker_of_another_generation_has_no_effect(self, world: World) -> None:
        """Nor has a request for its stacks."""
        hearing = EventCollector(world.processes)
        world.start(0, generation=2)
        hearing.take(events.WorkerStarted)
        world.cannot_dump_stacks(0)
        world.processes.dump_stacks(1, 0)
        world.processes.end(1, 0, signal.SIGKILL)
        assert hearing.receives_nothing()

    def test_leftovers_of_a_single_ended_worker_are_killed_at_once(self, world: World) -> None:
        """It hung, so its children get no grace period."""
        hearing = EventCollector(world.processes)
        world.start(0)
        world.leave_behind(0, in_group=True, ignores_term=True)
        world.processes.end(1, 0, signal.SIGKILL)
        hearing.take(events.WorkerExited)
        world.processes.clear(1)
        hearing.take(events.NodeCleared)
        assert world.left_alive() == 0

    def test_a_worker_that_cannot_dump_its_stacks_gets_no_signal(self, world: World) -> None:
        """The signal would kill it. The reason is announced, and the worker continues."""
        hearing = EventCollector(world.processes)
        world.start(0)
        world.cannot_dump_stacks(0)
        world.processes.dump_stacks(1, 0)
        refused = hearing.take(events.StacksRefused)
        assert (refused.generation, refused.local_rank) == (1, 0)
        assert "it is not a Python program" in refused.why
        world.exit(0, 0)
        assert hearing.take(events.WorkerExited) == events.WorkerExited(1, 0, 0, before_stop=True)

    def test_an_empty_node_is_cleared_at_once(self, world: World) -> None:
        """Each clear or kill command is answered once."""
        hearing = EventCollector(world.processes)
        world.processes.clear(1)
        hearing.take(events.NodeCleared, generation=1)
        world.processes.kill(1)
        hearing.take(events.NodeCleared, generation=1)
        assert hearing.receives_nothing()

    def test_cleared_comes_after_the_last_exit(self, world: World) -> None:
        """It is announced when no process is left, after all exits."""
        hearing = EventCollector(world.processes)
        world.start(0)
        world.start(1)
        world.processes.kill(1)
        hearing.take(events.NodeCleared)
        heard = [event for event in hearing.events if isinstance(event, events.WorkerExited)]
        assert sorted(event.local_rank for event in heard) == [0, 1]

    def test_leftovers_of_a_worker_that_exited_by_itself_are_killed_at_once(self, world: World) -> None:
        """In its group or another session, whether or not they ignore SIGTERM."""
        hearing = EventCollector(world.processes)
        world.start(0)
        for in_group in (True, False):
            for ignores_term in (True, False):
                world.leave_behind(0, in_group=in_group, ignores_term=ignores_term)
        world.exit(0, 0)
        hearing.take(events.WorkerExited)
        assert world.left_alive() == 4
        world.processes.clear(1)
        hearing.take(events.NodeCleared)
        assert world.left_alive() == 0

    def test_clearing_spares_held_workers_and_what_they_started(self, world: World) -> None:
        """What the exited worker left behind is ended; a worker that is not held is killed."""
        hearing = EventCollector(world.processes)
        for rank in range(3):
            world.start(rank)
        world.leave_behind(0, in_group=True, ignores_term=True)
        world.leave_behind(1, in_group=True, ignores_term=True)
        world.leave_behind(1, in_group=False, ignores_term=True)
        world.exit(1, 1)
        hearing.take(events.WorkerExited, local_rank=1)
        world.processes.clear(1, (0,), 3)
        assert hearing.take(events.WorkerExited, local_rank=2).exit_code == -signal.SIGKILL
        assert hearing.take(events.NodeCleared) == events.NodeCleared(1, (0,), 3)
        assert world.left_alive() == 1
        world.processes.kill(1)
        hearing.take(events.WorkerExited, local_rank=0)
        assert hearing.take(events.NodeCleared) == events.NodeCleared(1)
        assert world.left_alive() == 0

    def test_a_held_worker_becomes_one_of_the_next_generation(self, world: World) -> None:
        """It keeps its pid, and commands to it have the new number. A stop before does not count for it."""
        hearing = EventCollector(world.processes)
        world.start(0)
        pid = hearing.take(events.WorkerStarted).pid
        world.processes.clear(1, (0,))
        hearing.take(events.NodeCleared)
        world.processes.adopt(1, 0, 2)
        assert hearing.take(events.WorkerStarted, generation=2) == events.WorkerStarted(2, 0, pid)
        world.processes.signal(1, signal.SIGKILL)
        world.exit(0, 5)
        assert hearing.take(events.WorkerExited) == events.WorkerExited(2, 0, 5, before_stop=True)

    def test_a_held_worker_that_exited_is_announced_for_the_next_generation(self, world: World) -> None:
        hearing = EventCollector(world.processes)
        world.start(0)
        world.processes.clear(1, (0,))
        hearing.take(events.NodeCleared)
        world.exit(0, 7)
        hearing.take(events.WorkerExited, generation=1)
        world.processes.adopt(1, 0, 2)
        assert hearing.take(events.WorkerExited, generation=2) == events.WorkerExited(2, 0, 7, before_stop=True)

    def test_a_held_worker_that_exits_while_the_node_is_cleared_does_not_stay(self, world: World) -> None:
        hearing = EventCollector(world.processes)
        world.start(0)
        world.start(1)
        world.leave_behind(1, in_group=False, ignores_term=True)
        world.exit(1, 1)
        hearing.take(events.WorkerExited, local_rank=1)
        world.processes.clear(1, (0, 1))
        assert hearing.take(events.NodeCleared) == events.NodeCleared(1, (0,))
        assert world.left_alive() == 0

    def test_the_group_of_a_stopped_worker_has_the_grace_period(self, world: World) -> None:
        """Its group gets the signal too; processes that ignore it live until the kill."""
        hearing = EventCollector(world.processes)
        world.start(0)
        world.leave_behind(0, in_group=True, ignores_term=False)
        world.leave_behind(0, in_group=True, ignores_term=True)
        world.leave_behind(0, in_group=False, ignores_term=True)
        world.processes.signal(1, signal.SIGTERM)
        hearing.take(events.WorkerExited)
        assert world.left_alive() == 3
        world.processes.clear(1)
        until(lambda: world.left_alive() == 1, "the end of those who listen and of those who left the group")
        hearing.events.clear()
        assert hearing.receives_nothing()
        world.processes.kill(1)
        hearing.take(events.NodeCleared)
        assert world.left_alive() == 0

    def test_the_next_generation_starts_clean(self, world: World) -> None:
        """The same ranks start again, without the stop requests of the old ones."""
        hearing = EventCollector(world.processes)
        world.start(0)
        world.processes.signal(1, signal.SIGTERM)
        hearing.take(events.WorkerExited)
        world.processes.clear(1)
        hearing.take(events.NodeCleared)
        world.start(0, generation=2)
        world.leave_behind(0, in_group=True, ignores_term=True)
        world.exit(0, 4)
        assert hearing.take(events.WorkerExited, generation=2) == events.WorkerExited(2, 0, 4, before_stop=True)
        world.processes.clear(2)
        hearing.take(events.NodeCleared, generation=2)

    def test_a_lost_keeper_is_announced_once_with_the_reason(self, world: World) -> None:
        """It is the last event, and there is no descriptor afterwards."""
        hearing = EventCollector(world.processes)
        world.start(0)
        world.leave_behind(0, in_group=False, ignores_term=True)
        world.lose()
        lost = hearing.take(events.KeeperLost)
        assert lost.reason == "it was killed by SIGKILL"
        assert world.processes.fileno() == -1
        assert world.left_alive() == 0
        world.processes.on_readable()
        world.processes.close()

    def test_an_expired_lease_kills_everything(self, world: World) -> None:
        """``Fenced`` is announced, then every worker is killed, also leftovers in other sessions."""
        hearing = EventCollector(world.processes)
        world.start(0, generation=4, ignores=(signal.SIGTERM,))
        world.start(1, generation=4)
        world.leave_behind(1, in_group=False, ignores_term=True)
        world.processes.hold(0.01)
        world.end_lease()
        assert hearing.take(events.Fenced).generation == 4
        for rank in (0, 1):
            exited = hearing.take(events.WorkerExited, local_rank=rank)
            assert exited == events.WorkerExited(4, rank, -signal.SIGKILL, before_stop=False)
        until(lambda: world.left_alive() == 0, "the end of what was left behind")
        world.processes.kill(4)
        assert hearing.take(events.NodeCleared) == events.NodeCleared(4)

    def test_a_lease_covers_leftovers_of_dead_workers(self, world: World) -> None:
        """Only leftovers are alive when it expires; the workers' exits are announced as they were."""
        hearing = EventCollector(world.processes)
        world.start(0)
        world.leave_behind(0, in_group=True, ignores_term=True)
        world.leave_behind(0, in_group=False, ignores_term=True)
        world.exit(0, 3)
        assert hearing.take(events.WorkerExited) == events.WorkerExited(1, 0, 3, before_stop=True)
        world.processes.hold(0.01)
        world.end_lease()
        assert hearing.take(events.Fenced).generation == 1
        until(lambda: world.left_alive() == 0, "the end of what was left behind")

    def test_an_expired_lease_without_workers_is_not_announced(self, world: World) -> None:
        """Workers started before it is renewed are killed."""
        hearing = EventCollector(world.processes)
        world.processes.hold(0.001)
        world.end_lease()
        assert hearing.receives_nothing()
        world.processes.start(2, 0, launch(["/bin/sleep", "600"]))
        hearing.take(events.WorkerStarted, generation=2)
        assert hearing.take(events.Fenced).generation == 2
        assert hearing.take(events.WorkerExited).exit_code == -signal.SIGKILL
        world.processes.clear(2)
        hearing.take(events.NodeCleared)
        world.processes.hold(600)
        world.start(0, generation=3)
        hearing.take(events.WorkerStarted, generation=3)
        assert hearing.receives_nothing()

    @pytest.mark.parametrize("seconds", [0, 600], ids=["lifted", "renewed"])
    def test_a_lease_can_be_changed(self, world: World, seconds: float) -> None:
        """The latest value counts; 0 means no limit."""
        hearing = EventCollector(world.processes)
        world.start(0)
        hearing.take(events.WorkerStarted)
        world.processes.hold(0.5)
        world.processes.hold(seconds)
        if not seconds:
            world.end_lease()
        assert hearing.receives_nothing(for_s=0.6)
        world.exit(0, 0)
        assert hearing.take(events.WorkerExited).exit_code == 0

    def test_close_ends_everything_and_may_be_repeated(self, world: World) -> None:
        """Afterwards no process is alive, no event comes, and there is no descriptor."""
        hearing = EventCollector(world.processes)
        world.start(0, ignores=(signal.SIGTERM,))
        world.leave_behind(0, in_group=False, ignores_term=True)
        hearing.events.clear()
        world.processes.close()
        world.processes.close()
        assert world.left_alive() == 0
        assert world.processes.fileno() == -1
        assert hearing.events == []
