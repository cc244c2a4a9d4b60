"""The samples of the pages run unchanged."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tenax.testing.run_scenario import play_run_scenario
from tenax.testing.scenario import play_scenario

from .pages import PAGES, Sample, samples

SAMPLES = [sample for page in PAGES for sample in samples(page)]
TO_RUN = [sample for sample in SAMPLES if sample.is_to_run]
SCENARIOS = [sample for sample in SAMPLES if sample.text.lstrip().startswith("scenario ")]
# The signatures on the reference page are not programs.
FRAGMENTS = [sample for sample in SAMPLES if sample.language == "python" and sample.page.parent.name != "reference"]
TIMEOUT_S = 60
# A scenario of the coordinator has nodes, one of an agent has workers.
_OF_A_RUN = re.compile(r"^at \S+ (?:nodes? (?!cleared)|opened|cancel)", re.MULTILINE)


@pytest.mark.parametrize("sample", TO_RUN, ids=lambda sample: sample.name)
def test_a_marked_sample_runs(sample: Sample, tmp_path: Path) -> None:
    """A Python sample after ``<!-- run -->`` is a program that succeeds, including its assertions.

    After ``<!-- run: VARIABLE=value tenax run --flags -->`` it is the script of that command line.
    """
    assert sample.language == "python"
    if "import torch" in sample.text and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    script = tmp_path / "sample.py"
    script.write_text(sample.text)
    args = shlex.split(sample.line_to_run)
    variables = dict(itertools.takewhile(lambda pair: len(pair) == 2, (arg.split("=", 1) for arg in args)))
    command = args[len(variables) :]
    assert command[:1] in ([], ["tenax"]), sample.line_to_run
    ran = subprocess.run(
        [sys.executable, *(["-m", *command] if command else []), str(script)],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_samples_to_run_are_found() -> None:
    """So that a change of the marks does not disable the tests."""
    assert len(TO_RUN) >= 12


@pytest.mark.parametrize("sample", FRAGMENTS, ids=lambda sample: sample.name)
def test_every_python_sample_is_python(sample: Sample) -> None:
    """Fragments that are not run can be parsed."""
    compile(sample.text, sample.name, "exec")


@pytest.mark.parametrize("sample", SCENARIOS, ids=lambda sample: sample.name)
def test_a_scenario_is_the_output_of_the_machine(sample: Sample) -> None:
    """A scenario with answers has exactly these; one without answers can be played."""
    indent = sample.text[: len(sample.text) - len(sample.text.lstrip())]
    text = "".join(line.removeprefix(indent) for line in sample.text.splitlines(keepends=True))
    play = play_run_scenario if _OF_A_RUN.search(text) else play_scenario
    played = play(text)
    if "\n    " in text:
        assert played == text
