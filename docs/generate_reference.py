"""Write the parts of the reference that are generated from the code: commands, flags, public names, journal lines.

    .venv/bin/python docs/generate_reference.py           write them
    .venv/bin/python docs/generate_reference.py --check   only say which pages are out of date

Each part stands in its page between ``<!-- generated: NAME -->`` and ``<!-- end -->``; everything outside these lines
is written by hand. A test compares.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tenax._core import commands, coordinator, events, messages, model, policy
from tenax._core.link import recording
from tenax._node import journal, link_journal
from tenax.cli.flags import FLAGS, GROUPS, Flag
from tenax.cli.main import COMMANDS
from tenax.cli.main import main as command_line

REFERENCE = Path(__file__).parent / "reference"

# Every module whose names are public, and the names where it has no list of its own. The order is the page's.
MODULES: dict[str, tuple[str, ...]] = {
    "tenax.agent.server": (),
    "tenax.agent.server.health_check_server": (),
    "tenax.launcher": (),
    "tenax.policy": (),
    "tenax.scheduler": (),
    "tenax.multiprocessing": (),
    "tenax.multiprocessing.errors": (),
    "tenax.multiprocessing.subprocess_handler": (),
    "tenax.multiprocessing.tail_log": ("TailLog", "tail_logfile"),
    "tenax.multiprocessing.redirects": ("redirect", "redirect_stdout", "redirect_stderr", "get_libc"),
    "tenax.rendezvous": (),
    "tenax.rendezvous.registry": (),
    "tenax.rendezvous.dynamic_rendezvous": (),
    "tenax.rendezvous.c10d_rendezvous_backend": (),
    "tenax.rendezvous.static_tcp_rendezvous": (),
    "tenax.rendezvous.etcd_store": (),
    "tenax.rendezvous.etcd_server": (),
    "tenax.rendezvous.etcd_rendezvous_backend": (),
    "tenax.rendezvous.etcd_rendezvous": (),
    "tenax.rendezvous.utils": (),
    "tenax.preemption": (),
    "tenax.progress": (),
    "tenax.elastic": (),
    "tenax.data": (),
    "tenax.metrics": (),
    "tenax.events": (),
    "tenax.events.handlers": (),
    "tenax.timer": (),
    "tenax.control_plane": (),
    "tenax.store": (),
    "tenax.etcd": (),
    "tenax.utils": (),
    "tenax.utils.store": (),
    "tenax.utils.distributed": (),
    "tenax.utils.data": ("CyclingIterator",),  # the sampler differs with torch; the module's docstring describes it
    "tenax.utils.logging": (),
    "tenax.utils.log_level": ("get_log_level",),
    "tenax.utils.process_state": (),
    "tenax.utils.gpu_health_check": (),
    "tenax.compat": ("install", "uninstall", "environment"),
    "tenax.numa.binding": (),
    "tenax.run": (),
    "tenax.argparse_util": (),
    "tenax.testing.scenario": (),
    "tenax.testing.run_scenario": (),
    "tenax.testing.clock": (),
    "tenax.testing.processes": (),
    "tenax.testing.rendezvous_contract": (),
    "tenax.testing.store_contract": (),
    "tenax.testing.simulator": (),
}


def main() -> int:
    stale = [page for page, text in pages() if page.read_text() != text]
    if "--check" in sys.argv[1:]:
        for page in stale:
            sys.stderr.write(f"{page.name} is out of date: run docs/generate_reference.py\n")
        return 1 if stale else 0
    for page, text in pages():
        page.write_text(text)
    return 0


def pages() -> Iterator[tuple[Path, str]]:
    """Each page with a generated part, as it should be."""
    for page in sorted(REFERENCE.glob("*.md")):
        text = page.read_text()
        for name in re.findall(r"^<!-- generated: (\w+) -->$", text, re.MULTILINE):
            begin = f"<!-- generated: {name} -->\n"
            before, _, rest = text.partition(begin)
            after = rest[rest.index("<!-- end -->") :]
            text = f"{before}{begin}\n{PARTS[name]()}\n{after}"
        yield page, text


# --- commands ---------------------------------------------------------------------------------------------------------


def overview() -> str:
    return f"```\n{_printed([])}```\n"


def commands_help() -> str:
    """What ``tenax COMMAND --help`` prints, for each command but ``run``, whose flags are a part of their own."""
    parts = []
    for command in COMMANDS:
        if command not in ("run", "version", "help"):
            parts += [f"## `tenax {command}`", "", f"```\n{_printed([command, '--help'])}```", ""]
    return "\n".join(parts)


def _printed(words: list[str]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        command_line(words)
    return output.getvalue()


# --- flags ------------------------------------------------------------------------------------------------------------


def flags() -> str:
    parts = []
    for group in GROUPS:
        title = group[0].upper() + group[1:]
        parts += [f"### {title}", ""]
        for flag in FLAGS:
            if flag.group == group:
                parts += _flag(flag)
    return "\n".join(parts)


def _flag(flag: Flag) -> list[str]:
    names = ", ".join(f"`{spelling}`" for spelling in flag.spellings)
    facts = [f"Written: {names}" + (f" `{flag.value}`" if flag.value else "")]
    if flag.choices:
        facts.append("One of: " + ", ".join(f"`{choice}`" for choice in flag.choices))
    facts.append(f"Default: {_flag_default(flag)}")
    facts.append(f"Variable: `{flag.variable}`" if flag.variable else "Variable: none")
    if flag.ours:
        facts.append("torchrun has no such flag")
    return [f"#### `{flag.name}`", "", flag.help, "", *(f"- {fact}" for fact in facts), ""]


def _flag_default(flag: Flag) -> str:
    if flag.kind == "switch":
        return "off"
    return "none" if flag.default in (None, "", ()) else f"`{flag.default}`"


# --- the journal ------------------------------------------------------------------------------------------------------


def lines() -> str:
    return _structs([journal.Header, journal.Step, journal.Footer])


def facts() -> str:
    return _structs(events.AnyEvent.__args__)


def words() -> str:
    """Messages to the coordinator: sent by ``SendMessage``, and in the journal of the coordinator as ``Received``."""
    return _structs(messages.FromNode.__args__)


def run_lines() -> str:
    """Of the coordinator's journal."""
    return _structs([journal.RunHeader, journal.RunStep, journal.Footer])


