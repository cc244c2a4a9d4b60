"""The environment is read at the edges and passed on; what is passed can be tested."""

from __future__ import annotations

import ast
from pathlib import Path

import tenax

# A file that is not here takes the environment as an argument.
READERS = {
    # what people call: commands, and TorchElastic's names
    *("cli/main.py", "cli/run.py", "cli/start.py", "run.py", "argparse_util.py", "compat/__main__.py"),
    *("launcher/api.py", "agent/server/local_elastic_agent.py", "_node/workers.py"),
    *("rendezvous/_options.py", "_engines/store_address.py", "_engines/secret.py", "_engines/tcp/marker.py"),
    *("metrics/_by_name.py", "events/_recording.py", "utils/logging.py", "utils/api.py"),
    # what runs in a worker
    *("preemption.py", "progress.py", "data.py", "control_plane/__init__.py", "control_plane/_handlers.py"),
    *("utils/data/elastic_distributed_sampler.py", "_failures/error_handler.py"),
    *("_failures/hook/sitecustomize.py", "compat/hook/sitecustomize.py", "_processes/function_worker.py"),
    *("_processes/keeper_main.py", "_processes/warm/sitecustomize.py", "_processes/warm/tenax_template.py"),
    *("_processes/warm/tenax_preload.py", "elastic/_agreement.py", "elastic/_generation.py", "elastic/_worker.py"),
    "elastic/_torch.py",
    # what other processes inherit, and where private and temporary files are
    *("_io/helper_process.py", "_io/private_folder.py", "_io/etcd/binary.py", "_logs/specs.py"),
    "_processes/start_guard.py",
}
_NAMES = {"environ", "environb", "getenv", "getenvb"}


def _reads_environment(path: Path) -> bool:
    text = path.read_text()
    if not any(name in text for name in _NAMES):
        return False
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(ast.Name("os" | "posix"), name) if name in _NAMES:
                return True
            case ast.ImportFrom("os" | "posix", aliases) if _NAMES & {alias.name for alias in aliases}:
                return True
    return False


def test_only_these_files_read_the_environment() -> None:
    """Another file takes it as an argument; one that no longer reads it is removed from the list."""
    root = Path(tenax.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if _reads_environment(path)}
    assert sorted(found - READERS) == []
    assert sorted(READERS - found) == []
