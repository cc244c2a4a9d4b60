"""TorchElastic's import paths are redirected to tenax: without torch, with a package like it, and with the real one."""

from __future__ import annotations

import json
import textwrap

import pytest

from kit.processes import needs_torch
from kit.torch_python import TorchPython

from .conftest import Python

# --- without torch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way",
    [
        "import torch.distributed.elastic.rendezvous.api as found",
        "import torch.distributed.elastic.rendezvous.api; found = torch.distributed.elastic.rendezvous.api",
        "from torch.distributed.elastic.rendezvous import api as found",
        "from torch.distributed.elastic import rendezvous; found = rendezvous.api",
        "import importlib; found = importlib.import_module('torch.distributed.elastic.rendezvous.api')",
        "import importlib, torch.distributed.elastic; found = importlib.import_module('.rendezvous.api', "
        "'torch.distributed.elastic')",
        "found = __import__('torch.distributed.elastic.rendezvous.api', fromlist=['RendezvousHandler'])",
        "import torchelastic.rendezvous.api as found",
        "from torchelastic.rendezvous import api as found",
    ],
)
def test_every_way_to_import_returns_the_module_of_tenax(bare: Python, way: str) -> None:
    """With its own name and spec."""
    code = f"""
        import tenax.compat
        {way}
        import tenax.rendezvous.api
        assert found is tenax.rendezvous.api
        print(found.__name__, found.__spec__.name)
    """
    assert bare.output(code) == "tenax.rendezvous.api tenax.rendezvous.api"


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("torch.distributed.elastic", "tenax"),
        ("torch.distributed.elastic.multiprocessing.errors", "tenax.multiprocessing.errors"),
        ("torch.distributed.launcher", "tenax.launcher"),
        ("torch.distributed.launcher.api", "tenax.launcher.api"),
        ("torch.distributed.run", "tenax.run"),
        ("torch.distributed.argparse_util", "tenax.argparse_util"),
        ("torchelastic.agent.server.local_elastic_agent", "tenax.agent.server.local_elastic_agent"),
        ("torchelastic.distributed.launch", "tenax.run"),
        ("torchelastic.multiprocessing.errors", "tenax.multiprocessing.errors"),
        ("torchelastic.utils.data.cycling_iterator", "tenax.utils.data.cycling_iterator"),
    ],
)
def test_the_module_of_each_path(bare: Python, path: str, module: str) -> None:
    code = "import sys, tenax.compat, importlib; print(importlib.import_module(sys.argv[1]).__name__)"
    assert bare.output(code, path) == module


def test_a_module_is_never_loaded_twice(bare: Python) -> None:
    """Classes of both paths are the same, as ``except`` clauses require."""
    code = """
        import sys, tenax.compat
        import torch.distributed.elastic.rendezvous.dynamic_rendezvous, torch.distributed.launcher.api
        import tenax.rendezvous.dynamic_rendezvous
        files = {}
        for name, module in sys.modules.items():
            path = getattr(module, "__file__", None)
            if path and "tenax" in path and name != "__main__":
                files.setdefault(path, set()).add(id(module))
        print(len(files) > 10, [path for path, modules in files.items() if len(modules) > 1])
    """
    assert bare.output(code) == "True []"


def test_a_pickle_with_a_path_of_torch_can_be_loaded(bare: Python) -> None:
    code = """
        import pickle, tenax.compat
        print(pickle.loads(b"ctorch.distributed.elastic.rendezvous.api\\nRendezvousTimeoutError\\n.").__module__)
    """
    assert bare.output(code) == "tenax.rendezvous.api"


def test_python_m_runs_the_module_of_tenax(bare: Python, tmp_path) -> None:
    (tmp_path / "train.py").touch()
    args = ("-m", "torch.distributed.run", "--dry-run", "--nproc-per-node", "3", str(tmp_path / "train.py"))
    done = bare.run(*args, PYTHONPATH=bare.output("import tenax.compat; print(tenax.compat.FOLDER)"))
    assert done.returncode == 0, done.stderr
    assert "would run 3 workers" in done.stdout


