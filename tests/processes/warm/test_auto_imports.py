"""What ``--preload auto`` finds in a script without running it: only third-party modules."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tenax._processes.warm import FOLDER

# What is installed: a folder of packages, as pip makes it.
PACKAGES = {
    "big/__init__.py": "",
    "big/nn/__init__.py": "",
    "big/nn/deep.py": "",
    "big/optim.py": "",
    "small.py": "import other",
    "other.py": "",
    "third.py": "",
    "torch/__init__.py": "",
    "torch/optim.py": "",
    "torch/_dynamo.py": "",
}
LOOK = """
import json, sys
sys.path.insert(0, sys.argv[1])
import tenax_imports
sys.path[:] = [sys.argv[2], *[each for each in sys.path if each != sys.argv[1]], sys.argv[3]]
print(json.dumps(tenax_imports.third_party_imports((sys.argv[4], sys.argv[5] == "module"))[0]))
"""


class Project:
    """A folder of the user, with third-party packages elsewhere."""

    def __init__(self, home: Path) -> None:
        self.home = home / "project"
        self.packages = home / "lib" / "site-packages"
        self.home.mkdir()
        for name, source in PACKAGES.items():
            self.write(name, source, self.packages)

    def write(self, name: str, source: str, folder: Path | None = None) -> Path:
        path = (folder or self.home) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    def finds(self, script: str = "train.py", *, module: bool = False, first: Path | None = None) -> list[str]:
        """Scan in a separate process, with the script's folder first on the path, as in a template."""
        place = self.home / script
        folder = first or (self.home if module else place if place.is_dir() else place.resolve().parent)
        arguments = [FOLDER, str(folder), str(self.packages), script, "module" if module else "file"]
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", LOOK, *arguments],
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout))

    def finds_in(self, source: str) -> list[str]:
        self.write("train.py", source)
        return self.finds()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        pytest.param("import json, os.path, collections.abc, _thread, __future__", [], id="standard library"),
        pytest.param("import nowhere_to_be_found", [], id="nowhere"),
        pytest.param("import big", ["big"], id="import"),
        pytest.param("import big.nn.deep as deep, small", ["big.nn.deep", "small"], id="dotted names"),
        pytest.param("from big import nn, Tensor", ["big", "big.nn"], id="modules and other names"),
        pytest.param("from big.nn import *", ["big.nn"], id="everything"),
        pytest.param("import third\nimport big\nimport third", ["third", "big"], id="order"),
        pytest.param("import third\nimport torch", ["torch", "third"], id="foundations first"),
        pytest.param(
            "import torch\ndef main():\n    torch.optim.SGD([])",
            ["torch", "torch._dynamo"],
            id="what an optimizer imports",
        ),
        pytest.param("from torch import optim", ["torch", "torch.optim", "torch._dynamo"], id="what optimizers import"),
        pytest.param("import torch\nbig.optim", ["torch"], id="another optimizer"),
        pytest.param("from big import (\n    optim,\n    nn,\n)", ["big", "big.optim", "big.nn"], id="brackets"),
        pytest.param("'''\nimport big\n'''", [], id="in a text"),
        pytest.param("# import big", [], id="in a comment"),
        pytest.param("def f():\n    import big\nasync def g():\n    import third", [], id="in functions"),
        pytest.param("f = lambda: __import__('big')", [], id="in a lambda"),
        pytest.param("class A:\n    import big\n    def f(self):\n        import third", [], id="in a class"),
        pytest.param("if True:\n    import big\nelse:\n    import third", [], id="in conditions"),
        pytest.param("with open('x'):\n    import big", ["big"], id="in a with"),
        pytest.param("for i in []:\n    import big\nelse:\n    import third", [], id="in loops"),
        pytest.param("while 0:\n    import big", [], id="in a while"),
        pytest.param("match 1:\n    case 1:\n        import big", [], id="in a match"),
        pytest.param(
            "try:\n    import big\nexcept ImportError:\n    import third\n"
            "else:\n    import small\nfinally:\n    import other",
            ["big", "small", "other"],
            id="in a try",
        ),
        pytest.param("if __name__ == '__main__':\n    import big", ["big"], id="in the main part"),
        pytest.param("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import big", [], id="for types"),
        pytest.param("import typing as t\nif t.TYPE_CHECKING:\n    import big", [], id="for types, dotted"),
        pytest.param(
            "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    import big\nelse:\n    import third",
            ["third"],
            id="not for types",
        ),
        pytest.param("if not TYPE_CHECKING:\n    import big", [], id="if it is not for types"),
        pytest.param("import os\nos.environ['A'] = 'b'\nimport big", [], id="after a variable was set"),
        pytest.param("import os\nif 'A' not in os.environ:\n    os.environ['A'] = 'b'\nimport big", [], id="or may be"),
        pytest.param("import sys\nsys.path.insert(0, 'vendored')\nimport big", [], id="after the path was changed"),
        pytest.param("import sys\nsys.path += ['vendored']\nimport big", [], id="after the path was extended"),
        pytest.param("import sys\nsys.modules['big'] = None\nimport big", [], id="after a module was replaced"),
        pytest.param("import small\nsmall.install_hook()\nimport big", ["small"], id="after a call"),
        pytest.param("for name in 'ab':\n    print(name)\nimport big", [], id="after calls in a loop"),
        pytest.param(
            "try:\n    import small\nexcept ImportError:\n    quit()\nimport big", ["small"], id="in a handler"
        ),
        pytest.param("A = 1\ndef f(): run()\nclass B: c = 2\nimport big", ["big"], id="after what changes nothing"),
        pytest.param("import warnings\nwarnings.simplefilter('ignore')\nimport big", ["big"], id="after filters"),
        pytest.param("import big as", [], id="no Python"),
        pytest.param("import big\nprint 'x'", [], id="Python 2"),
        pytest.param("", [], id="empty"),
        pytest.param("\ufeffimport big", ["big"], id="byte order mark"),
        pytest.param("# -*- coding: latin-1 -*-\nimport big", ["big"], id="another encoding"),
    ],
)
def test_imports_of_a_script_are_found(project: Project, source: str, found: list[str]) -> None:
    assert project.finds_in(source) == found


