"""The machine of ``tenax start``: which hosts get an agent, and what the exit code is."""

from __future__ import annotations

import pytest

from tenax._core.start import (
    AgentExited,
    AnyEvent,
    Checked,
    CloseConnection,
    Connect,
    Disconnected,
    Host,
    HostsListed,
    KillConnection,
    Print,
    SignalAgent,
    StartAgent,
    StartMachine,
    StartSettings,
    StopSignal,
    Tick,
)

LOST = "the connection was lost"


class Play:
    """A machine and its clock. Commands are shown as short text."""

    def __init__(self, hosts: str = "a b", **settings: int) -> None:
        self.machine = StartMachine(StartSettings(**{"min_nodes": 0, "max_restarts": 2, **settings}))
        self.now = 0.0
        self.printed: list[str] = []
        if hosts:
            assert self.listed(hosts) == [f"connect {name}" for name in hosts.split()]

    def step(self, event: AnyEvent) -> list[str]:
        done = []
        for command in self.machine.step(event, self.now):
            match command:
                case Print():
                    self.printed.append(command.text)
                case Connect():
                    done.append(f"connect {command.host.name}")
                case StartAgent():
                    done.append(f"start {command.host}")
                case SignalAgent():
                    done.append(f"signal {command.host} {command.number}")
                case CloseConnection():
                    done.append(f"close {command.host}")
                case KillConnection():
                    done.append(f"kill {command.host}")
        return done

    def listed(self, hosts: str) -> list[str]:
        return self.step(HostsListed(tuple(map(Host, hosts.split()))))

    def tick(self) -> list[str]:
        """Let time pass to the next deadline."""
        assert self.machine.deadline is not None
        self.now = max(self.now, self.machine.deadline)
        return self.step(Tick())

    def running(self) -> Play:
        for name in ("a", "b"):
            self.step(Checked(name))
        return self

    def end(self, host: str, code: int) -> list[str]:
        """The agent exits, and its connection ends."""
        return self.step(AgentExited(host, code)) + self.step(Disconnected(host, LOST))


def test_agents_start_when_all_hosts_have_passed_the_check() -> None:
    play = Play()
    assert play.step(Checked("b")) == []
    assert play.step(Checked("a")) == ["start a", "start b"]
    assert play.end("a", 0) == []
    assert play.machine.exit_code is None
    assert play.end("b", 0) == []
    assert play.machine.exit_code == 0
    assert play.printed == []


def test_every_host_that_fails_its_check_is_named_and_nothing_starts() -> None:
    play = Play("a b c")
    assert play.step(Checked("b", "it has no folder /x")) == ["close b"]
    assert play.step(Checked("c")) == []
    assert play.step(Disconnected("a", "cannot connect")) == ["close c"]
    assert play.printed == ["b: it has no folder /x", "a: cannot connect"]
    play.step(Disconnected("b", LOST))
    play.step(Disconnected("c", LOST))
    assert play.machine.exit_code == 71


def test_a_host_that_does_not_answer_its_check_is_killed() -> None:
    play = Play()
    play.step(Checked("a"))
    assert play.tick() == ["close b", "close a"]
    assert (play.now, play.printed) == (30, ["b: no answer within 30 s"])
    assert play.step(Disconnected("a", LOST)) == []
    assert play.tick() == ["kill b"]
    play.step(Disconnected("b", LOST))
    assert play.machine.exit_code == 71


@pytest.mark.parametrize("lost", [Disconnected("b", LOST), AgentExited("b", -9)])
def test_a_lost_agent_is_started_again(lost: AnyEvent) -> None:
    play = Play().running()
    play.now = 5
    assert play.step(lost) == []
    if isinstance(lost, AgentExited):
        play.step(Disconnected("b", LOST))
    assert play.printed[0].endswith("its agent is started again in 1 s")
    assert play.tick() == ["connect b"]
    assert play.now == 6
    assert play.step(Checked("b")) == ["start b"]
    play.end("a", 0)
    play.end("b", 0)
    assert play.machine.exit_code == 0