def test_import_torch_fails_until_a_redirected_module_is_imported(bare: Python) -> None:
    """With the usual errors."""
    code = """
        import importlib.util, sys, tenax.compat
        assert importlib.util.find_spec("torch") is None
        for statement in ("import torch", "import torch.distributed as dist", "import torch.nn",
                          "from torch.distributed import init_process_group", "from torch import nn"):
            try:
                exec(statement)
            except ModuleNotFoundError as error:
                assert error.name == "torch", statement
            else:
                print(statement)
        print("torch" in sys.modules)
    """
    assert bare.output(code) == "False"


def test_the_empty_parent_reports_that_torch_is_not_installed(bare: Python) -> None:
    """For a missing attribute with AttributeError, for a missing module with ModuleNotFoundError."""
    code = """
        import tenax.compat
        import torch.distributed.elastic.rendezvous
        for statement in ("torch.cuda", "torch.distributed.barrier", "import torch.nn", "from torch import nn"):
            try:
                exec(statement)
            except (AttributeError, ModuleNotFoundError) as error:
                print(type(error).__name__, "torch is not installed" in str(error))
        print(hasattr(torch, "__version__"))
    """
    expected = ["AttributeError True", "AttributeError True", "ModuleNotFoundError True", "ModuleNotFoundError True"]
    assert bare.output(code).splitlines() == [*expected, "False"]


@pytest.mark.parametrize(
    "statement",
    [
        "import torch.distributed.elastic.rendezvous.only_torchs",
        "from torch.distributed.elastic.rendezvous.only_torchs import Thing",
    ],
)
def test_a_module_that_only_torch_has_is_not_imported(bare: Python, like_torch: str, statement: str) -> None:
    """Modules of torch and tenax are not mixed."""
    code = f"""
        import tenax.compat
        try:
            {statement}
        except ModuleNotFoundError as error:
            print(error.name, "|", error)
    """
    for env in ({}, {"PYTHONPATH": like_torch}):
        printed = bare.output(code, **env)
        assert printed.startswith("torch.distributed.elastic.rendezvous.only_torchs | no module named")
        assert "which does not exist" in printed


def test_an_unknown_module_is_rejected(bare: Python) -> None:
    code = """
        import tenax.compat
        try:
            import torch.distributed.elastic.nothing
        except ModuleNotFoundError as error:
            print(error)
    """
    assert "redirects it to 'tenax.nothing', which does not exist" in bare.output(code)


def test_a_missing_dependency_is_not_taken_for_a_missing_module(bare: Python, tmp_path) -> None:
    """The error names msgspec."""
    (tmp_path / "msgspec.py").write_text("raise ModuleNotFoundError(\"No module named 'msgspec'\", name='msgspec')")
    code = """
        import tenax.compat
        try:
            import torch.distributed.launcher.api, torch.distributed.elastic.agent.server.api
        except ModuleNotFoundError as error:
            print(error.name)
    """
    assert bare.output(code, PYTHONPATH=str(tmp_path)) == "msgspec"


def test_uninstall_removes_all_redirected_modules(bare: Python) -> None:
    code = """
        import sys, tenax.compat
        import torch.distributed.launcher, torchelastic.rendezvous, tenax.rendezvous
        tenax.compat.uninstall()
        print([name for name in sys.modules if name.startswith("torch")], tenax.rendezvous.__name__)
        for statement in ("import torch", "import torch.distributed.launcher", "import torchelastic"):
            try:
                exec(statement)
            except ModuleNotFoundError as error:
                print(error)
        tenax.compat.uninstall()
        tenax.compat.install()
        tenax.compat.install()
        import torch.distributed.launcher as again
        print(again.__name__, sum(type(finder).__name__ == "CompatFinder" for finder in sys.meta_path))
    """
    assert bare.output(code).splitlines() == [
        "[] tenax.rendezvous",
        "No module named 'torch'",
        "No module named 'torch'",
        "No module named 'torchelastic'",
        "tenax.launcher 1",
    ]


def test_importing_compat_imports_no_other_module_of_tenax(bare: Python) -> None:
    """It runs in every worker."""
    code = """
        import sys
        before = set(sys.modules)
        import tenax.compat
        print(sorted(name for name in set(sys.modules) - before if name.startswith("tenax")))
        print({"typing", "importlib.abc", "msgspec"} & set(sys.modules) - before)
    """
    assert bare.output(code).splitlines() == [
        "['tenax', 'tenax.compat', 'tenax.compat._finder']",
        "set()",
    ]


