"""The loop over generations, with an agent at the other end of the channel."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tenax import elastic
from tenax.elastic import _generation
from tenax.elastic._channel import Channel
from tenax.elastic._connections import open_sockets
from tenax.elastic._worker import Worker

from .fake_agent import FakeAgent


def wait_to_be_interrupted() -> None:
    threading.Event().wait(60)
    raise AssertionError("not interrupted")


def test_without_an_agent_there_is_one_generation_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread, no signal handler, and ``critical`` does nothing."""
    for name in ("TENAX_ELASTIC_FD", "RANK", "WORLD_SIZE", "TENAX_GENERATION"):
        monkeypatch.delenv(name, raising=False)
    threads, handler = threading.active_count(), signal.getsignal(signal.SIGURG)
    state = elastic.State(step=0)
    seen = []
    for generation in elastic.generations():
        with generation:
            generation.agree(state, restore=lambda state: seen.append("restored"))
            assert threading.active_count() == threads
            assert signal.getsignal(signal.SIGURG) is handler
            while state.step < 3:
                with elastic.critical():
                    state.step += 1
                generation.completed(state.step)
            seen.append((generation.rank, generation.world_size, generation.number))
    assert seen == ["restored", (0, 1, 0)]


@pytest.mark.parametrize("kind", ["closed", "file", "TCP", "listening", "not connected"])
def test_a_descriptor_that_is_not_a_channel_is_not_touched(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that a worker starts has the variable, but not the descriptor, or another one with its number."""
    with ExitStack() as opened:
        if kind == "file":
            descriptor = opened.enter_context(open(os.devnull)).fileno()
        else:
            family = socket.AF_INET if kind == "TCP" else socket.AF_UNIX
            connection = opened.enter_context(socket.socket(family))
            descriptor = connection.fileno()
            if kind == "listening":
                monkeypatch.chdir(tmp_path)  # the paths of sockets are short
                connection.bind("socket")
                connection.listen()
            if kind == "closed":
                connection.close()
        monkeypatch.setenv("TENAX_ELASTIC_FD", str(descriptor))
        monkeypatch.setattr(_generation, "_worker", None)  # of the process, which may have had a channel before
        numbers = []
        for generation in elastic.generations():
            with generation:
                numbers.append(generation.number)
        assert len(numbers) == 1
        assert _generation._worker is None
        if kind != "closed":
            os.fstat(descriptor)


def end_inside(agent: FakeAgent, context: AbstractContextManager[None]) -> None:
    """End the first generation inside this context; the worker must reach the second one."""
    state = elastic.State(step=0)
    for generation in elastic.generations():
        with generation:
            generation.agree(state)
            if generation.number == 2:
                break
            with context:
                agent.end_and_begin()
                wait_to_be_interrupted()
    assert generation.number == 2


def test_a_survivor_takes_part_in_the_next_generation(agent: FakeAgent) -> None:
    """It opts in, is interrupted, acknowledges with its last step, and continues with the new variables."""
    state = elastic.State(step=0)
    seen = []
    for generation in elastic.generations(timeout_s=7):
        seen.append((generation.number, generation.rank, generation.world_size, generation.why))
        with generation:
            generation.agree(state)
            if generation.number == 2:
                break
            state.step += 1
            generation.completed(state.step)
            agent.end_and_begin(2, rank=1)
            wait_to_be_interrupted()
    assert seen == [(1, 0, 1, "reason 1"), (2, 1, 1, "reason 2")]
    assert agent.receive() == {"type": "opt_in", "generation": 1, "timeout_s": 7}
    assert agent.receive() == {"type": "held", "generation": 1, "step": 1}
    assert agent.receive() == {"type": "opt_in", "generation": 2, "timeout_s": 7}
    assert os.environ["RANK"] == "1"
    assert "TENAX_ELASTIC_FD" not in os.environ


def test_the_end_is_raised_after_a_critical_section_not_in_it(agent: FakeAgent) -> None:
    state = elastic.State(step=0)
    seen = []
    for generation in elastic.generations():
        with generation:
            generation.agree(state)
            if generation.number == 2:
                break
            with elastic.critical():
                with elastic.critical():
                    agent.end_and_begin()
                    wait_for_the_signal()
                seen.append("outer section")
                state.step += 1
            seen.append("never")
    assert seen == ["outer section"]
    assert state.step == 1


def test_a_critical_section_is_not_entered_after_the_end(agent: FakeAgent) -> None:
    """The gradients may be those of collectives that were aborted. Tried in a thread, which no signal interrupts."""
    numbers, entered = [], []

    def loop() -> None:
        for generation in elastic.generations():
            numbers.append(generation.number)
            with generation:
                if generation.number == 2:
                    break
                agent.end_and_begin()
                worker = _generation._worker
                assert worker is not None
                assert worker.why_ended(60)
                with elastic.critical():
                    entered.append(generation.number)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join(60)
    assert (numbers, entered) == ([1, 2], [])


def wait_for_the_signal() -> None:
    """Wait until SIGURG was received; its handler does not raise here."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        assert os.read(reader, 1) == bytes([signal.SIGURG])
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("has_lost_peer", [False, True])
def test_cleanup_in_the_block_is_not_interrupted(agent: FakeAgent, has_lost_peer: bool) -> None:
    """The signal comes again and again, because it may be lost; not into what the first one has started."""
    state = elastic.State(step=0)
    seen = []
    for generation in elastic.generations():
        with generation:
            generation.agree(state)
            if generation.number == 2:
                break
            try:
                if has_lost_peer:
                    raise BrokenPipeError("a peer is gone")
                agent.end_and_begin()
                wait_to_be_interrupted()
            finally:
                if has_lost_peer:
                    agent.end_and_begin()
                wait_for_the_signal()
                with elastic.critical():
                    seen.append("section")
                seen.append("cleanup")
    assert seen == ["section", "cleanup"]


@pytest.mark.parametrize("how", ["in __exit__", "as the cause", "without a context"])
def test_a_cleanup_that_fails_after_the_end_does_not_fail_the_worker(
    agent: FakeAgent, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Connection:
        def __enter__(self) -> None:
            pass

        def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
            if how == "in __exit__":
                raise OSError("could not close")
            raise OSError("could not close") from (error if how == "as the cause" else None)

    end_inside(agent, Connection())
    assert "continues after an exception in its cleanup: OSError: could not close" in capsys.readouterr().err


def test_a_request_to_exit_in_the_cleanup_is_carried_out(agent: FakeAgent) -> None:
    def loop() -> None:
        for generation in elastic.generations():
            with generation:
                try:
                    agent.end_and_begin()
                    wait_to_be_interrupted()
                finally:
                    raise SystemExit(3)  # as a handler of SIGTERM does

    with pytest.raises(SystemExit, match="3"):
        loop()


def test_a_block_in_the_handler_of_a_lost_peer_is_interrupted(agent: FakeAgent) -> None:
    state = elastic.State(step=0)
    try:
        raise ConnectionRefusedError("the server of another experiment")
    except ConnectionRefusedError:
        for generation in elastic.generations():
            with generation:
                generation.agree(state)
                if generation.number == 2:
                    break
                agent.end_and_begin()
                wait_to_be_interrupted()
    assert generation.number == 2


def test_an_exception_that_leaves_a_critical_section_makes_the_state_unknown(agent: FakeAgent) -> None:
    """The state is restored, because no other rank has it; a restore that loads nothing is an error."""
    state = elastic.State(step=0)
    restored = []

    def restore(state: elastic.State) -> None:
        restored.append(state.step)
        state.step = 3

    for generation in elastic.generations():
        with generation:
            generation.agree(state, restore=restore)
            if generation.number == 2:
                break
            with elastic.critical():
                agent.end_and_begin()
                state.step += 1
                raise ConnectionResetError("in the middle of an update")
    assert restored == [0, -1]
    assert state.step == 3


def test_every_state_is_unknown_after_a_cut_and_only_until_it_is_agreed_on(agent: FakeAgent) -> None:
    """With two states, the agreement on the first does not make the second whole."""
    states = {"first": elastic.State(value=0, step=0), "second": elastic.State(value=0, step=0)}
    restored = []

    def restore(state: elastic.State) -> None:
        state.value = state.step = 0
        restored.append(next(name for name, each in states.items() if each is state))

    for generation in elastic.generations():
        with generation:
            for state in states.values():
                generation.agree(state, restore)
            if generation.number == 3:
                break
            if generation.number == 2:
                agent.end_and_begin(3)
                wait_to_be_interrupted()
            with elastic.critical():
                agent.end_and_begin()
                states["second"].value = 99
                raise ConnectionResetError("in the middle of an update")
    assert restored == ["first", "second"] * 2  # and nothing in generation 3
    assert states["second"].value == 0


def test_a_state_that_is_made_after_a_cut_may_have_the_parts_that_were_cut(agent: FakeAgent) -> None:
    """So it is not kept if there is no checkpoint; one that is made after the next agreement is."""
    restored = []

    def restore(state: elastic.State) -> None:
        restored.append(state.step)
        state.step = 0

    for generation in elastic.generations():
        with generation:
            generation.agree(elastic.State(step=0), restore)
            if generation.number == 2:
                generation.agree(elastic.State(step=0), restore)
                break
            with elastic.critical():
                agent.end_and_begin()
                raise ConnectionResetError("in the middle of an update")
    assert restored == [0, -1, 0]


def test_a_state_that_is_not_whole_is_never_kept(agent: FakeAgent) -> None:
    state = elastic.State(step=0)

    def loop() -> None:
        for generation in elastic.generations():
            with generation:
                generation.agree(state, restore=lambda state: None)
                with elastic.critical():
                    agent.end_and_begin()
                    state.step += 1
                    raise ConnectionResetError("in the middle of an update")

    with pytest.raises(RuntimeError, match="no rank has a whole state"):
        loop()


def test_a_lost_peer_waits_for_the_end_of_the_generation(agent: FakeAgent) -> None:
    state = elastic.State(step=0)
    ends = threading.Thread(target=lambda: agent.receive() and agent.end_and_begin())
    for generation in elastic.generations():
        with generation:
            generation.agree(state)
            if generation.number == 2:
                break
            ends.start()  # after the exception, or before it
            raise BrokenPipeError("a peer is gone")
    ends.join()
    assert generation.number == 2


def test_any_other_exception_is_raised_at_once(agent: FakeAgent) -> None:
    def loop() -> None:
        for generation in elastic.generations():
            with generation:
                raise ValueError("wrong label")

    with pytest.raises(ValueError, match="wrong label"):
        loop()
    assert agent.receive()["type"] == "opt_in"
    agent.end()
    assert agent.receive() == {}  # the process takes part in no other generation


def test_completed_raises_the_end(agent: FakeAgent) -> None:
    """An update by an optimizer is over with ``completed``, which raises what was put off."""
    state = elastic.State(step=0)
    for generation in elastic.generations():
        with generation:
            generation.agree(state)
            if generation.number == 2:
                break
            worker = _generation._worker
            assert worker is not None
            worker.begin_update()  # what the hook of torch's optimizers calls
            agent.end_and_begin()
            wait_for_the_signal()
            state.step += 1
            generation.completed(state.step)
            raise AssertionError("not interrupted")
    assert state.step == 1


def test_an_exception_between_an_optimizer_step_and_completed_makes_the_state_unknown(agent: FakeAgent) -> None:
    state = elastic.State(step=0)

    def loop() -> None:
        for generation in elastic.generations():
            with generation:
                generation.agree(state)
                worker = _generation._worker
                assert worker is not None
                worker.begin_update()
                agent.end_and_begin()
                raise ConnectionResetError("in the optimizer")

    with pytest.raises(RuntimeError, match="no rank has a whole state"):
        loop()


def test_a_block_that_is_left_after_the_end_is_followed_by_the_next_generation(agent: FakeAgent) -> None:
    """The rank that has finished first still has the state that others may need."""
    numbers = []
    state = elastic.State(step=0)
    for generation in elastic.generations():
        numbers.append(generation.number)
        with elastic.critical(), generation:  # so nothing is raised in the block
            generation.agree(state)
            if generation.number == 1:
                agent.end_and_begin()
                wait_for_the_signal()
    assert numbers == [1, 2]


def test_a_generation_that_ended_before_the_worker_saw_it_begin_is_acknowledged_too(agent: FakeAgent) -> None:
    state = elastic.State(step=0)
    numbers = []
    for generation in elastic.generations():
        numbers.append(generation.number)
        with generation:
            if generation.number == 3:
                break
            if generation.number == 1:
                generation.agree(state)
                agent.end_and_begin()
                wait_to_be_interrupted()
            agent.end_and_begin(3)
            wait_to_be_interrupted()
    assert numbers == [1, 2, 3]
    messages = [agent.receive() for _ in range(5)]
    assert [(each["type"], each["generation"]) for each in messages] == [
        ("opt_in", 1),
        ("held", 1),
        ("opt_in", 2),
        ("held", 2),
        ("opt_in", 3),
    ]


def test_held_is_sent_after_the_critical_sections_of_other_threads(agent: FakeAgent) -> None:
    state = elastic.State(step=0)
    entered, leave = threading.Event(), threading.Event()

    def save() -> None:
        with elastic.critical():
            entered.set()
            leave.wait(60)
            assert not agent.has_message()

    thread = threading.Thread(target=save)
    for generation in elastic.generations():
        with generation:
            generation.agree(state)
            if generation.number == 2:
                break
            assert agent.receive()["type"] == "opt_in"
            thread.start()
            entered.wait(60)
            threading.Timer(0.01, leave.set).start()
            agent.end_and_begin()
            wait_to_be_interrupted()
    thread.join()
    assert agent.receive()["type"] == "held"


def test_a_worker_that_is_held_exits_when_the_channel_closes(agent: FakeAgent) -> None:
    def loop() -> None:
        for generation in elastic.generations():
            with generation:
                with elastic.critical():  # the end comes after both
                    agent.end()
                    agent.close()
                wait_to_be_interrupted()

    with pytest.raises(SystemExit, match="takes part in no other generation"):
        loop()


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n",
        b"[]\n",
        b'{"type":"end","generation":"1","why":""}\n',
        b'{"type":"end","generation":7,"why":"x"}\n',
        b'{"type":"begin","generation":1,"env":{}}\n',
        b'{"type":"begin","generation":2,"env":{"RANK":1}}\n',
        b"x" * 200_000,
    ],
)
def test_a_message_that_is_not_understood_closes_the_channel(agent: FakeAgent, line: bytes) -> None:
    """The worker goes on as one that has not opted in."""
    for generation in elastic.generations():
        with generation:
            assert agent.receive()["type"] == "opt_in"
            agent.send(line)
            assert agent.receive() == {}
            generation.completed(1)
    assert generation.number == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_reader_that_fails_closes_the_channel() -> None:
    class FailingChannel(Channel):
        def receive(self) -> None:
            raise OSError("the reader failed")

    agents, workers = socket.socketpair()
    agents.settimeout(5)
    worker = Worker(FailingChannel(workers), 1, 5.0)
    with agents, agents.makefile("rb") as messages:
        assert b"opt_in" in messages.readline()
        assert messages.readline() == b""
    assert not worker.resume(5.0)
    worker.finish()
    for thread in threading.enumerate():
        if thread.name == "tenax-elastic":
            thread.join(5)  # so that its exception is reported here