def link_lines() -> str:
    return _structs([link_journal.LinkHeader, recording.Call, recording.Quiet, journal.Footer])


def run_facts() -> str:
    return _structs(coordinator.AnyCoordinatorEvent.__args__)


def orders() -> str:
    return _structs(commands.AnyCommand.__args__)


def decisions() -> str:
    return _structs(policy.AnyDecision.__args__)


def values() -> str:
    kinds = [model.AgentSettings, model.Assignment, model.Failure, model.Evidence, model.Stopped, model.Verdict]
    return _structs(kinds)


def run_values() -> str:
    """Of the coordinator's journal, besides those of an agent's."""
    return _structs([coordinator.RunSettings, messages.NodeInfo, coordinator.Send])


def sent() -> str:
    """What a coordinator sends to nodes."""
    return _structs(events.FromCoordinator.__args__)


def _structs(kinds: Any) -> str:
    rows = ["| name | fields | meaning |", "| --- | --- | --- |"]
    for kind in kinds:
        tag = kind.__struct_config__.tag
        name = f"`{tag or kind.__name__}`"
        fields = ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(kind))
        rows.append(f"| {name} | {fields or 'none'} | {_escaped(_summary(kind))} |")
    return "\n".join(rows) + "\n"


# --- public names -----------------------------------------------------------------------------------------------------


