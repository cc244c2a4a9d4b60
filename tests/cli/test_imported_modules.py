"""The modules that the agent of one node imports before its worker runs: these of tenax, few of the standard library,
and of third-party packages only msgspec. Every launch takes the time to import them; other modules are imported where
they are used.

The agent writes its imports to a file (``-X importtime``), which the worker copies first.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

import tenax

pytestmark = pytest.mark.process

OF_TENAX = """
tenax tenax._node.job tenax._node.live_steps tenax._node.node tenax._node.sinks tenax._io.helper_channel tenax.cli
tenax.cli.arguments tenax.cli.flags tenax.cli.main tenax.cli.options tenax.cli.run tenax.cli.script
tenax.cli.host_checks tenax._core tenax._core.agent tenax._core.bounds tenax._core.agent_hangs tenax._core.agent_state
tenax._core.agent_stop
tenax._core.commands tenax._engines tenax._io tenax._core.coordinator tenax._core.environment tenax._core.events
tenax._core.ledger tenax._core.messages tenax._core.model tenax._core.lifecycle tenax._core.policy
tenax._core.ranks tenax._core.record tenax._core.run_state tenax._core.run_text tenax._core.text tenax._failures
tenax._failures.hook tenax._failures.out_of_memory tenax._view tenax._view.exit_text
tenax._io.helper_process tenax._io.listen
tenax._logs tenax._logs.writer tenax._logs.specs tenax._io.loop
tenax._io.interfaces tenax._processes tenax._processes.descendants tenax._processes.entrypoint tenax._processes.keeper
tenax._processes.stacks tenax.rendezvous tenax.rendezvous.api tenax.rendezvous._engine_handler tenax._engines.local
tenax.rendezvous.registry tenax._engines.coordinator_host tenax._engines.store_address tenax._node tenax._node.workers
tenax._node.journal tenax._node.signals tenax._node.messages
tenax._node.supervisor tenax._node.worker_logs tenax.store tenax.store._host
"""
# Without those that every interpreter has before the first line of a program. Only to name a newcomer: other versions
# of Python have others.
OF_STDLIB = """
__future__ _collections _collections_abc _datetime _decimal _functools _heapq _operator _socket _sre _stat _struct
_typing _uuid collections collections.abc contextlib copyreg decimal enum errno fcntl functools gc genericpath
itertools keyword numbers operator os posixpath re re._casefix re._compiler re._constants re._parser reprlib
select signal stat struct types typing uuid warnings
"""
MAX_OF_STDLIB = 50
# Imported by a timer a quarter of a second after the start: by then the worker has run, unless the machine is busy.
LATER = {"tenax._node.control_socket", "tenax._node.run_notes", "tenax._io.private_folder", "tenax._core.requests"}
NOT_FOUND = {"_wmi", "typing_extensions"}  # searched and not found, or hidden

# Without ``site``, to which an environment may add imports.
AGENT = """
import sys
sys.path[:0] = sys.argv[1].split(":")
from tenax.cli.main import main
raise SystemExit(main(["run", "--nproc-per-node=1", sys.argv[2]]))
"""
WORKER = """
import os, shutil
shutil.copyfile(os.environ["IMPORTS"], os.environ["IMPORTS"] + ".copy")
"""


def _home(package) -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(package.__file__)))


def _imported_by_the_agent(folder) -> set[str]:
    """Return the names of all modules that were imported when the worker ran."""
    (folder / "worker.py").write_text(WORKER)
    log = folder / "imports"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PET_"))}
    paths = f"{_home(tenax)}:{_home(msgspec)}"
    with log.open("wb") as stderr:
        done = subprocess.run(
            [sys.executable, "-S", "-X", "importtime", "-c", AGENT, paths, "worker.py"],
            cwd=folder,
            env={**environ, "IMPORTS": str(log), "TMPDIR": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            timeout=30,
        )
    assert done.returncode == 0, log.read_text()
    lines = (folder / "imports.copy").read_text().splitlines()
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")} - {"imported package"}


def test_the_agent_imports_exactly_these_modules(tmp_path) -> None:
    """A new module makes every launch slower: import it where it is used, or add it here if every launch uses it."""
    imported = _imported_by_the_agent(tmp_path)
    own = {name for name in imported if name.partition(".")[0] == "tenax"}
    new, removed = sorted(own - set(OF_TENAX.split()) - LATER), sorted(set(OF_TENAX.split()) - own)
    assert not new, f"tenax run now imports these before the first worker: {new}"
    assert not removed, f"tenax run no longer imports these; remove them from the list: {removed}"

    stdlib = {name for name in imported if name.partition(".")[0] in sys.stdlib_module_names}
    at_start = _imported_by_an_empty_program()
    new = sorted(stdlib - at_start - set(OF_STDLIB.split()))
    count = len(stdlib - at_start)
    assert count <= MAX_OF_STDLIB, f"tenax run imports {count} modules of the standard library, among them {new}"

    third_party = sorted({name.partition(".")[0] for name in imported - own - stdlib} - {"msgspec"} - NOT_FOUND)
    assert not third_party, f"tenax run imports these third-party packages before the first worker: {third_party}"


def _imported_by_an_empty_program() -> set[str]:
    code = "import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())
