"""``expires`` and the clients: which scopes are acquired and released, when, and under which name."""

from __future__ import annotations

import importlib
import inspect
import signal
import subprocess
import sys
import time

import pytest

from kit.processes import needs_torch
from tenax import timer
from tenax.timer import TimerClient, TimerRequest
from tenax.timer import api as timer_api
from tenax.timer.debug_info_logging import log_debug_info_for_expired_timers

pytestmark = pytest.mark.process


class RecordingClient(TimerClient):
    """Records acquisitions and releases."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, float]] = []

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.calls.append(("acquire", scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self.calls.append(("release", scope_id, 0.0))


@pytest.fixture
def no_client_is_configured():
    before = timer_api._timer_client
    timer_api._timer_client = None
    yield
    timer_api._timer_client = before


def test_a_block_acquires_and_releases() -> None:
    """The expiration is the entry time plus the timeout, on the wall clock."""
    notes = RecordingClient()
    before = time.time()
    with timer.expires(after=60, scope="step", client=notes):
        ((verb, scope, expires_at),) = notes.calls
        assert (verb, scope) == ("acquire", "step")
        assert before + 60 <= expires_at <= time.time() + 60
    assert notes.calls[1] == ("release", "step", 0.0)


def test_a_block_that_raises_is_released() -> None:
    notes = RecordingClient()
    with pytest.raises(ZeroDivisionError), timer.expires(1, "step", notes):
        raise ZeroDivisionError
    assert [verb for verb, *_ in notes.calls] == ["acquire", "release"]


def test_nested_blocks_with_one_name_keep_the_earliest_deadline() -> None:
    """Recursion, or the same line in two threads: until the block of that deadline is left."""
    notes = RecordingClient()
    with timer.expires(60, "step", notes):
        with timer.expires(10, "step", notes):
            pass
        outer, inner, again = (expires_at for _, _, expires_at in notes.calls)
        assert inner < outer == again
    assert [verb for verb, *_ in notes.calls] == ["acquire", "acquire", "acquire", "release"]


def test_a_later_deadline_of_the_same_name_takes_effect_when_the_earlier_block_is_left() -> None:
    """Blocks may be left in any order."""
    notes = RecordingClient()
    first, second = timer.expires(10, "step", notes), timer.expires(60, "step", notes)
    first.__enter__()
    second.__enter__()
    assert len(notes.calls) == 1
    first.__exit__(None, None, None)
    verb, _, expires_at = notes.calls[-1]
    assert verb == "acquire"
    assert expires_at > notes.calls[0][2] + 40
    second.__exit__(None, None, None)
    assert [verb for verb, *_ in notes.calls] == ["acquire", "acquire", "release"]


def test_scopes_of_two_clients_are_independent() -> None:
    notes, others = RecordingClient(), RecordingClient()
    with timer.expires(60, "step", notes), timer.expires(60, "step", others):
        assert len(notes.calls) == len(others.calls) == 1
    assert notes.calls[-1][0] == others.calls[-1][0] == "release"


def test_a_block_whose_acquisition_failed_is_not_open() -> None:
    """The next block of that name is released normally."""

    class Refusing(RecordingClient):
        def acquire(self, scope_id: str, expiration_time: float) -> None:
            super().acquire(scope_id, expiration_time)
            if len(self.calls) == 1:
                raise BrokenPipeError

    notes = Refusing()
    with pytest.raises(BrokenPipeError), timer.expires(60, "step", notes):
        raise AssertionError("was entered")
    with timer.expires(60, "step", notes):
        pass
    assert [verb for verb, *_ in notes.calls] == ["acquire", "release", "acquire", "release"]


class Interrupted(RecordingClient):
    """Receives a signal after an acquisition, or before a release, once."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self._verb = verb

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        super().acquire(scope_id, expiration_time)
        self._receive("acquire")

    def release(self, scope_id: str) -> None:
        self._receive("release")
        super().release(scope_id)

    def _receive(self, verb: str) -> None:
        if verb == self._verb:
            self._verb = ""
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("verb", ["acquire", "release"])
def test_an_interrupt_leaves_no_timer(verb: str) -> None:
    """The process may handle the exception and continue; a timer that nothing releases would kill it."""
    notes = Interrupted(verb)
    with pytest.raises(KeyboardInterrupt), timer.expires(60, "step", notes):
        pass
    assert [verb for verb, *_ in notes.calls] == ["acquire", "release"]