# --- with something that looks like torch -----------------------------------------------------------------------------


def test_other_modules_of_torch_are_not_redirected(bare: Python, like_torch: str) -> None:
    code = """
        import tenax.compat
        import torch, torch.nn, torch.distributed as dist
        import torch.distributed.elastic.rendezvous as rendezvous
        from torch.distributed.checkpoint import save
        import tenax.rendezvous
        assert dist.elastic.rendezvous is rendezvous is tenax.rendezvous
        print(torch.version, torch.nn.Module, dist.is_torchelastic_launched(), save)
    """
    assert bare.output(code, PYTHONPATH=like_torch) == "torchs torchs torchs torchs"


def test_after_uninstall_the_modules_of_torch_are_imported(bare: Python, like_torch: str) -> None:
    code = """
        import tenax.compat
        import torch.distributed.elastic.rendezvous, torch.distributed.run
        tenax.compat.uninstall()
        print(hasattr(torch.distributed, "elastic"), hasattr(torch.distributed, "run"))
        import torch.distributed.elastic.rendezvous.only_torchs, torch.distributed.run
        print(torch.distributed.elastic.rendezvous.only_torchs.Thing, torch.distributed.run.main)
    """
    assert bare.output(code, PYTHONPATH=like_torch).splitlines() == ["False False", "torchs torchs"]


def test_installing_after_an_import_of_torchs_elastic_is_rejected(bare: Python, like_torch: str) -> None:
    """Modules of torch and tenax would be mixed. torch itself may have been imported."""
    code = """
        import sys, torch, torch.distributed
        import torch.distributed.elastic.rendezvous
        try:
            import tenax.compat
        except ImportError as error:
            print(error)
        print(torch.distributed.elastic.rendezvous.RendezvousHandler, any("Compat" in repr(f) for f in sys.meta_path))
    """
    printed = bare.output(code, PYTHONPATH=like_torch).splitlines()
    assert printed[0].startswith("'torch.distributed.elastic' was imported before tenax.compat")
    assert "import tenax.compat first" in printed[0]
    assert printed[1] == "torchs False"


def test_torch_is_found_if_sys_path_changes_later(bare: Python, like_torch: str) -> None:
    for statement in (
        "import torch.distributed",
        "import torch.distributed.checkpoint",
        "import torch.distributed.run",
    ):
        code = f"""
            import sys, tenax.compat
            sys.path.insert(0, sys.argv[1])
            {statement}
            import torch.distributed.elastic.rendezvous
            import torch.nn
            print(torch.version, torch.distributed.is_torchelastic_launched(), torch.distributed.elastic.__name__)
        """
        assert bare.output(code, like_torch) == "torchs torchs tenax"


# --- with the real one ------------------------------------------------------------------------------------------------


@needs_torch
def test_real_torch_works_with_the_redirected_modules(torch_python: TorchPython) -> None:
    """``import torch`` does not import its elastic package, so tenax.compat may be installed later. Modules of torch
    that use elastic (checkpoints, the old launcher) work with tenax's."""
    code = """
        import json, sys
        import torch, torch.distributed as dist
        import tenax.compat
        results = {"launched": dist.is_torchelastic_launched()}
        import torch.distributed.elastic.multiprocessing.errors as errors
        import tenax.multiprocessing.errors
        results["same"] = errors is tenax.multiprocessing.errors is dist.elastic.multiprocessing.errors
        import torch.distributed.checkpoint, torch.distributed.checkpoint._experimental.barriers as barriers
        results["barrier"] = barriers.store_util.__name__
        import torch.distributed.launch
        results["run"] = torch.distributed.launch.run.__module__
        from torch.utils.data import DataLoader
        from torch.distributed.elastic.utils.data import ElasticDistributedSampler
        results["loaded"] = len(list(DataLoader(range(8), sampler=ElasticDistributedSampler(range(8), 2, 0))))
        tenax.compat.uninstall()
        from torch.distributed.elastic.multiprocessing.errors import record
        results["record"] = record.__module__
        print(json.dumps(results))
    """
    done = torch_python.run("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "launched": False,
        "same": True,
        "barrier": "tenax.utils.store",
        "run": "tenax.run",
        "loaded": 4,
        "record": "torch.distributed.elastic.multiprocessing.errors",
    }