def test_attempts_in_a_row_are_bounded_and_wait_longer_each_time() -> None:
    play = Play().running()
    play.step(Disconnected("b", LOST))
    assert play.tick() == ["connect b"]
    play.step(Disconnected("b", "cannot connect"))
    assert play.tick() == ["connect b"]
    assert play.now == 3
    play.step(Checked("b", "it has no folder /x"))
    play.step(Disconnected("b", LOST))
    assert play.printed[-1] == "b: it has no folder /x; giving up after 2 restarts"
    assert play.tick() == ["signal a 15"]  # the run needs both hosts
    assert play.printed[-1] == "the run needs 2 hosts and has 1; its agents are stopped"
    play.end("a", 143)
    assert play.machine.exit_code == 71


def test_an_agent_that_ran_for_a_minute_has_all_attempts_again() -> None:
    play = Play(max_restarts=1).running()
    for _ in range(3):
        play.now += 60
        play.step(Disconnected("b", LOST))
        assert play.tick() == ["connect b"]
        assert play.step(Checked("b")) == ["start b"]


def test_an_elastic_run_goes_on_with_fewer_hosts() -> None:
    play = Play(min_nodes=1, max_restarts=0).running()
    play.step(Disconnected("b", LOST))
    assert play.machine.deadline is None
    play.end("a", 0)
    assert play.machine.exit_code == 0


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (3, 3, 3),
        (143, 3, 3),  # b left, then the run failed
        (143, 0, 0),
        (71, 0, 0),  # b could not work
        (71, 71, 71),
        (3, 71, 3),
        (0, 143, 0),
    ],
)
def test_the_exit_code_is_that_of_the_run(first: int, last: int, expected: int) -> None:
    play = Play(min_nodes=1).running()
    play.end("b", first)
    play.end("a", last)
    assert play.machine.exit_code == expected


def test_an_agent_that_was_started_again_too_late_is_stopped() -> None:
    """It would wait for a run that is over."""
    play = Play().running()
    play.step(Disconnected("b", LOST))
    play.tick()
    play.step(Checked("b"))
    play.end("a", 0)
    assert play.tick() == ["signal b 15"]
    play.end("b", 143)
    assert play.machine.exit_code == 0


def test_no_agent_is_started_again_after_the_end_of_the_run() -> None:
    play = Play().running()
    play.step(Disconnected("b", LOST))
    play.end("a", 3)
    assert play.machine.exit_code == 3


def test_one_signal_stops_and_a_second_kills() -> None:
    play = Play().running()
    assert play.step(StopSignal(2)) == ["signal a 2", "signal b 2"]
    assert play.machine.deadline is None  # the workers have the grace period of their agents
    play.end("a", 130)
    assert play.step(StopSignal(2)) == ["signal b 2"]
    assert play.tick() == ["close b"]
    assert play.step(AgentExited("b", -9)) == []
    assert play.tick() == ["kill b"]
    assert play.now == 5
    play.step(Disconnected("b", LOST))
    assert play.machine.exit_code == 130
    assert play.printed == []


def test_a_signal_during_the_check() -> None:
    play = Play()
    play.step(Checked("a"))
    assert play.step(StopSignal(15)) == ["close a", "close b"]
    play.step(Checked("b"))
    play.step(Disconnected("a", LOST))
    play.step(Disconnected("b", LOST))
    assert (play.machine.exit_code, play.printed) == (143, [])


def test_a_signal_while_an_agent_waits_for_its_restart() -> None:
    play = Play().running()
    play.step(Disconnected("b", LOST))
    assert play.step(StopSignal(2)) == ["signal a 2"]
    play.step(Disconnected("a", LOST))
    assert play.machine.exit_code == 130


def test_discovered_hosts_come_and_go() -> None:
    play = Play("", discovers=True)
    assert play.machine.exit_code is None
    assert play.listed("a b") == ["connect a", "connect b"]
    assert play.step(Checked("a")) == ["start a"]
    assert play.step(Checked("b", "it has no folder /x")) == ["close b"]
    play.step(Disconnected("b", LOST))
    assert play.listed("b c") == ["signal a 15", "connect c"]
    assert play.printed[-1] == "a is no longer listed; its agent is stopped"
    assert play.listed("a b c") == []  # not while it is being stopped
    play.end("a", 143)
    assert play.listed("a b c") == ["connect a"]
    assert play.step(Checked("c")) == ["start c"]
    assert play.tick() == ["connect b"]
    play.step(StopSignal(2))
    for name in "abc":
        play.step(Disconnected(name, LOST))
    assert play.machine.exit_code == 130