def names() -> str:
    parts = []
    homes: dict[int, str] = {}  # what has been told already, and where
    for module_name, listed in MODULES.items():
        module = importlib.import_module(module_name)
        parts += [f"## `{module_name}`", "", _summary(module), ""]
        for name in listed or sorted(module.__all__, key=str.lower):
            thing = getattr(module, name)
            home = module_name if isinstance(thing, str | int) else homes.setdefault(id(thing), module_name)
            told = _told(name, thing) if home == module_name else [f"The same as in `{home}`.", ""]
            parts += [f"### `{name}`", "", *told]
    return "\n".join(parts)


def _told(name: str, thing: Any) -> list[str]:
    if name in _CONSTANTS:
        return [_CONSTANTS[name], ""]
    if isinstance(thing, str):
        return [f"The text `{thing!r}`.", ""]
    if isinstance(thing, int):
        return [f"The number `{thing}`.", ""]
    if inspect.isclass(thing) and issubclass(thing, enum.Enum):
        members = ", ".join(f"`{member}`" for member in thing.__members__)
        return [*_text(thing), f"Members: {members}.", "", *_methods(thing)]
    if inspect.isclass(thing):
        return [*_signature(name, thing), *_text(thing), *_bases(thing), *_methods(thing)]
    return [*_signature(name, thing), *_text(thing)]


_CONSTANTS = {
    "RendezvousHandlerCreator": "The type of a creator: `Callable[[RendezvousParameters], RendezvousHandler]`.",
    "EventMetadataValue": "The type of a value: `str | int | float | bool | None`.",
    "rendezvous_handler_registry": "The one `RendezvousHandlerRegistry` that `get_rendezvous_handler` asks.",
}


def _bases(kind: type) -> list[str]:
    public = [f"`{base.__name__}`" for base in kind.__mro__[1:] if base.__name__ in _PUBLIC]
    return [f"Base: {public[0]}.", ""] if public else []


def _methods(kind: type) -> list[str]:
    """What the class itself defines; what it inherits is told there, unless only private classes tell it."""
    own = dict(vars(kind))
    if not _bases(kind):
        own = {name: thing for base in reversed(kind.__mro__) if _is_ours(base) for name, thing in vars(base).items()}
    told = []
    for name, thing in sorted(own.items()):
        if name.startswith("_") or isinstance(thing, enum.Enum):
            continue
        if isinstance(thing, property):
            told.append(f"- `.{name}`{_colon(_first_sentence(thing))}")
        elif isinstance(thing, staticmethod | classmethod) or inspect.isfunction(thing):
            method = getattr(kind, name)
            parameters = _parameters(method, skip_self=inspect.isfunction(thing))
            told.append(f"- `.{name}{parameters}`{_colon(_first_sentence(method))}")
    return ["Methods:", "", *told, ""] if told else []


def _signature(name: str, thing: Any) -> list[str]:
    if inspect.isabstract(thing) or getattr(thing, "_is_protocol", False):
        return []
    if inspect.isclass(thing) and not issubclass(thing, msgspec.Struct) and not _makes_itself(thing):
        return []
    return ["```python", f"{name}{_parameters(thing, wrap_at=100 - len(name))}", "```", ""]


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("tenax")


def _makes_itself(kind: type) -> bool:
    """Whether ``__init__`` is tenax's own and not, for an exception, Python's."""
    return next(base for base in kind.__mro__ if "__init__" in vars(base)).__module__.startswith("tenax")


def _parameters(thing: Any, *, skip_self: bool = False, wrap_at: int = 0) -> str:
    told = []
    star_told = False
    for parameter in list(_signature_of(thing).parameters.values())[1 if skip_self else 0 :]:
        text = parameter.name
        if parameter.kind is parameter.VAR_POSITIONAL:
            text, star_told = f"*{text}", True
        elif parameter.kind is parameter.VAR_KEYWORD:
            text = f"**{text}"
        elif parameter.kind is parameter.KEYWORD_ONLY and not star_told:
            told.append("*")
            star_told = True
        if parameter.default is not parameter.empty:
            text += f"={_default(parameter.default)}"
        told.append(text)
    line = f"({', '.join(told)})"
    return line if not wrap_at or len(line) <= wrap_at else "(\n    " + ",\n    ".join(told) + ",\n)"


