"""TorchElastic's import paths give tenax's modules: without torch, with a package like it, and with the real one."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

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
def test_every_way_to_import_gives_the_very_same_module(bare: Python, way: str) -> None:
    """Also when tenax's own path comes first or last, and its own name and spec stay."""
    code = f"""
        import tenax.compat
        {way}
        import tenax.rendezvous.api
        assert found is tenax.rendezvous.api
        print(found.__name__, found.__spec__.name)
    """
    assert bare.says(code) == "tenax.rendezvous.api tenax.rendezvous.api"


@pytest.mark.parametrize(
    ("theirs", "ours"),
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
def test_which_module_stands_for_which(bare: Python, theirs: str, ours: str) -> None:
    code = "import sys, tenax.compat, importlib; print(importlib.import_module(sys.argv[1]).__name__)"
    assert bare.says(code, theirs) == ours


def test_a_module_is_never_loaded_twice(bare: Python) -> None:
    """Classes that both paths give are one class, or else nobody's except would catch anything."""
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
    assert bare.says(code) == "True []"


def test_what_was_pickled_with_torch_is_found(bare: Python) -> None:
    """A pickle names a class by the path of its module."""
    code = """
        import pickle, tenax.compat
        print(pickle.loads(b"ctorch.distributed.elastic.rendezvous.api\\nRendezvousTimeoutError\\n.").__module__)
    """
    assert bare.says(code) == "tenax.rendezvous.api"


def test_python_m_runs_the_module_that_stands_for_it(bare: Python, tmp_path) -> None:
    (tmp_path / "train.py").touch()
    words = ("-m", "torch.distributed.run", "--dry-run", "--nproc-per-node", "3", str(tmp_path / "train.py"))
    done = bare.run(*words, PYTHONPATH=bare.says("import tenax.compat; print(tenax.compat.FOLDER)"))
    assert done.returncode == 0, done.stderr
    assert "would run 3 workers" in done.stdout


def test_torch_is_still_missing_until_something_is_imported_that_needs_it(bare: Python) -> None:
    """``import torch`` and whatever asks for it get the usual answers."""
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
    assert bare.says(code) == "False"


def test_what_stands_for_torch_afterwards_says_that_it_is_not_there(bare: Python) -> None:
    """An attribute that is missing is an AttributeError, a module that is missing a ModuleNotFoundError."""
    code = """
        import tenax.compat
        import torch.distributed.elastic.rendezvous
        for statement in ("torch.cuda", "torch.distributed.barrier", "import torch.nn", "from torch import nn"):
            try:
                exec(statement)
            except (AttributeError, ModuleNotFoundError) as error:
                print(type(error).__name__, "torch is not installed here" in str(error))
        print(hasattr(torch, "__version__"))
    """
    expected = ["AttributeError True", "AttributeError True", "ModuleNotFoundError True", "ModuleNotFoundError True"]
    assert bare.says(code).splitlines() == [*expected, "False"]


@pytest.mark.parametrize(
    "statement",
    [
        "import torch.distributed.elastic.rendezvous.only_torchs",
        "from torch.distributed.elastic.rendezvous.only_torchs import Thing",
    ],
)
def test_a_module_that_tenax_does_not_have_is_refused_although_torch_has_it(
    bare: Python, like_torch: str, statement: str
) -> None:
    """A half of each would be worse than none."""
    code = f"""
        import tenax.compat
        try:
            {statement}
        except ModuleNotFoundError as error:
            print(error.name, "|", error)
    """
    for env in ({}, {"PYTHONPATH": like_torch}):
        said = bare.says(code, **env)
        assert said.startswith("torch.distributed.elastic.rendezvous.only_torchs | no module named")
        assert "which tenax does not have" in said


def test_a_name_that_nobody_has_is_refused(bare: Python) -> None:
    code = """
        import tenax.compat
        try:
            import torch.distributed.elastic.nothing
        except ModuleNotFoundError as error:
            print(error)
    """
    assert "redirects it to 'tenax.nothing', which does not exist" in bare.says(code)


def test_a_missing_dependency_is_not_taken_for_a_missing_module(bare: Python, tmp_path) -> None:
    """Who has no msgspec is told so."""
    (tmp_path / "msgspec.py").write_text("raise ModuleNotFoundError(\"No module named 'msgspec'\", name='msgspec')")
    code = """
        import tenax.compat
        try:
            import torch.distributed.launcher.api, torch.distributed.elastic.agent.server.api
        except ModuleNotFoundError as error:
            print(error.name)
    """
    assert bare.says(code, PYTHONPATH=str(tmp_path)) == "msgspec"


def test_uninstalling_gives_everything_back(bare: Python) -> None:
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
    assert bare.says(code).splitlines() == [
        "[] tenax.rendezvous",
        "No module named 'torch'",
        "No module named 'torch'",
        "No module named 'torchelastic'",
        "tenax.launcher 1",
    ]


def test_importing_it_costs_next_to_nothing(bare: Python) -> None:
    """It runs in every worker: nothing of tenax is imported before it is asked for."""
    code = """
        import sys
        before = set(sys.modules)
        import tenax.compat
        print(sorted(name for name in set(sys.modules) - before if name.startswith("tenax")))
        print({"typing", "importlib.abc", "msgspec"} & set(sys.modules) - before)
    """
    assert bare.says(code).splitlines() == [
        "['tenax', 'tenax.compat', 'tenax.compat._finder']",
        "set()",
    ]


# --- with something that looks like torch -----------------------------------------------------------------------------


def test_everything_else_of_torch_is_torchs_own(bare: Python, like_torch: str) -> None:
    code = """
        import tenax.compat
        import torch, torch.nn, torch.distributed as dist
        import torch.distributed.elastic.rendezvous as rendezvous
        from torch.distributed.checkpoint import save
        import tenax.rendezvous
        assert dist.elastic.rendezvous is rendezvous is tenax.rendezvous
        print(torch.version, torch.nn.Module, dist.is_torchelastic_launched(), save)
    """
    assert bare.says(code, PYTHONPATH=like_torch) == "theirs theirs theirs theirs"


def test_after_uninstalling_torchs_own_are_found_again(bare: Python, like_torch: str) -> None:
    code = """
        import tenax.compat
        import torch.distributed.elastic.rendezvous, torch.distributed.run
        tenax.compat.uninstall()
        print(hasattr(torch.distributed, "elastic"), hasattr(torch.distributed, "run"))
        import torch.distributed.elastic.rendezvous.only_torchs, torch.distributed.run
        print(torch.distributed.elastic.rendezvous.only_torchs.Thing, torch.distributed.run.main)
    """
    assert bare.says(code, PYTHONPATH=like_torch).splitlines() == ["False False", "theirs theirs"]


def test_coming_too_late_is_refused(bare: Python, like_torch: str) -> None:
    """What was imported from torch's modules cannot be called back, and a mixture of both would be worse than either.
    torch itself may have been imported."""
    code = """
        import sys, torch, torch.distributed
        import torch.distributed.elastic.rendezvous
        try:
            import tenax.compat
        except ImportError as error:
            print(error)
        print(torch.distributed.elastic.rendezvous.RendezvousHandler, any("Compat" in repr(f) for f in sys.meta_path))
    """
    said = bare.says(code, PYTHONPATH=like_torch).splitlines()
    assert said[0].startswith("'torch.distributed.elastic' was imported before tenax.compat")
    assert "import tenax.compat first" in said[0]
    assert said[1] == "theirs False"


def test_torch_that_comes_later_is_found(bare: Python, like_torch: str) -> None:
    """A program may change where Python looks for packages, after its interpreter has installed this."""
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
        assert bare.says(code, like_torch) == "theirs theirs tenax"


# --- with the real one ------------------------------------------------------------------------------------------------


def test_real_torch_has_our_modules_and_keeps_its_own() -> None:
    """``import torch`` does not import its elastic, so ours may come behind it; torch's own users of elastic (its
    checkpoints, its old launcher) find what they need in ours; and torch gets everything back."""
    pytest.importorskip("torch", reason="torch is not installed")
    code = """
        import json, sys
        import torch, torch.distributed as dist
        import tenax.compat
        facts = {"launched": dist.is_torchelastic_launched()}
        import torch.distributed.elastic.multiprocessing.errors as errors
        import tenax.multiprocessing.errors
        facts["same"] = errors is tenax.multiprocessing.errors is dist.elastic.multiprocessing.errors
        import torch.distributed.checkpoint, torch.distributed.checkpoint._experimental.barriers as barriers
        facts["barrier"] = barriers.store_util.__name__
        import torch.distributed.launch
        facts["run"] = torch.distributed.launch.run.__module__
        from torch.utils.data import DataLoader
        from torch.distributed.elastic.utils.data import ElasticDistributedSampler
        facts["loaded"] = len(list(DataLoader(range(8), sampler=ElasticDistributedSampler(range(8), 2, 0))))
        tenax.compat.uninstall()
        from torch.distributed.elastic.multiprocessing.errors import record
        facts["record"] = record.__module__
        print(json.dumps(facts))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "launched": False,
        "same": True,
        "barrier": "tenax.utils.store",
        "run": "tenax.run",
        "loaded": 4,
        "record": "torch.distributed.elastic.multiprocessing.errors",
    }
