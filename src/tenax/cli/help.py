"""The help pages of ``tenax help`` and ``tenax run --help``, generated from the flag table."""

from __future__ import annotations

import textwrap

from tenax.cli.flags import FLAGS, GROUPS, Flag

OVERVIEW = """\
tenax: start the processes of a training job, keep them going, and say what went wrong.

usage: tenax COMMAND ...

  run       run a script in one or more worker processes, on one machine or on several

  ps        which runs have an agent on this machine
  status    what a run is doing: nodes, workers, generation, restarts, what it cost (--watch)
  logs      what its workers print, of any rank and generation, merged by time (--follow)
  restart   start all its workers again
  drain     let one of its machines leave
  stop      end it on every machine
  ask       ask workers that are running: where they are, what they do

  replay    tell the story of a run again from its journal
  timeline  draw that story: a page, and a trace for Perfetto
  report    sum up one run or many: causes, hosts that fail often, time that was lost

  version   print the version
  help      print this page; 'tenax help run' explains the flags of 'tenax run', and so on

  tenax run train.py                           one worker
  tenax run --nproc-per-node gpu train.py      one worker per GPU
  tenax run --nnodes 2:4 --rdzv-endpoint host0 --nproc-per-node gpu train.py
                                               the same on 2 to 4 machines: run this line on each
  tenax status --watch                         in another terminal: what it is doing
"""

_INTRODUCTION = """\
usage: tenax run [flags] SCRIPT [arguments of the script]
       tenax run [flags] -m MODULE [arguments of the module]
       tenax run [flags] --no-python PROGRAM [arguments of the program]

Run SCRIPT in one or more worker processes, on this machine or together with others. Each gets its
rank in the environment, as under torchrun. If one fails, all are restarted, as often as
--max-restarts allows; in the end there is one report of what went wrong.

  tenax run train.py                                 one worker
  tenax run --nproc-per-node gpu train.py --lr 3e-4  one worker per GPU; --lr belongs to train.py
  tenax run --nproc-per-node 4 --max-restarts 3 --log-dir logs --tee 3 train.py
                                                     restarts, and logs in files and on the terminal
  tenax run --nproc-per-node 2 -m my_package.train   a module
  tenax run --dry-run --nproc-per-node 2 train.py    show what would be run

On several machines, run the same line on each of them:

  tenax run --nnodes 2:4 --rdzv-endpoint host0 --nproc-per-node gpu --max-restarts 3 train.py

--nnodes says how many take part: 2 here are enough, and up to 4 may come and go while the job runs.
They meet at host0, which is one of them; --rdzv-conf token_file=FILE keeps strangers out. With a
fixed number each may be given its rank, as torchrun has it:

  tenax run --nnodes 2 --node-rank 0 --master-addr host0 --master-port 29500 train.py

Where no machine may be special, they meet through etcd, your own or one that tenax runs on three of
them for as long as the job:

  tenax run --nnodes 2:4 --rdzv-backend etcd --rdzv-endpoint etcd1,etcd2,etcd3 train.py
  tenax run --nnodes 2:4 --rdzv-backend etcd --rdzv-conf managed=true --rdzv-endpoint n0,n1,n2 train.py

Flags stand in front of SCRIPT; everything behind it goes to the script untouched. Write a flag in
full, with dashes or underscores, as '--flag value' or '--flag=value'. Its default can be set in the
environment, where the command line wins: PET_NPROC_PER_NODE=4 is '--nproc-per-node 4', PET_TEE=3 is
'--tee 3', PET_STANDALONE=1 is '--standalone'. PYTHON_EXEC names another Python for the workers;
TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE says what stands in front of the lines of --tee.
"""

_ENDING = """\
environment:
  PET_<FLAG>                  the default of a flag, as above: PET_MAX_RESTARTS=3
  TORCHELASTIC_ENABLE_FILE_TIMER=1
                              the watchdog: a worker that hangs in a scope of tenax.timer.expires is
                              ended, and the report shows where it was
  TORCHELASTIC_HEALTH_CHECK_PORT=8080
                              answer /healthz and /readyz there, for Kubernetes and its like
  TORCH_WORKER_SERVER_SOCKET=/tmp/job
                              workers that use worker_main can be asked: tenax ask /tmp/job
  With --dry-run you see which of them are on.

exit code:
  0 when every worker ended well; the first failed worker's own, and 128 + N when signal N ended it;
  128 + N when signal N stopped the job; 2 when the command line cannot be run as it was written;
  70 for a mistake of tenax itself, 71 when it cannot do its work here, 72 when a process survived
  SIGKILL.
"""

_HELP = """\
help:
  -h, --help                  Show this page and exit.
"""

_INDENT = 2
_TEXT_COLUMN = 30


def run_page(width: int) -> str:
    """Return the help page of ``tenax run`` for a terminal of this width."""
    width = max(60, min(width, 100))
    parts = [_INTRODUCTION]
    for group in GROUPS:
        lines = [f"{group}:"]
        for flag in FLAGS:
            if flag.group == group:
                lines.extend(_flag_lines(flag, width))
        parts.append("\n".join(lines) + "\n")
    return "\n".join([*parts, _HELP, _ENDING])


def _flag_lines(flag: Flag, width: int) -> list[str]:
    name = (
        " " * _INDENT + (f"{flag.short}, " if flag.short else "") + flag.name + (f" {flag.value}" if flag.value else "")
    )
    text = textwrap.wrap(_description(flag), width - _TEXT_COLUMN, break_on_hyphens=False)
    indented = [" " * _TEXT_COLUMN + line for line in text]
    if len(name) > _TEXT_COLUMN - 2:
        return [name, *indented]
    return [name.ljust(_TEXT_COLUMN) + text[0], *indented[1:]]


def _description(flag: Flag) -> str:
    """Return the flag's help with its choices and default."""
    remarks = []
    if flag.choices:
        remarks.append("one of " + ", ".join(flag.choices))
    if flag.kind != "switch" and flag.default not in (None, "", ()) and "default:" not in flag.help:
        remarks.append(f"default: {flag.default}")
    if not flag.from_environment and not flag.ours:
        remarks.append("no PET_ variable")
    return f"{flag.help[:-1]} ({'; '.join(remarks)})." if remarks else flag.help
