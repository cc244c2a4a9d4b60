"""The reference is complete and up to date."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys

import pytest

from tenax._core.environment import WorkerEnvironment, worker_environment
from tenax._core.model import AgentSettings, Assignment
from tenax._failures import exit_codes
from tenax._node.job import TORCHELASTIC_TIMER_FILE
from tenax._node.node import NOTICE_VARIABLE
from tenax._node.supervisor import SURVIVOR_VARIABLE
from tenax._processes import stacks
from tenax.cli.flags import FLAGS, Flag
from tenax.cli.main import COMMANDS
from tenax.cli.options import _KNOWN_SETTINGS
from tenax.control_plane import _sockets as sockets

from .pages import DOCS

COMMAND_LINE = (DOCS / "reference" / "command-line.md").read_text()


def table_cells(page: str, column: int = 0) -> list[str]:
    """Return the cells of one column of all tables of a page, without headers."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [row[column] for row in rows if column < len(row) and not row[0].startswith("---")]


def test_the_generated_parts_are_up_to_date() -> None:
    """Flags, public names and journal lines are as docs/generate_reference.py writes them."""
    ran = subprocess.run(
        [sys.executable, str(DOCS / "generate_reference.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_every_command_is_documented() -> None:
    """Each command but ``version`` and ``help`` has a section: its ``--help`` page, or the flags of ``run``."""
    documented = re.findall(r"^## `tenax (\w+)`$", COMMAND_LINE, re.MULTILINE)
    assert sorted(documented) == sorted(set(COMMANDS) - {"version", "help"})
    for command in set(documented) - {"run"}:
        assert f"usage: tenax {command} " in COMMAND_LINE


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_is_documented(flag: Flag) -> None:
    """Each flag has a section with every spelling and its variable."""
    section = COMMAND_LINE.partition(f"#### `{flag.name}`\n")[2].partition("\n##")[0]
    for spelling in flag.spellings:
        assert f"`{spelling}`" in section
    assert (flag.variable or "Variable: none") in section


def test_only_existing_flags_are_documented() -> None:
    documented = set(re.findall(r"^#### `(--[\w-]+)`$", COMMAND_LINE, re.MULTILINE))
    assert documented == {flag.name for flag in FLAGS}


def test_every_variable_of_a_worker_is_documented() -> None:
    """And every documented variable is set."""
    page = (DOCS / "reference" / "environment.md").read_text().partition("## Read by tenax")[0]
    settings = AgentSettings(run_id="r", role="default", local_world_size=2, max_restarts=0)
    options = WorkerEnvironment(virtual_local_rank=True, omp_num_threads=(1, 1))
    added = worker_environment(settings, Assignment(generation=1), 0, {}, options)
    documented = {cell.strip("`") for cell in table_cells(page)} - {"variable"}
    # Set by the logs, the keeper and the node, not by the core.
    of_the_node = {NOTICE_VARIABLE, TORCHELASTIC_TIMER_FILE, stacks.MARK, sockets.VARIABLE, SURVIVOR_VARIABLE}
    assert documented == {*added, "TORCHELASTIC_ERROR_FILE", "TENAX_KEEPER", *of_the_node}


def test_every_exit_code_is_documented() -> None:
    page = (DOCS / "reference" / "exit-codes.md").read_text()
    documented = {int(number) for cell in table_cells(page, 1) for number in re.findall(r"\b\d+\b", cell)}
    numbers = {value for name, value in vars(exit_codes).items() if name.isupper()}
    assert numbers <= documented


@pytest.mark.parametrize(
    ("module", "letter", "page"),
    [
        ("tenax._core.agent", "A", "agent-machine.md"),
        ("tenax._core.run_state", "C", "coordinator.md"),
        ("tenax._core.ranks", "R", "coordinator.md"),
    ],
    ids=["agent", "coordinator", "ranks"],
)
def test_the_invariants_of_a_page_are_those_of_the_module(module: str, letter: str, page: str) -> None:
    """With the same text as in the docstrings of the module."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin) as source:
        laws = re.findall(rf"^( *)({letter}\d+) +(.+(?:\n\1    .+)*)$", source.read(), re.MULTILINE)
    defined = {number: text for _, number, text in laws}
    documented = dict(
        re.findall(rf"^\| ({letter}\d+) \| (.+) \|$", (DOCS / "concepts" / page).read_text(), re.MULTILINE)
    )
    assert len(defined) >= 4
    assert {number: plain(text) for number, text in documented.items()} == {
        number: plain(text) for number, text in defined.items()
    }


def test_every_setting_of_the_rendezvous_is_documented() -> None:
    """And every documented setting exists."""
    page = (DOCS / "reference" / "rdzv-conf.md").read_text()
    documented = {key for cell in table_cells(page) for key in re.findall(r"`(\w+)`", cell)}
    assert documented == _KNOWN_SETTINGS


@pytest.mark.parametrize(("module", "letter"), [("checks", "S"), ("liveness", "L")])
def test_the_simulators_page_names_every_property(module: str, letter: str) -> None:
    """In a table."""
    docstring = importlib.import_module(f"tenax.testing.simulator.{module}").__doc__ or ""
    page = (DOCS / "concepts" / "simulator.md").read_text()
    checked = set(re.findall(rf"^({letter}\d+)  ", docstring, re.MULTILINE))
    assert checked
    assert set(re.findall(rf"^\| ({letter}\d+) \|", page, re.MULTILINE)) == checked


def plain(text: str) -> str:
    return " ".join(text.replace("`", "").lower().split())