def test_a_worker_without_a_free_descriptor_survives(agent: FakeAgent) -> None:
    end_inside(agent, all_descriptors_in_use())


def test_sockets_are_found_without_a_free_descriptor() -> None:
    with socket.socket() as one:
        status = os.fstat(one.fileno())
        with all_descriptors_in_use():
            assert (status.st_dev, status.st_ino) in open_sockets()


@contextmanager
def all_descriptors_in_use() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(int(name) for name in os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, limits[1]))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)


def test_the_next_loop_of_a_process_uses_the_same_channel(agent: FakeAgent) -> None:
    for _ in range(2):
        for generation in elastic.generations():
            with generation:
                pass
    state = elastic.State(step=0)
    for generation in elastic.generations():
        with generation:
            generation.agree(state)
            if generation.number == 1:
                agent.end_and_begin()
                wait_to_be_interrupted()
    assert generation.number == 2


def test_the_handler_of_the_script_comes_back_after_the_loop(agent: FakeAgent) -> None:
    before = signal.getsignal(signal.SIGURG)
    for generation in elastic.generations():
        with generation:
            assert signal.getsignal(signal.SIGURG) is not before
    assert signal.getsignal(signal.SIGURG) is before


@pytest.mark.parametrize("timeout_s", [0, -1, 3601, float("nan")])
def test_a_timeout_out_of_bounds_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        next(iter(elastic.generations(timeout_s=timeout_s)))


@pytest.mark.process
def test_a_forked_child_does_not_touch_the_channel(agent: FakeAgent) -> None:
    for generation in elastic.generations():
        with generation:
            assert agent.receive()["type"] == "opt_in"
            pid = os.fork()
            if pid == 0:
                with elastic.critical():
                    generation.completed(1)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert not agent.has_message()
            generation.completed(1)
    agent.end()
    assert agent.receive() == {}