def _signature_of(thing: Any) -> inspect.Signature:
    try:
        return inspect.signature(thing)
    except NameError:  # a struct with a field whose type only the type checker imports
        names, defaults = thing.__struct_fields__, thing.__struct_defaults__
        known = [inspect.Parameter.empty] * (len(names) - len(defaults)) + list(defaults)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        pairs = zip(names, known, strict=True)
        return inspect.Signature([inspect.Parameter(name, kind, default=default) for name, default in pairs])


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value.__class__.__name__ in ("_HAS_DEFAULT_FACTORY_CLASS", "Factory"):
        return "{}"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, msgspec.Struct):
        return f"{type(value).__name__}()"  # the signature says what that is
    return "..." if inspect.isfunction(value) else repr(value)


# --- words ------------------------------------------------------------------------------------------------------------

# What the code's own words only say together with the lines around them, or do not say.
_WORDS = {
    "DefaultLogsSpecs": "The layout of [files and folders](files.md). `tee` implies that the stream is also kept; "
    "`log_dir=os.devnull` keeps nothing.",
    "WorkerStarted": "The process of a worker exists.",
    "WorkerExited": "The process of a worker ended.",
    "StartWorkers": "Start the workers of a generation.",
    "Finish": "The run is over, and this is how it ended.",
    "redirect_stdout": "`redirect` for standard output.",
    "redirect_stderr": "`redirect` for standard error.",
}


def _docstring(thing: Any) -> str:
    """Its own, not that of a base; one that dataclasses made up is none."""
    own = vars(thing).get("__doc__") if inspect.isclass(thing) else getattr(thing, "__doc__", None)
    return inspect.cleandoc(own or "")


def _summary(thing: Any) -> str:
    """The first paragraph."""
    paragraph = _docstring(thing).split("\n\n")[0]
    words = _WORDS.get(getattr(thing, "__name__", ""))
    return words or _as_markdown(" ".join(paragraph.split()).removesuffix("::"))


def _first_sentence(thing: Any) -> str:
    return re.split(r"(?<=[.])\s", _summary(thing))[0]


def _text(thing: Any) -> list[str]:
    """All paragraphs. One that explains fields, each on a line that begins with its name, becomes a list."""
    told = [_summary(thing), ""]
    for paragraph in _docstring(thing).split("\n\n")[1:]:
        if paragraph.startswith("    "):
            told += ["```python", inspect.cleandoc(paragraph), "```", ""]
        elif re.match(r"``[\w`, ]+``(?: \([^)]*\))?:", paragraph):
            told += [*_fields(paragraph), ""]
        else:
            told += [_as_markdown(" ".join(paragraph.split())), ""]
    return told


def _fields(paragraph: str) -> list[str]:
    items: list[str] = []
    for line in paragraph.split("\n"):
        if re.match(r"``[\w`, ]+``(?: \([^)]*\))?:", line):
            items.append(f"- {line}")
        else:
            items[-1] += f" {line}"
    return [_as_markdown(item) for item in items]


def _as_markdown(text: str) -> str:
    return text.replace("``", "`")


def _colon(text: str) -> str:
    return f": {text}" if text else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


_PUBLIC = {name for module, listed in MODULES.items() for name in listed or importlib.import_module(module).__all__}

PARTS: dict[str, Callable[[], str]] = {
    "overview": overview,
    "commands": commands_help,
    "flags": flags,
    "names": names,
    "lines": lines,
    "facts": facts,
    "orders": orders,
    "words": words,
    "sent": sent,
    "decisions": decisions,
    "values": values,
    "run_lines": run_lines,
    "link_lines": link_lines,
    "run_facts": run_facts,
    "run_values": run_values,
}

if __name__ == "__main__":
    raise SystemExit(main())