FORKS = """
import os, signal, threading
from tenax.timer import TimerClient, api, expires

class RecordingClient(TimerClient):
    calls = []
    def acquire(self, scope_id, expiration_time):
        self.calls.append("acquire")
    def release(self, scope_id):
        self.calls.append("release")

held, done = threading.Event(), threading.Event()
def hold():
    with api._lock:
        held.set()
        done.wait()
with expires(60, "step", RecordingClient()):
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        with expires(70, "step", RecordingClient()):
            pass
        os._exit(RecordingClient.calls != ["acquire", "acquire", "release"])
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_child_forked_in_a_block_does_not_inherit_it() -> None:
    """Its own blocks work, even if a thread of its parent was entering one during the fork."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], check=True, timeout=60)


def test_without_a_name_a_block_is_named_by_file_and_line() -> None:
    """Of the ``with``, so that a report shows where the program hung."""
    notes = RecordingClient()
    line = sys._getframe().f_lineno + 1
    with timer.expires(after=1, client=notes):
        pass
    assert notes.calls[0][1] == f"{__file__}#{line}"


def test_a_function_can_be_decorated() -> None:
    """The client is looked up at the call, not at import."""
    notes = RecordingClient()

    @timer.expires(after=1, scope="step", client=notes)
    def step() -> int:
        return len(notes.calls)

    assert notes.calls == []
    assert (step(), step()) == (1, 3)


def test_the_configured_client_is_used(no_client_is_configured) -> None:
    notes = RecordingClient()
    timer.configure(notes)
    with timer.expires(after=1):
        pass
    assert len(notes.calls) == 2


def test_without_a_client_the_error_has_the_next_step(no_client_is_configured) -> None:
    with pytest.raises(RuntimeError, match=r"tenax\.timer\.configure"), timer.expires(after=1):
        pass


def test_requests_are_equal_by_value() -> None:
    assert TimerRequest(1, "a", 2.0) == TimerRequest(1, "a", 2.0)
    assert TimerRequest(1, "a", 2.0) != TimerRequest(1, "a", 3.0)
    assert TimerRequest(1, "a", 2.0) != "a"
    assert timer.FileTimerRequest(1, "a", 2.0, 9) == timer.FileTimerRequest(1, "a", 2.0, 9)
    assert timer.FileTimerRequest(1, "a", 2.0, 9) != timer.FileTimerRequest(1, "a", 2.0, 15)
    assert timer.FileTimerRequest(1, "a", 2.0) != TimerRequest(1, "a", 2.0)


def test_expired_timers_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """At INFO; without expired timers nothing is logged."""
    caplog.set_level("INFO")
    log_debug_info_for_expired_timers("run", {})
    assert caplog.records == []
    log_debug_info_for_expired_timers("run", {7: ["{}"]})
    assert "the run run" in caplog.text


NAMES = {
    "": (
        "TimerClient TimerRequest TimerServer FileTimerClient FileTimerRequest FileTimerServer LocalTimerClient "
        "LocalTimerServer configure expires"
    ),
    ".api": "RequestQueue TimerClient TimerRequest TimerServer configure expires",
    ".local_timer": "LocalTimerClient LocalTimerServer MultiprocessingRequestQueue",
    ".file_based_local_timer": "FileTimerClient FileTimerRequest FileTimerServer",
    ".debug_info_logging": "log_debug_info_for_expired_timers",
}


@needs_torch
def test_names_and_parameters_are_torchelastics() -> None:
    """Calls by position and by name work as in TorchElastic."""
    for module, names in NAMES.items():
        theirs = importlib.import_module(f"torch.distributed.elastic.timer{module}")
        ours = importlib.import_module(f"tenax.timer{module}")
        for name in names.split():
            assert name in ours.__all__
            assert_same_parameters(getattr(ours, name), getattr(theirs, name), name)


def assert_same_parameters(ours, theirs, name: str) -> None:
    assert parameters(ours) == parameters(theirs), name
    if inspect.isclass(theirs):
        for method, value in vars(theirs).items():
            if callable(value) and not method.startswith("_"):
                assert parameters(getattr(ours, method)) == parameters(value), f"{name}.{method}"


def parameters(thing) -> list[tuple[str, object]]:
    found = inspect.signature(thing).parameters.values()
    return [(each.name, each.default) for each in found if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
