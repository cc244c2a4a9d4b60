"""Recording: one event to all its handlers."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tenax import events
from tenax.events import Event, EventSource, LoggingEventHandler, NodeState, RdzvEvent, handlers

from .kit import Keeping, an_event


@pytest.fixture
def table() -> Iterator[dict[str, logging.Handler]]:
    """TorchElastic's table of logging handlers, restored after the test."""
    before = dict(handlers._log_handlers)
    yield handlers._log_handlers
    handlers._log_handlers.clear()
    handlers._log_handlers.update(before)


def rdzv_event() -> RdzvEvent:
    return RdzvEvent("f.py:C.m", "run", "joined", "host", 7, NodeState.RUNNING)


class TestConfigured:
    def test_every_configured_handler_gets_every_event_of_both_kinds(self) -> None:
        first, second = Keeping(), Keeping()
        with events.configure(first), events.configure(second):
            events.record(an_event("one"), "null")
            events.record_rdzv_event(rdzv_event())
        assert first.kept == second.kept == [an_event("one"), rdzv_event()]

    def test_configuring_a_handler_twice_has_no_effect(self) -> None:
        handler = Keeping()
        with events.configure(handler):
            with events.configure(handler):
                events.record(an_event("one"))
            events.record(an_event("two"))  # the second configure had no effect, and neither had its undo
        events.record(an_event("three"))
        assert [event.name for event in handler.kept] == ["one", "two"]

    def test_equal_handlers_are_different_handlers(self) -> None:
        class Equal(Keeping):
            def __eq__(self, other: object) -> bool:
                return True

            __hash__ = object.__hash__

        first, second = Equal(), Equal()
        with events.configure(first), events.configure(second):
            events.record(an_event())
        assert len(first.kept) == len(second.kept) == 1

    def test_a_handler_is_removed_by_undo_or_unconfigure(self) -> None:
        handler = Keeping()
        undo = events.configure(handler)
        assert events.configured_handlers() == (handler,)
        undo()
        undo()
        assert events.configured_handlers() == ()
        events.configure(handler)
        assert events.unconfigure(handler)
        assert not events.unconfigure(handler)
        assert events.configured_handlers() == ()

    @pytest.mark.parametrize("wrong", [None, "console", logging.NullHandler(), Keeping], ids=repr)
    def test_an_object_that_is_not_a_handler_is_rejected(self, wrong: object) -> None:
        with pytest.raises(TypeError, match=r"is not an event handler; expected an object with record\(event\)"):
            events.configure(wrong)  # type: ignore[arg-type]
        assert events.configured_handlers() == ()

    def test_threads_may_configure_at_the_same_time(self) -> None:
        mine = [Keeping() for _ in range(50)]
        threads = [threading.Thread(target=events.configure, args=(handler,)) for handler in mine]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(events.configured_handlers()) == set(mine)
        assert all(events.unconfigure(handler) for handler in mine)


class TestErrors:
    def test_an_exception_of_a_handler_is_raised_after_the_others_got_the_event(self) -> None:
        failing, later = Keeping(OSError("disk full")), Keeping()
        with events.configure(failing), events.configure(later), pytest.raises(OSError, match="disk full"):
            events.record(an_event())
        assert later.kept == [an_event()]

    def test_of_two_exceptions_none_is_lost(self) -> None:
        one, two = Keeping(OSError("one")), Keeping(ValueError("two"))
        with events.configure(one), events.configure(two), pytest.raises(ValueError, match="two") as caught:
            events.record(an_event())
        assert isinstance(caught.value.__context__, OSError)

    def test_an_unknown_destination_is_rejected_at_once(self) -> None:
        with pytest.raises(ValueError, match="unknown event handler 'consle'; known: console, ") as caught:
            events.record(an_event(), "consle")
        assert "tenax.event_handlers" in str(caught.value)
        with pytest.raises(ValueError, match="unknown logging handler 'consle' for events; known handlers: "):
            events.get_logging_handler("consle")


