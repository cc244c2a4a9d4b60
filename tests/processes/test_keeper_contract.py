"""What every implementation of ``ports.Processes`` promises: the real keeper and the fake one, by the same tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from kit.processes import Hearing, Pipe, gone, launch, leaving_nothing, on_linux, python, until
from tenax._core import events
from tenax._io.ports import Processes
from tenax._processes.keeper import KeeperProcess
from tenax.testing.processes import FakeProcesses

pytestmark = on_linux

# A worker that does what it is told on its standard input, and says its pid first.
OBEDIENT = """
import os, signal, sys
for number in map(int, sys.argv[1:]):
    signal.signal(number, signal.SIG_IGN)
print(os.getpid(), flush=True)
def leave_behind(own_session, deaf):
    pid = os.fork()
    if pid == 0:
        os.close(0)
        if own_session:
            os.setsid()
        if deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        while True:
            signal.pause()
for line in sys.stdin:
    word, *rest = line.split()
    if word == "exit":
        os._exit(int(rest[0]))
    leave_behind(rest[0] == "session", rest[1] == "deaf")
"""


class World:
    """How a test makes things happen, for real or not."""

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
        """How many of those that were left behind are alive."""
        raise NotImplementedError

    def lose(self) -> None:
        raise NotImplementedError

    def end_lease(self) -> None:
        """The lease runs out, if there is one."""
        raise NotImplementedError

    def is_no_python(self, rank: int) -> None:
        """This worker cannot be asked for its stacks."""

    def close(self) -> None:
        self.processes.close()


class Real(World):
    def __init__(self) -> None:
        self.processes = self._keeper = KeeperProcess()
        self._pipes: dict[int, tuple[int, Pipe]] = {}  # by rank: where its orders go, where its words come from
        self._left: list[int] = []

    def start(self, rank: int, generation: int = 1, ignores: tuple[int, ...] = ()) -> None:
        self._forget(rank)
        orders, orders_in = os.pipe()
        words = Pipe()
        command = launch(python(OBEDIENT, *map(int, ignores)), descriptors={0: orders, 1: words.writer})
        self.processes.start(generation, rank, command)
        os.close(orders)
        words.close_writer()
        self._pipes[rank] = (orders_in, words)
        words.line()  # it is deaf to what it should be deaf to

    def start_impossible(self, rank: int) -> None:
        self.processes.start(1, rank, launch(["/nowhere/program"]))

    def exit(self, rank: int, code: int) -> None:
        os.write(self._pipes[rank][0], b"exit %d\n" % code)

    def leave_behind(self, rank: int, *, in_group: bool, ignores_term: bool) -> None:
        orders, words = self._pipes[rank]
        order = f"leave {'group' if in_group else 'session'} {'deaf' if ignores_term else 'obedient'}\n"
        os.write(orders, order.encode())
        self._left.append(int(words.line()))

    def left_alive(self) -> int:
        return sum(not gone([pid], 0) for pid in self._left)

    def lose(self) -> None:
        os.kill(self._keeper.pid, signal.SIGKILL)

    def end_lease(self) -> None:
        """By itself: every real lease in these tests is short."""

    def _forget(self, rank: int) -> None:
        if rank in self._pipes:
            orders, words = self._pipes.pop(rank)
            os.close(orders)
            words.close()

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

    def is_no_python(self, rank: int) -> None:
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
        """Every start is answered once, with a pid of its own."""
        hearing = Hearing(world.processes)
        for rank in range(3):
            world.start(rank)
        started = [hearing.take(events.WorkerStarted, generation=1, local_rank=rank) for rank in range(3)]
        assert len({event.pid for event in started}) == 3
        assert min(event.pid for event in started) > 1

    def test_nothing_is_heard_inside_an_order(self, world: World) -> None:
        """Answers come when the descriptor is served: an order never calls back into whoever gave it."""
        hearing = Hearing(world.processes)
        world.start(0)
        world.exit(0, 0)
        assert hearing.events == []
        hearing.take(events.WorkerStarted)

    @pytest.mark.parametrize("code", [0, 1, 3, 255])
    def test_an_exit_code_comes_back(self, world: World, code: int) -> None:
        """A worker that exits is announced with its code, as one that nobody had asked to end."""
        hearing = Hearing(world.processes)
        world.start(0)
        world.exit(0, code)
        assert hearing.take(events.WorkerExited) == events.WorkerExited(1, 0, code, before_stop=True)

    def test_a_start_that_fails_says_why(self, world: World) -> None:
        """What cannot be started is announced with the system's reason and a shell's code, and never as an exit."""
        hearing = Hearing(world.processes)
        world.start_impossible(0)
        failed = hearing.take(events.WorkerStartFailed)
        assert (failed.generation, failed.local_rank, failed.exit_code) == (1, 0, 127)
        assert failed.reason == "No such file or directory: '/nowhere/program'"
        world.processes.clear(1)
        hearing.take(events.NodeCleared)
        assert not [event for event in hearing.events if isinstance(event, events.WorkerExited)]

    def test_a_signal_reaches_every_living_worker_of_its_generation(self, world: World) -> None:
        """All of them get it, and those that die of it are announced with the signal's number, as asked."""
        hearing = Hearing(world.processes)
        for rank in range(3):
            world.start(rank)
        world.exit(1, 0)
        hearing.take(events.WorkerExited, local_rank=1)
        world.processes.signal(1, signal.SIGTERM)
        for rank in (0, 2):
            exited = hearing.take(events.WorkerExited, local_rank=rank)
            assert exited == events.WorkerExited(1, rank, -signal.SIGTERM, before_stop=False)

    def test_a_signal_to_another_generation_reaches_nobody(self, world: World) -> None:
        """A late order for workers that are gone does not hit those that came after them."""
        hearing = Hearing(world.processes)
        world.start(0, generation=2)
        hearing.take(events.WorkerStarted)
        world.processes.signal(1, signal.SIGKILL)
        world.exit(0, 5)
        assert hearing.take(events.WorkerExited).exit_code == 5

    def test_a_deaf_worker_stays_until_it_is_killed(self, world: World) -> None:
        """A signal that is ignored changes nothing; kill ends it."""
        hearing = Hearing(world.processes)
        world.start(0, ignores=(signal.SIGTERM,))
        hearing.take(events.WorkerStarted)
        world.processes.signal(1, signal.SIGTERM)
        assert hearing.hears_nothing()
        world.processes.kill(1)
        assert hearing.take(events.WorkerExited) == events.WorkerExited(1, 0, -signal.SIGKILL, before_stop=False)
        assert hearing.take(events.NodeCleared) == events.NodeCleared(1)

    def test_one_worker_can_be_ended_alone(self, world: World) -> None:
        """Only it gets the signal; it is announced as one that we ended, and the other goes on."""
        hearing = Hearing(world.processes)
        world.start(0)
        world.start(1)
        hearing.take(events.WorkerStarted, local_rank=1)
        world.processes.end(1, 0, signal.SIGTERM)
        assert hearing.take(events.WorkerExited) == events.WorkerExited(1, 0, -signal.SIGTERM, before_stop=False)
        world.processes.end(1, 0, signal.SIGTERM)  # it is dead already
        world.exit(1, 5)
        assert hearing.take(events.WorkerExited) == events.WorkerExited(1, 1, 5, before_stop=True)

    def test_an_order_to_end_a_worker_of_another_generation_reaches_nobody(self, world: World) -> None:
        """Nor does a request for its stacks."""
        hearing = Hearing(world.processes)
        world.start(0, generation=2)
        hearing.take(events.WorkerStarted)
        world.is_no_python(0)
        world.processes.dump_stacks(1, 0)
        world.processes.end(1, 0, signal.SIGKILL)
        assert hearing.hears_nothing()

    def test_what_a_worker_left_that_was_ended_alone_is_killed_at_once(self, world: World) -> None:
        """It hung: its children are not worth a grace period."""
        hearing = Hearing(world.processes)
        world.start(0)
        world.leave_behind(0, in_group=True, ignores_term=True)
        world.processes.end(1, 0, signal.SIGKILL)
        hearing.take(events.WorkerExited)
        world.processes.clear(1)
        hearing.take(events.NodeCleared)
        assert world.left_alive() == 0

    def test_a_worker_that_cannot_show_its_stacks_is_not_asked(self, world: World) -> None:
        """The signal would end it. Instead it is said why there are none, and the worker lives on."""
        hearing = Hearing(world.processes)
        world.start(0)
        world.is_no_python(0)
        world.processes.dump_stacks(1, 0)
        refused = hearing.take(events.StacksRefused)
        assert (refused.generation, refused.local_rank) == (1, 0)
        assert "it is not a Python program" in refused.why
        world.exit(0, 0)
        assert hearing.take(events.WorkerExited) == events.WorkerExited(1, 0, 0, before_stop=True)

    def test_an_empty_node_is_clear_at_once(self, world: World) -> None:
        """Whoever asks to clear or kill where nobody is, is answered, once for each order."""
        hearing = Hearing(world.processes)
        world.processes.clear(1)
        hearing.take(events.NodeCleared, generation=1)
        world.processes.kill(1)
        hearing.take(events.NodeCleared, generation=1)
        assert hearing.hears_nothing()

    def test_clear_comes_after_the_last_exit(self, world: World) -> None:
        """ "Cleared" is said when nobody is left, after every exit was said."""
        hearing = Hearing(world.processes)
        world.start(0)
        world.start(1)
        world.processes.kill(1)
        hearing.take(events.NodeCleared)
        heard = [event for event in hearing.events if isinstance(event, events.WorkerExited)]
        assert sorted(event.local_rank for event in heard) == [0, 1]

    def test_what_a_worker_that_was_not_stopped_left_is_killed_at_once(self, world: World) -> None:
        """A worker that ended by itself leaves nobody: not in its group, not in another session, deaf or not."""
        hearing = Hearing(world.processes)
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

    def test_the_group_of_an_asked_worker_has_its_grace(self, world: World) -> None:
        """After we asked a worker to end, its group is asked too; who does not listen stays until kill, others go."""
        hearing = Hearing(world.processes)
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
        assert hearing.hears_nothing()
        world.processes.kill(1)
        hearing.take(events.NodeCleared)
        assert world.left_alive() == 0

    def test_the_next_generation_starts_afresh(self, world: World) -> None:
        """The same ranks can be started again, and what was asked of the old ones is not held against the new."""
        hearing = Hearing(world.processes)
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

    def test_a_lost_keeper_is_said_once_with_the_reason(self, world: World) -> None:
        """When the process above the workers dies, that is the last thing heard, and there is nothing to watch."""
        hearing = Hearing(world.processes)
        world.start(0)
        world.leave_behind(0, in_group=False, ignores_term=True)
        world.lose()
        lost = hearing.take(events.KeeperLost)
        assert lost.reason == "it was killed by SIGKILL"
        assert world.processes.fileno() == -1
        assert world.left_alive() == 0
        world.processes.on_readable()
        world.processes.close()

    def test_a_lease_that_is_not_renewed_ends_everything(self, world: World) -> None:
        """Fenced is said, then every worker is killed, as asked; what they left in other sessions goes too."""
        hearing = Hearing(world.processes)
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

    def test_a_lease_counts_for_what_dead_workers_left(self, world: World) -> None:
        """The workers ended by themselves, and are said to have; only their leftovers are alive when it ends."""
        hearing = Hearing(world.processes)
        world.start(0)
        world.leave_behind(0, in_group=True, ignores_term=True)
        world.leave_behind(0, in_group=False, ignores_term=True)
        world.exit(0, 3)
        assert hearing.take(events.WorkerExited) == events.WorkerExited(1, 0, 3, before_stop=True)
        world.processes.hold(0.01)
        world.end_lease()
        assert hearing.take(events.Fenced).generation == 1
        until(lambda: world.left_alive() == 0, "the end of what was left behind")

    def test_a_lease_of_nobody_ends_in_silence(self, world: World) -> None:
        """There is nobody to fence; but who is started before it is renewed does not live."""
        hearing = Hearing(world.processes)
        world.processes.hold(0.001)
        world.end_lease()
        assert hearing.hears_nothing()
        world.processes.start(2, 0, launch(["/bin/sleep", "600"]))
        hearing.take(events.WorkerStarted, generation=2)
        assert hearing.take(events.Fenced).generation == 2
        assert hearing.take(events.WorkerExited).exit_code == -signal.SIGKILL
        world.processes.clear(2)
        hearing.take(events.NodeCleared)
        world.processes.hold(600)
        world.start(0, generation=3)
        hearing.take(events.WorkerStarted, generation=3)
        assert hearing.hears_nothing()

    @pytest.mark.parametrize("seconds", [0, 600], ids=["lifted", "renewed"])
    def test_a_lease_can_be_changed(self, world: World, seconds: float) -> None:
        """What was said last counts; 0 means: no limit."""
        hearing = Hearing(world.processes)
        world.start(0)
        hearing.take(events.WorkerStarted)
        world.processes.hold(0.5)
        world.processes.hold(seconds)
        if not seconds:
            world.end_lease()
        assert hearing.hears_nothing(for_s=0.6)
        world.exit(0, 0)
        assert hearing.take(events.WorkerExited).exit_code == 0

    def test_close_ends_everything_and_may_be_repeated(self, world: World) -> None:
        """Afterwards nobody is alive, nothing is said any more and there is no descriptor."""
        hearing = Hearing(world.processes)
        world.start(0, ignores=(signal.SIGTERM,))
        world.leave_behind(0, in_group=False, ignores_term=True)
        hearing.events.clear()
        world.processes.close()
        world.processes.close()
        assert world.left_alive() == 0
        assert world.processes.fileno() == -1
        assert hearing.events == []
