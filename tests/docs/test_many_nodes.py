"""Several nodes as the guides show them, with agents on the loopback address."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from kit.addresses import own_endpoint
from kit.processes import on_linux

from .agents import Start, start
from .pages import DOCS, samples

pytestmark = on_linux
__all__ = ["start"]


def test_the_guides_command_line_works_in_two_terminals(start: Start, tmp_path: Path) -> None:
    """With the script of the first page and the output that the guide shows."""
    script = next(each.text for each in samples(DOCS / "getting-started.md") if each.text.startswith("# train.py"))
    (tmp_path / "train.py").write_text(script)
    guide = (DOCS / "guides" / "multi-node.md").read_text()
    page = guide.partition("## Try it on one machine")[2].partition("\n## ")[0]
    line = re.search(r"^\$ tenax run (.+)$", page, re.MULTILINE)
    assert line is not None
    args = shlex.split(line[1].replace("--rdzv-endpoint 127.0.0.1", f"--rdzv-endpoint {own_endpoint()}"))
    one, other = start(args), start(args)
    assert [one.ended(), other.ended()] == [0, 0], one.lines + other.lines
    lines = one.lines + other.lines
    assert sorted(each[len("[default0]:") :] for each in lines if each.startswith("[default")) == [
        f"rank {rank} of 4, step {step}" for rank in range(4) for step in range(3)
    ]
    for message in re.findall(r"^tenax: ((?:generation|all workers|the run) .+)$", page, re.MULTILINE):
        assert f"tenax: {message}" in lines
