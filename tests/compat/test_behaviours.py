"""What torch answers, tenax answers: the questions of ``catalogue.py``, except those with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_CATALOGUE = Path(__file__).with_name("catalogue.py")

_NO_FILES = "/dev/null as a log folder means no path at all, not a path below it; and filters hold there too"
_ARGUMENTS = "only ${local_rank} is ours; all other dollars are the user's"
_SENTENCE = "a value that makes no sense is a ValueError with a sentence, or ends the program as argparse does"

# Questions that are answered differently on purpose; docs/differences.md tells the same to users.
DIFFERENT = {
    "RunResult: is_failed() of UNHEALTHY": "it is no success",
    "Std.from_str('10:3')": "there are machines with more than ten GPUs",
    "logs: nothing is kept": _NO_FILES,
    "logs: nothing is kept, redirects": _NO_FILES,
    "logs: nothing is kept, tee": _NO_FILES,
    "logs: nothing is kept, a filter": _NO_FILES,
    "macros.substitute(['$local_rank'])": _ARGUMENTS,
    "macros.substitute(['$$'])": _ARGUMENTS,
    "record: to nobody": "a ValueError that names the handlers there are",
    "determine_local_world_size('0')": _SENTENCE,
    "determine_local_world_size('-1')": _SENTENCE,
    "config_from_args: --nnodes 0 t.py": _SENTENCE,
    "config_from_args: --nnodes 3:2 t.py": _SENTENCE,
    "config_from_args: --max-restarts -1 t.py": _SENTENCE,
    "where they meet: --nnodes 0 t.py": _SENTENCE,
    "where they meet: --nnodes 3:2 t.py": _SENTENCE,
    "where they meet: --max-restarts -1 t.py": _SENTENCE,
    "main: --nproc-per-node 0": _SENTENCE,
    "main: --nnodes 1:2:3": _SENTENCE,
    "main: --nnodes 0": _SENTENCE,
    "main: --nnodes 3:2": _SENTENCE,
    "main: --max-restarts -1": _SENTENCE,
    "main: --monitor-interval 0": _SENTENCE,
    "main: --event-log-handler nobody": _SENTENCE,
    "main: --log-dir /etc/passwd": _SENTENCE,
    "_get_or_create_logger: nobody": "a ValueError that names the handlers there are",
    "where they meet: --nnodes 2 --node-rank 1 --master-addr h --rdzv-id j t.py": "torch's run() adds 29500 later",
    "where they meet: --master-port 7 t.py": "the run id of one node is random",
}


@pytest.fixture(scope="module")
def answers() -> tuple[dict[str, str], dict[str, str]]:
    """Torch's and ours, each from a process of its own, both at once."""
    pytest.importorskip("torch", reason="torch is not installed")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCH"))}
    asked = [
        subprocess.Popen(
            [sys.executable, str(_CATALOGUE), root], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ
        )
        for root in ("torch", "tenax")
    ]
    said = [process.communicate()[0] for process in asked]
    assert [process.returncode for process in asked] == [0, 0]
    theirs, ours = map(json.loads, said)
    return theirs, ours


def test_the_same_questions_were_asked(answers: tuple[dict[str, str], dict[str, str]]) -> None:
    theirs, ours = answers
    assert list(theirs) == list(ours)
    assert len(ours) > 250


def test_the_answers_are_torchs(answers: tuple[dict[str, str], dict[str, str]]) -> None:
    """Each of them; one that differs has a reason. One node has nobody to find, so it has no place to meet."""
    theirs, ours = answers
    differing = {
        question: (theirs[question], ours[question]) for question in ours if ours[question] != theirs[question]
    }
    alone = {
        question for question in differing if question.startswith("where they meet") and "'local'" in ours[question]
    }
    surprising = {question: words for question, words in differing.items() if question not in DIFFERENT.keys() | alone}
    assert surprising == {}


def test_no_reason_is_out_of_date(answers: tuple[dict[str, str], dict[str, str]]) -> None:
    """What is said to differ does."""
    theirs, ours = answers
    assert [question for question in DIFFERENT if theirs[question] == ours[question]] == []