class TestDestinations:
    def test_the_console_is_the_current_stderr(self, capsys: pytest.CaptureFixture[str]) -> None:
        events.record(an_event(), "console")
        assert capsys.readouterr().err == an_event().serialize() + "\n"

    def test_several_destinations_are_separated_by_commas(self, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
        for number in range(3):
            events.record(an_event(str(number)), f"console, jsonl:{tmp_path / 'events.jsonl'}")
        shown = capsys.readouterr().err
        assert (tmp_path / "events.jsonl").read_text() == shown
        assert [Event.deserialize(line).name for line in shown.splitlines()] == ["0", "1", "2"]

    def test_null_drops_events(self, capsys: pytest.CaptureFixture[str]) -> None:
        events.record(an_event())
        assert capsys.readouterr() == ("", "")


class TestOldTable:
    """``events.handlers._log_handlers``, which code for TorchElastic changes."""

    def test_a_handler_added_to_the_table_gets_the_text(self, table: dict[str, logging.Handler]) -> None:
        stream = io.StringIO()
        table["mine"] = logging.StreamHandler(stream)
        events.record(an_event(share="100 %s"), "mine")
        assert stream.getvalue() == an_event(share="100 %s").serialize() + "\n"

    def test_a_change_of_the_table_takes_effect_at_once(
        self, table: dict[str, logging.Handler], capsys: pytest.CaptureFixture[str]
    ) -> None:
        events.record(an_event(), "console")
        stream = io.StringIO()
        table["console"] = logging.StreamHandler(stream)
        events.record(an_event(), "console")
        assert stream.getvalue() == capsys.readouterr().err

    def test_the_table_also_applies_to_rendezvous_events(self, table: dict[str, logging.Handler]) -> None:
        stream = io.StringIO()
        table["dynamic_rendezvous"] = logging.StreamHandler(stream)
        events.record_rdzv_event(rdzv_event())
        events.construct_and_record_rdzv_event("run", "hello", NodeState.INIT)
        texts = [RdzvEvent.deserialize(line) for line in stream.getvalue().splitlines()]
        assert [event.message for event in texts] == ["joined", "hello"]

    def test_level_and_filters_of_the_handler_apply(self, table: dict[str, logging.Handler]) -> None:
        stream = io.StringIO()
        table["mine"] = handler = logging.StreamHandler(stream)
        handler.setLevel(logging.ERROR)
        events.record(an_event(), "mine")
        handler.setLevel(logging.NOTSET)
        handler.addFilter(lambda record: record.event.name == "kept")  # type: ignore[attr-defined]
        events.record(an_event("dropped"), "mine")
        events.record(an_event("kept"), "mine")
        assert stream.getvalue() == an_event("kept").serialize() + "\n"

    def test_the_example_in_torchs_documentation_works(self, capsys: pytest.CaptureFixture[str]) -> None:
        """It fails in torch, where a logging handler has no method ``info``."""
        events.get_logging_handler(destination="console").info(an_event())  # type: ignore[attr-defined]
        events.get_logging_handler().info(an_event())  # type: ignore[attr-defined]
        assert capsys.readouterr().err == an_event().serialize() + "\n"

    def test_a_stream_set_with_set_stream_is_used(self, table: dict[str, logging.Handler]) -> None:
        stream = io.StringIO()
        console = events.get_logging_handler("console")
        assert isinstance(console, logging.StreamHandler)
        console.setStream(stream)
        try:
            events.record(an_event(), "console")
        finally:
            console.setStream(None)  # type: ignore[arg-type]
        assert stream.getvalue() == an_event().serialize() + "\n"


class TestConstructed:
    def test_an_event_has_the_callers_file_and_function_and_this_node(self) -> None:
        handler = Keeping()
        with events.configure(handler):
            events.construct_and_record_rdzv_event("run", "hello", NodeState.RUNNING, rank=2)
            events.construct_and_record_rdzv_event("run", "hello", NodeState.INIT, "C.m", "there", 9, "a:1", local_id=1)
        name = "test_recording.py:test_an_event_has_the_callers_file_and_function_and_this_node"
        assert handler.kept == [
            RdzvEvent(name, "run", "hello", os.uname().nodename, os.getpid(), NodeState.RUNNING, rank=2),
            RdzvEvent("test_recording.py:C.m", "run", "hello", "there", 9, NodeState.INIT, "a:1", None, 1),
        ]

    def test_a_failure_has_the_current_traceback(self) -> None:
        handler = Keeping()
        with events.configure(handler):
            events.construct_and_record_rdzv_event("run", "no", NodeState.FAILED)
            try:
                raise KeyError("boom")
            except KeyError:
                events.construct_and_record_rdzv_event("run", "no", NodeState.FAILED)
        without, having = (event.error_trace for event in handler.kept if isinstance(event, RdzvEvent))
        assert without == ""
        assert having.startswith("Traceback")
        assert having.endswith("KeyError: 'boom'\n")

    def test_no_event_is_created_without_a_receiver(self) -> None:
        class Untouchable:
            def __getattribute__(self, name: str) -> object:
                raise AssertionError("an attribute was read")

        events.construct_and_record_rdzv_event("run", "hello", Untouchable())  # type: ignore[arg-type]


_QUIET = """
import logging, sys
before = (logging.root.level, list(logging.root.handlers), logging.root.manager.disable)
logging.disable(logging.CRITICAL)
logging.disable(logging.NOTSET)
from tenax import events
events.record(events.Event("one", events.EventSource.AGENT), "console")
events.get_logging_handler("console")
events.record(events.Event("two", events.EventSource.AGENT), "console")
assert before == (logging.root.level, list(logging.root.handlers), logging.root.manager.disable)
assert not [name for name in logging.root.manager.loggerDict if "event" in name], "a logger was created"
"""


@pytest.mark.process
@pytest.mark.parametrize("level", ["WARNING", "CRITICAL", "nonsense"])
def test_loglevel_drops_no_event_and_the_logging_configuration_is_unchanged(level: str) -> None:
    """In TorchElastic the variable suppresses events together with log lines."""
    env = {**os.environ, "LOGLEVEL": level}
    done = subprocess.run([sys.executable, "-c", _QUIET], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["name"] for line in done.stderr.splitlines()] == ["one", "two"]


def test_the_level_of_a_logger_applies_to_events() -> None:
    stream = io.StringIO()
    logger = logging.getLogger("tests.of.events")
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    logger.addHandler(logging.StreamHandler(stream))
    handler = LoggingEventHandler(logger)
    handler.record(an_event("dropped"))
    logger.setLevel(logging.INFO)
    handler.record(an_event("kept"))
    assert stream.getvalue() == an_event("kept").serialize() + "\n"


@pytest.mark.process
def test_importing_the_package_loads_few_modules() -> None:
    """The agent imports it even without event handlers."""
    code = (
        "import sys; before = set(sys.modules); from tenax.events import configured_handlers; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own = {"tenax", "tenax.events", "tenax.events._configured"}
    heavy = {"logging", "dataclasses", "json", "msgspec", "inspect", "typing", "threading"}
    loaded = set(done.stdout.split())
    assert own <= loaded
    assert not heavy & loaded


def test_every_public_name_exists() -> None:
    assert [name for name in events.__all__ if not hasattr(events, name)] == []
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        events.nothing  # noqa: B018
    assert EventSource.AGENT == "AGENT"
