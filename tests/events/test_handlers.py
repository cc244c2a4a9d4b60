"""The event handlers, and how they are created by name."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kit.processes import leaving_nothing, on_linux
from tenax import events
from tenax.events import ConsoleEventHandler, Event, JsonLinesEventHandler, NullEventHandler, handlers, make_handlers
from tenax.events.handlers import UnknownHandler, register_handler

from .kit import Keeping, an_event


class Closing(Keeping):
    """Records whether it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class TestConsole:
    def test_each_event_is_one_write_and_is_flushed(self) -> None:
        calls: list[str] = []

        class Noting(io.StringIO):
            def write(self, text: str) -> int:
                calls.append(text)
                return len(text)

            def flush(self) -> None:
                calls.append("flushed")

        handler = ConsoleEventHandler(Noting())
        handler.record(an_event("one"))
        handler.close()
        assert calls == [an_event("one").serialize() + "\n", "flushed"]

    @pytest.mark.process
    def test_a_process_without_stderr_continues(self) -> None:
        code = "import sys; sys.stderr = None; from tenax import events; "
        code += "events.record(events.Event('a', events.EventSource.AGENT), 'console'); print('here')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "here\n"


class TestJsonLines:
    def test_appended_lines_can_be_read_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        path.write_text("first\n")
        with leaving_nothing():
            handler = JsonLinesEventHandler(path)
            handler.record(an_event(text="two\nlines"))
            assert path.read_text() == "first\n" + an_event(text="two\nlines").serialize() + "\n"
            handler.close()
            handler.close()
        with pytest.raises(ValueError, match="was closed; configure a new handler"):
            handler.record(an_event())

    @pytest.mark.process
    def test_threads_and_processes_write_whole_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        code = (
            "import sys; from tenax.events import *\n"
            "handler = JsonLinesEventHandler(sys.argv[1])\n"
            "for n in range(300): handler.record(Event('other', EventSource.WORKER, n, {'long': 'x' * 5000}))\n"
        )
        others = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(2)]
        handler = JsonLinesEventHandler(path)

        def write() -> None:
            for _ in range(300):
                handler.record(an_event("ours", long="y" * 5000))

        threads = [threading.Thread(target=write) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [other.wait(60) for other in others] == [0, 0]
        handler.close()
        names = [Event.deserialize(line).name for line in path.read_text().splitlines()]
        assert (names.count("other"), names.count("ours")) == (600, 600)

    @on_linux
    def test_a_full_disk_raises_in_the_caller(self) -> None:
        handler = JsonLinesEventHandler("/dev/full")
        with pytest.raises(OSError, match="No space left"):
            handler.record(an_event())
        handler.close()

    @pytest.mark.process
    def test_a_partial_line_damages_no_other_line(self, tmp_path: Path) -> None:
        """A limit on the file size cuts a line, like a disk that becomes full."""
        path = tmp_path / "events.jsonl"
        code = (
            "import resource, signal, sys; from tenax.events import *\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "handler = JsonLinesEventHandler(sys.argv[1])\n"
            "event = Event('whole', EventSource.WORKER)\n"
            "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
            "handler.record(event)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))\n"
            "for _ in range(2):\n"
            "    try: handler.record(event)\n"
            "    except OSError: pass\n"
            "    else: raise SystemExit('the line was written')\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
            "handler.record(event)\n"
            "handler.record(event)\n"
        )
        subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
        whole = '{"name": "whole", "source": "WORKER", "timestamp": 0, "metadata": {}}'
        lines = path.read_text().splitlines()
        assert [line == whole for line in lines] == [True, False, True, True]
        assert whole.startswith(lines[1])


class TestByName:
    def test_each_name_creates_its_handler(self, tmp_path: Path) -> None:
        made = make_handlers(f"console,null, jsonl:{tmp_path / 'a:b.jsonl'},,logging:my.logger")
        kinds = [type(handler).__name__ for handler in made]
        # Once TorchElastic's table was accessed, it defines these names.
        assert kinds[0] in ("ConsoleEventHandler", "_OldHandler")
        assert kinds[1] in ("NullEventHandler", "_OldHandler")
        assert kinds[2:] == ["JsonLinesEventHandler", "LoggingEventHandler"]
        for handler in made:
            handler.close()
        assert (tmp_path / "a:b.jsonl").exists()

    def test_an_empty_list_creates_no_handler(self) -> None:
        assert make_handlers("") == []

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("nope", "unknown event handler 'nope'; known: "),
            ("jsonl", "the event handler 'jsonl' needs a file to append to: jsonl:PATH"),
            ("jsonl:/no/such/folder/x", "could not open the event file '/no/such/folder/x': No such file or directory"),
            ("jsonl:a\0b", "could not open the event file .*: embedded null"),
            ("console:red", "the event handler 'console' takes no argument"),
            ("null:x", "the event handler 'null' takes no argument"),
        ],
    )
    def test_an_invalid_name_is_rejected_with_a_message(self, text: str, message: str) -> None:
        with pytest.raises(UnknownHandler, match=message):
            make_handlers(text)
        assert issubclass(UnknownHandler, ValueError)

    @pytest.mark.parametrize("text", ["console,nope", "jsonl", "console:red", "null:x"])
    def test_a_check_rejects_the_same_names(self, text: str) -> None:
        with pytest.raises(UnknownHandler) as by_check:
            handlers.check_names(text)
        with pytest.raises(UnknownHandler) as by_making:
            make_handlers(text)
        assert str(by_check.value) == str(by_making.value)

    def test_a_check_opens_nothing(self, tmp_path: Path) -> None:
        with leaving_nothing():
            handlers.check_names(f"console,null,jsonl:{tmp_path / 'events.jsonl'},logging:x")
        assert list(tmp_path.iterdir()) == []

    def test_a_registered_handler_gets_its_argument_until_it_is_removed(self) -> None:
        made: list[tuple[str, Keeping]] = []

        def make(argument: str) -> Keeping:
            made.append((argument, Keeping()))
            return made[-1][1]

        with register_handler("mine", make):
            assert isinstance(make_handlers("mine:a:b")[0], Keeping)
            events.record(an_event("one"), "mine")
            events.record(an_event("two"), "mine")
            with pytest.raises(ValueError, match="the event handler 'mine' already exists"):
                register_handler("mine", make)
        with pytest.raises(UnknownHandler):
            events.record(an_event("three"), "mine")
        assert [argument for argument, _ in made] == ["a:b", ""]
        assert [event.name for event in made[1][1].kept] == ["one", "two"]

    @pytest.mark.parametrize(("made", "what"), [(None, "None"), (3, "of type 'int'"), (Keeping, "the class Keeping")])
    def test_a_maker_that_returns_no_handler_is_rejected(self, made: object, what: str) -> None:
        with (
            register_handler("mine", lambda _: made),  # type: ignore[arg-type,return-value]
            pytest.raises(UnknownHandler, match=f"'mine' is {what}; .* object with a method 'record'"),
        ):
            make_handlers("mine")

    def test_an_invalid_list_leaves_nothing_open(self, tmp_path: Path) -> None:
        with leaving_nothing(), pytest.raises(UnknownHandler, match="'nope'"):
            make_handlers(f"jsonl:{tmp_path / 'events.jsonl'},nope")

    def test_a_destination_is_closed_when_one_of_its_names_changes(self, tmp_path: Path) -> None:
        """``record`` opens it again on the next use; other destinations stay open."""
        made = [Closing(), Closing()]
        left = list(made)
        other = f"jsonl:{tmp_path / 'other.jsonl'}"
        with register_handler("mine", lambda _: left.pop(0)):
            events.record(an_event("one"), f"mine,jsonl:{tmp_path / 'events.jsonl'}")
            events.record(an_event("one"), "mine:again")
            assert [each.is_closed for each in made] == [False, False]
            undo = register_handler("another", lambda _: NullEventHandler())
            assert [each.is_closed for each in made] == [False, False]
            undo()
            events.record(an_event("one"), other)
            (still_open,) = handlers.handlers_of(other)
        assert [each.is_closed for each in made] == [True, True]
        assert handlers.handlers_of(other) == [still_open]
        events.record(an_event("two"), other)
        still_open.close()
        handlers._made.pop(other)

    @pytest.mark.parametrize("name", ["console", "null", "jsonl"])
    def test_built_in_names_cannot_be_registered(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"the event handler {name!r} already exists"):
            register_handler(name, lambda _: NullEventHandler())

    @pytest.mark.parametrize("name", ["", "a:b", "a,b", "a b"])
    def test_a_name_with_separators_is_rejected(self, name: str) -> None:
        with pytest.raises(ValueError, match="invalid event handler name"):
            register_handler(name, lambda _: NullEventHandler())

    @pytest.mark.process
    def test_an_installed_package_provides_a_handler(self, tmp_path: Path) -> None:
        """Found by its entry point; one that cannot be loaded is reported."""
        info = tmp_path / "offering-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[tenax.event_handlers]\nfile = offering:make\nbad = offering:no\n")
        (tmp_path / "offering.py").write_text(
            "from tenax.events import JsonLinesEventHandler\n\n"
            "def make(argument):\n    return JsonLinesEventHandler(argument + '.jsonl')\n"
        )
        code = (
            "from tenax import events\n"
            "events.record(events.Event('a', events.EventSource.AGENT), 'file:out')\n"
            "try: events.record(events.Event('a', events.EventSource.AGENT), 'bad')\n"
            "except ValueError as error: print(error)\n"
        )
        path = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        )
        assert json.loads((tmp_path / "out.jsonl").read_text())["name"] == "a"
        assert "could not load the event handler 'bad' from 'offering:no'" in done.stdout
