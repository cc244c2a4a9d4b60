"""The help pages: those of ``tenax help`` and ``tenax run --help``, and the layout of all."""

from __future__ import annotations

import re
import sys
import textwrap
from shutil import get_terminal_size

from tenax.cli.flags import FLAGS, GROUPS, Flag
from tenax.cli.run import is_terminal, print_page

OVERVIEW = """\
tenax: run distributed training jobs, restart them after failures, and report what went wrong.

usage: tenax COMMAND ...

  run         run a script in one or more worker processes, on one node or several
  start       start 'tenax run' on several hosts, over ssh or with srun

  ps          list the runs on this host
  status      show a run: nodes, workers, generation, restarts, how its time was spent (--watch)
  logs        show the output of its workers, of any rank and generation, merged by time (--follow)
  stacks      show where its workers are now, the odd one out first
  restart     restart all its workers
  drain       remove one node from it
  stop        stop it on every node
  ask         query running workers: their stacks, status, and handlers of your script

  replay      print the history of a run from its journal, and check its decisions
  timeline    draw the history of a run: an HTML page, and a trace for Perfetto
  report      summarize one or more runs: causes of failure, hosts that fail often, lost time

  completion  print a script that completes commands and flags in bash, zsh or fish
  version     print the version
  help        print this page; 'tenax help COMMAND' prints the page of a command

  tenax run train.py                           one worker
  tenax run --nproc-per-node gpu train.py      one worker per GPU
  tenax run --nnodes 2:4 --rdzv-endpoint host0 --nproc-per-node gpu train.py
                                               the same on 2 to 4 nodes: run this line on each
  tenax status --watch                         in another terminal: follow its status
"""

_INTRODUCTION = """\
usage: tenax run [flags] SCRIPT [arguments of the script]
       tenax run [flags] -m MODULE [arguments of the module]
       tenax run [flags] --no-python PROGRAM [arguments of the program]

Run SCRIPT in one or more worker processes, on this node or on several. Each worker gets its rank in
the environment, as under torchrun. When one fails, all are restarted, up to --max-restarts times. A
job that fails ends with one report of what went wrong.

  tenax run train.py                                 one worker
  tenax run --nproc-per-node gpu train.py --lr 3e-4  one worker per GPU; --lr belongs to train.py
  tenax run --nproc-per-node 4 --max-restarts 3 --log-dir logs --tee 3 train.py
                                                     restarts, and logs in files and on the terminal
  tenax run --nproc-per-node 2 -m my_package.train   a module
  tenax run --dry-run --nproc-per-node 2 train.py    show what would run

On several nodes, run the same line on each of them:

  tenax run --nnodes 2:4 --rdzv-endpoint host0 --nproc-per-node gpu --max-restarts 3 train.py

The job starts when 2 nodes have joined (--nnodes), and up to 4 may join and leave while it runs.
They connect to host0, which is one of them. Only nodes with the secret of --rdzv-conf
token_file=FILE can join. With a fixed number of nodes, each can be given its rank, as with torchrun:

  tenax run --nnodes 2 --node-rank 0 --master-addr host0 --master-port 29500 train.py

If the job must survive the loss of any host, use etcd: your own, or one that tenax runs on three of
the hosts during the job:

  tenax run --nnodes 2:4 --rdzv-backend etcd --rdzv-endpoint etcd1,etcd2,etcd3 train.py
  tenax run --nnodes 2:4 --rdzv-backend etcd --rdzv-conf managed=true --rdzv-endpoint n0,n1,n2 train.py

Flags go before SCRIPT; everything after it is passed to the script unchanged. Write flags in full,
with dashes or underscores, as '--flag value' or '--flag=value'. Environment variables set defaults,
which the command line overrides: PET_NPROC_PER_NODE=4 is '--nproc-per-node 4', PET_TEE=3 is
'--tee 3', PET_STANDALONE=1 is '--standalone'. PYTHON_EXEC sets the Python of the workers;
TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE sets the prefix of the lines of --tee.
"""

