"""tenax run has every flag of the real torchrun, with the same spellings, default and variable."""

from __future__ import annotations

import json
import os

import pytest

from kit.processes import needs_torch
from kit.torch_python import TorchPython
from tenax.cli.arguments import read
from tenax.cli.flags import BY_DEST, BY_SPELLING, FLAGS
from tenax.run import get_args_parser

pytestmark = [
    needs_torch,
    pytest.mark.process,
]

# torch is imported in another process, because it would stay imported for all other tests.
DUMP = """
import json, sys
from torch.distributed.run import get_args_parser, parse_args
flags = {}
for action in get_args_parser()._actions:
    if action.option_strings and action.dest != "help":
        flags[action.dest] = {
            "spellings": action.option_strings,
            "default": action.default,
            "choices": action.choices,
            "switch": action.nargs == 0,
            "variable": type(action).__name__ in ("env", "check_env"),
        }
lines = [vars(parse_args(line)) for line in json.loads(sys.argv[1])]
print(json.dumps({"flags": flags, "lines": lines}))
"""
LINES = [
    ["train.py"],
    ["--standalone", "--nproc-per-node=2", "train.py", "--lr", "3e-4"],
    ["--nproc_per_node", "gpu", "--max_restarts", "3", "-r", "3", "-t3", "train.py", "--tee", "1", "--help"],
    [
        "--nnodes=1:4",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=h:1",
        "--rdzv_id=7",
        "--rdzv_conf=a=1,b=2",
        "-m",
        "pkg.mod",
    ],
    [
        "--no_python",
        "--run-path",
        "--monitor-interval",
        "3",
        "--start_method=fork",
        "--role",
        "r",
        "prog",
        "-x",
        "--",
        "y",
    ],
    ["--duplicate-stdout-filters", "a,,b,c", "--master-addr", "h", "--master-port", "1", "--node-rank", "2", "t.py"],
    [
        "--local-ranks-filter=0,1",
        "--signals-to-handle=SIGTERM",
        "--shutdown-timeout",
        "5",
        "--virtual-local-rank",
        "t.py",
    ],
    ["--log-dir", "d", "--logs-specs", "x", "--numa-binding", "node", "--event-log-handler", "console", "t.py"],
    ["--local-addr", "h", "--", "t.py", "a"],
]


TENAX_ONLY = {
    "compat",
    "preload",
    "standby_setup",
    "dry_run",
    "report",
    "restart_policy",
    "fatal_exit_codes",
    "fatal_errors",
    "notice_signals",
    "notice_seconds",
    "metrics",
    "dashboard",
    "on_hang",
    "hang_after",
    "trace",
}


@pytest.fixture(scope="module")
def torchrun(torch_python: TorchPython):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    done = torch_python.run("-c", DUMP, json.dumps(LINES), environ=environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_flag_has_torchruns_spellings_and_default(torchrun) -> None:
    """And the same choices and kind, and a PET_ variable where torchrun has one."""
    for dest, theirs in torchrun["flags"].items():
        ours = BY_DEST[dest]
        assert list(ours.spellings) == theirs["spellings"]
        assert (list(ours.default) if ours.kind == "list" else ours.default) == theirs["default"]
        assert list(ours.choices) == (theirs["choices"] or [])
        assert (ours.kind == "switch") == theirs["switch"]
        assert ours.from_environment == theirs["variable"]


def test_the_flags_that_torchrun_does_not_have_are_marked(torchrun) -> None:
    assert {flag.dest for flag in FLAGS} - torchrun["flags"].keys() == TENAX_ONLY
    assert {flag.dest for flag in FLAGS if flag.ours} == TENAX_ONLY
    theirs = {name for flag in torchrun["flags"].values() for name in flag["spellings"]}
    assert set(BY_SPELLING) - theirs == {name for dest in TENAX_ONLY for name in BY_DEST[dest].spellings}


def test_command_lines_are_parsed_as_by_torchrun(torchrun) -> None:
    """By tenax's parser and by the argparse parser."""
    for line, theirs in zip(LINES, torchrun["lines"], strict=True):
        if line[-2:] != ["--", "y"]:  # newer argparse versions disagree among themselves about a later '--'
            assert common(vars(get_args_parser().parse_args(line))) == theirs
            reading = read(line, {})
            values = {
                dest: list(value) if isinstance(value, tuple) else value for dest, value in reading.values.items()
            }
            script = {"training_script": reading.script, "training_script_args": list(reading.script_args)}
            assert common({**values, **script}) == theirs


def common(values: dict) -> dict:
    return {name: value for name, value in values.items() if name not in TENAX_ONLY}