def test_an_invalid_or_missing_script_has_no_imports(project: Project) -> None:
    assert project.finds_in("import big\0") == []
    assert project.finds("missing.py") == []


def test_nothing_is_run(project: Project) -> None:
    project.write("small.py", "raise SystemExit(9)", project.packages)
    project.write("own.py", "raise SystemExit(8)")
    assert project.finds_in("import small, own\nraise SystemExit(7)") == ["small"]


def test_user_files_are_scanned_and_not_preloaded(project: Project) -> None:
    project.write("model.py", "import big.nn\nimport layers.dense")
    project.write("layers/__init__.py", "import third")
    project.write("layers/dense.py", "import small")
    assert set(project.finds_in("import model")) == {"big.nn", "third", "small"}


def test_user_files_that_import_each_other_are_scanned_once(project: Project) -> None:
    project.write("one.py", "import two, big")
    project.write("two.py", "import one, third, train")
    assert project.finds_in("import one") == ["third", "big"]


def test_third_party_files_are_not_scanned(project: Project) -> None:
    """Their imports come with them."""
    assert project.finds_in("import small") == ["small"]


def test_relative_imports(project: Project) -> None:
    project.write("pack/__init__.py", "from .inner import thing")
    project.write("pack/inner/__init__.py", "from . import deep\nfrom .. import side\nfrom ..side import *")
    project.write("pack/inner/deep.py", "import big.nn\nfrom ...too_far import x")
    project.write("pack/side.py", "import third")
    assert sorted(project.finds_in("import pack")) == ["big.nn", "third"]


def test_a_relative_import_in_a_script_is_ignored(project: Project) -> None:
    assert project.finds_in("from . import big\nfrom .big import nn\nimport third") == ["third"]


def test_a_submodule_of_a_user_package_includes_its_package(project: Project) -> None:
    """``import pack.inner`` runs ``pack/__init__.py`` first."""
    project.write("pack/__init__.py", "import big")
    project.write("pack/inner.py", "import third")
    assert set(project.finds_in("import pack.inner")) == {"big", "third"}


def test_a_user_module_hides_a_third_party_module(project: Project) -> None:
    project.write("small.py", "import third")
    assert project.finds_in("import small") == ["third"]


def test_a_module_as_script(project: Project) -> None:
    project.write("pack/__init__.py", "")
    project.write("pack/train.py", "import big\nfrom . import side")
    project.write("pack/side.py", "import third")
    assert project.finds("pack.train", module=True) == ["big", "third"]


def test_a_package_as_script(project: Project) -> None:
    project.write("pack/__init__.py", "import small")
    project.write("pack/__main__.py", "import big\nfrom . import side")
    project.write("pack/side.py", "import third")
    found = project.finds("pack", module=True)
    assert set(found) == {"small", "big", "third"}


def test_a_third_party_module_as_script(project: Project) -> None:
    """It is not the user's, but its imports are found."""
    assert set(project.finds("small", module=True)) <= {"small", "other"}


def test_a_folder_as_script(project: Project) -> None:
    project.write("program/__main__.py", "import big, beside")
    project.write("program/beside.py", "import third")
    assert project.finds("program") == ["big", "third"]


def test_a_link_as_script(project: Project) -> None:
    """Modules are found next to the target of the link."""
    project.write("place/train.py", "import beside, big")
    project.write("place/beside.py", "import third")
    (project.home / "link.py").symlink_to("place/train.py")
    assert sorted(project.finds("link.py")) == ["big", "third"]


def test_packages_in_a_virtual_environment_inside_the_project_are_third_party(project: Project) -> None:
    project.packages = project.home / "venv" / "lib" / "python3" / "site-packages"
    for name, source in PACKAGES.items():
        project.write(name, source, project.packages)
    assert project.finds_in("import big.nn, small") == ["big.nn", "small"]


def test_packages_in_any_folder_are_recognized_by_their_metadata(project: Project) -> None:
    project.packages = project.home / "vendored"
    for name, source in PACKAGES.items():
        project.write(name, source, project.packages)
    assert project.finds_in("import small, big") == []  # they look like the user's own modules
    (project.packages / "small-1.0.dist-info").mkdir()
    assert project.finds_in("import small") == ["small"]


def test_a_third_party_namespace_package(project: Project) -> None:
    project.write("space/one.py", "", project.packages)
    assert "space.one" in project.finds_in("import space.one")


def test_a_compiled_module(project: Project) -> None:
    project.write("fast.cpython-311-x86_64-linux-gnu.so", "", project.packages)
    assert project.finds_in("import fast") == ["fast"]


def test_a_compiled_module_in_a_package(project: Project) -> None:
    project.write("big/core.abi3.so", "", project.packages)
    assert project.finds_in("from big import core\nimport big.core") == ["big", "big.core"]