_ENDING = """\
help:
  -h, --help                  Show this page and exit.

environment:
  PET_<FLAG>                  the default of a flag, as above: PET_MAX_RESTARTS=3
  TORCHELASTIC_ENABLE_FILE_TIMER=1
                              the watchdog: kill a worker that hangs in a scope of
                              tenax.timer.expires, and report where it was
  TORCHELASTIC_HEALTH_CHECK_PORT=8080
                              serve /healthz and /readyz at this port, for Kubernetes and others
  TORCH_WORKER_SERVER_SOCKET=/tmp/job
                              let 'tenax ask /tmp/job' query workers that use worker_main
  --dry-run shows which of them are set.

Exit code: 0 if every worker succeeded; the exit code of the worker that failed first, or 128 + N if
signal N killed it; 128 + N if signal N stopped the job; 2 for wrong usage; 70 for a bug in tenax, 71
if tenax cannot work on this host, 72 if a process survived SIGKILL.
"""

_TEXT_COLUMN = 30
_NARROW_COLUMN = 6
_MIN_WIDTH = 60
_MIN_TEXT = 24
_GAP = re.compile(r"((?<=\S) {2,}|^ {10,})(?=\S)")  # before the text of a row; its name may be on the line before


def print_help(page: str) -> int:
    """Print a page, wrapped to the width of the terminal."""
    return print_page(fit(page, get_terminal_size().columns) if is_terminal(sys.stdout) else page)


def run_page(width: int) -> str:
    width = max(_MIN_WIDTH, min(width, 100))
    groups = ("\n".join([f"{group}:", *(_row(flag) for flag in FLAGS if flag.group == group), ""]) for group in GROUPS)
    return fit("\n".join([_INTRODUCTION, *groups, _ENDING]), width)


def fit(page: str, width: int) -> str:
    """Wrap what is wider than the terminal: paragraphs, and the texts of tables. Commands without a text are kept."""
    width = max(_MIN_WIDTH, width)
    blocks = []
    for block in page.rstrip("\n").split("\n\n"):
        lines = block.split("\n")
        if all(len(line) <= width for line in lines):
            blocks.append(block)
        elif any(line.startswith(" ") for line in lines):
            blocks.append("\n".join(_fit_row(row, width) for row in _rows(lines)))
        else:
            blocks.append("\n".join(_wrapped(" ".join(lines), width)))
    return "\n\n".join(blocks) + "\n"


def _rows(lines: list[str]) -> list[str]:
    """Join each row of a table with the lines that continue its text, which are indented like it."""
    rows: list[str] = []
    for line in lines:
        text = line.lstrip()
        if rows and (gap := _GAP.search(rows[-1])) and len(line) - len(text) == gap.end():
            rows[-1] += f" {text}"
        else:
            rows.append(line)
    return rows


def _fit_row(row: str, width: int) -> str:
    gap = _GAP.search(row)
    if gap is None or len(row) <= width:
        return row
    column, first = gap.end(), row[: gap.end()]
    if width - column < _MIN_TEXT:  # below its name
        name = row[: gap.start()]
        column, first = _NARROW_COLUMN, (f"{name}\n" if name else "") + " " * _NARROW_COLUMN
    return first + f"\n{' ' * column}".join(_wrapped(row[gap.end() :], width - column))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _row(flag: Flag) -> str:
    name = (f"  {flag.short}, " if flag.short else "  ") + f"{flag.name} {flag.value}".rstrip()
    gap = " " * (_TEXT_COLUMN - len(name)) if len(name) < _TEXT_COLUMN - 1 else "\n" + " " * _TEXT_COLUMN
    remarks = []
    if flag.choices:
        remarks.append("one of " + ", ".join(flag.choices))
    if flag.kind != "switch" and flag.default not in (None, "", ()) and "default:" not in flag.help:
        default = f"{flag.default:g}" if isinstance(flag.default, float) else flag.default
        remarks.append(f"default: {default}")
    if not flag.from_environment and not flag.ours:
        remarks.append("no PET_ variable")
    return name + gap + (f"{flag.help[:-1]} ({'; '.join(remarks)})." if remarks else flag.help)
