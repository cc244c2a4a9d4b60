"""The flags of ``tenax run``: one table that feeds the parser, the help page and ``tenax.run.get_args_parser``.

Names, defaults and ``PET_*`` variables are torchrun's; ``tests/cli`` compares them with the real one. The table
defines names and value types only. ``options`` checks which flags can be combined.
"""

from __future__ import annotations

import msgspec

from tenax._core.bounds import MAX_SECONDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

START_METHODS = ("spawn", "fork", "forkserver")
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

WHAT = "what to run"
MANY = "how many workers"
STOPPING = "restarts and stopping"
LOGS = "logs"
PLACEMENT = "placement"
NODES = "names and nodes"
SEEING = "seeing"
GROUPS = (WHAT, MANY, STOPPING, LOGS, SEEING, PLACEMENT, NODES)


class UsageError(ValueError):
    """The command line cannot be executed as written. The message is one sentence for the user."""


class OutOfRange(UsageError):
    """A number outside the range of its flag."""


class Flag(msgspec.Struct, frozen=True):
    """One flag. A ``switch`` takes no value; the other kinds take one."""

    name: str  # canonical spelling: "--nproc-per-node"
    group: str
    kind: str  # switch, text, whole, number, list
    default: Any
    help: str
    value: str = ""  # placeholder of the value in the help page
    short: str = ""
    choices: tuple[str, ...] = ()
    least: int | None = None  # for whole numbers
    most: int | None = None
    from_environment: bool = True  # whether PET_<NAME> sets its default
    ours: bool = False  # not a torchrun flag
    alone: str | None = None  # the value when none is given; None: a value is required

    @property
    def dest(self) -> str:
        return self.name[2:].replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable that sets the default; empty if none does."""
        return "PET_" + self.dest.upper() if self.from_environment else ""

    @property
    def spellings(self) -> tuple[str, ...]:
        """All accepted spellings: short, with dashes, with underscores."""
        long = (self.name,) if "-" not in self.name[2:] else (self.name, "--" + self.dest)
        return (self.short, *long) if self.short else long


FLAGS = (
    Flag(
        "--module",
        WHAT,
        "switch",
        False,
        "SCRIPT is the name of a module, to be run as 'python -m' does.",
        short="-m",
    ),
    Flag(
        "--no-python",
        WHAT,
        "switch",
        False,
        "SCRIPT is a program of its own: start it without Python in front.",
    ),
    Flag(
        "--run-path",
        WHAT,
        "switch",
        False,
        "Run SCRIPT inside worker processes started by Python's multiprocessing (see --start-method) instead of in a "
        "fresh interpreter.",
    ),
    Flag(
        "--start-method",
        WHAT,
        "text",
        "spawn",
        "How --run-path starts its processes.",
        value="METHOD",
        choices=START_METHODS,
    ),
    Flag(
        "--compat",
        WHAT,
        "switch",
        False,
        "In Python workers and in all that they start, torch.distributed.elastic, torch.distributed.launcher, "
        "torch.distributed.run and torchelastic are tenax's modules, also where torch is not installed.",
        ours=True,
    ),
    Flag(
        "--preload",
        WHAT,
        "text",
        "auto",
        "Modules to import once on this machine, with commas between them; workers are forked from there, and as many "
        "stand by for a restart. 'auto': what SCRIPT imports of others; 'none': every worker imports for itself.",
        value="MODULES",
        ours=True,
    ),
    Flag(
        "--dry-run",
        WHAT,
        "switch",
        False,
        "Print what would be run (commands, environment, ranks, logs) and start nothing.",
        from_environment=False,
        ours=True,
    ),
    Flag(
        "--nproc-per-node",
        MANY,
        "text",
        "1",
        "Workers on this machine: a number, 'gpu' for one per visible GPU, 'cpu' for one per usable CPU, or 'auto' for "
        "GPUs where there are any and CPUs where not.",
        value="N",
    ),
    Flag(
        "--nnodes",
        MANY,
        "text",
        "1:1",
        "Machines in the job: N of them, or MIN:MAX for machines that may come and go. More than one need a place "
        "to meet: --rdzv-endpoint.",
        value="N",
    ),
    Flag(
        "--max-restarts",
        STOPPING,
        "whole",
        0,
        "How many times to restart the workers after a failure before giving up, counted once for the whole job. "
        "Machines that come, go or are lost cost nothing.",
        value="N",
        least=0,
    ),
    Flag(
        "--restart-policy",
        STOPPING,
        "text",
        "budget",
        "What decides after a failure: 'budget' (restart while restarts are left), a policy that an installed package "
        "offers, or MODULE:CLASS. That of the coordinator's node decides for all.",
        value="NAME",
        ours=True,
    ),
    Flag(
        "--fatal-exit-codes",
        STOPPING,
        "text",
        "",
        "Exit codes after which a restart is useless, from 1 to 255: '2,64'. The job ends at once, whatever "
        "restarts are left.",
        value="CODES",
        ours=True,
    ),
    Flag(
        "--fatal-errors",
        STOPPING,
        "text",
        "",
        "The same for exceptions, by the names of their classes: 'ValueError,ConfigError'.",
        value="NAMES",
        ours=True,
    ),
    Flag(
        "--shutdown-timeout",
        STOPPING,
        "whole",
        None,
        "Seconds a worker may take to end after it was asked to, before it is killed (default: "
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30).",
        value="SECONDS",
        least=0,
    ),
    Flag(
        "--signals-to-handle",
        STOPPING,
        "text",
        DEFAULT_SIGNALS,
        "Signals that stop the job in an orderly way: they are passed on to the workers.",
        value="NAMES",
    ),
    Flag(
        "--notice-signals",
        STOPPING,
        "text",
        "",
        "Signals with which a scheduler says in advance that it will take this machine, such as SIGUSR1. All "
        "workers of the job go on, and can ask for the notice with tenax.preemption (default: none).",
        value="NAMES",
        ours=True,
    ),
    Flag(
        "--notice-seconds",
        STOPPING,
        "number",
        None,
        "How long after such a notice the machine is taken (default: not known).",
        value="SECONDS",
        ours=True,
    ),
    Flag(
        "--monitor-interval",
        STOPPING,
        "number",
        0.1,
        "Accepted for torchrun's sake, without effect: tenax hears of a dead worker from the kernel and never polls.",
        value="SECONDS",
    ),
    Flag(
        "--log-dir",
        LOGS,
        "text",
        None,
        "Folder for log files and the journal; each run makes its own folder in it (default: a temporary folder).",
        value="DIR",
    ),
    Flag(
        "--redirects",
        LOGS,
        "text",
        "0",
        "Streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank, '0:1,1:3'.",
        value="STREAMS",
        short="-r",
    ),
    Flag(
        "--tee",
        LOGS,
        "text",
        "0",
        "Streams that go to files and to the terminal, each line with its worker's name; written as for --redirects.",
        value="STREAMS",
        short="-t",
    ),
    Flag(
        "--local-ranks-filter",
        LOGS,
        "text",
        "",
        "Show only these local ranks on the terminal: '0' or '0,1,2' (default: all).",
        value="RANKS",
    ),
    Flag(
        "--duplicate-stdout-filters",
        LOGS,
        "list",
        (),
        "Also copy stdout lines that contain one of these texts into filtered_stdout.log; write ',,' for a comma "
        "inside a text.",
        value="TEXTS",
    ),
    Flag(
        "--duplicate-stderr-filters",
        LOGS,
        "list",
        (),
        "The same for stderr and filtered_stderr.log.",
        value="TEXTS",
    ),
    Flag(
        "--logs-specs",
        LOGS,
        "text",
        None,
        "Name of an installed 'torchrun.logs_specs' entry point that decides where logs go, instead of tenax's own.",
        value="NAME",
        from_environment=False,
    ),
    Flag(
        "--event-log-handler",
        LOGS,
        "text",
        "null",
        "Where events go: 'console', 'jsonl:PATH', a handler that an installed package offers, or several, with commas "
        "between them.",
        value="NAME",
    ),
    Flag(
        "--dashboard",
        SEEING,
        "text",
        "",
        "Serve a live page of the whole run: where the coordinator is, on this PORT of the loopback address, or on "
        "HOST:PORT. Without a value: on any free port. The link that is printed has a secret in it.",
        value="[PORT]",
        ours=True,
        alone="0",
    ),
    Flag(
        "--on-hang",
        SEEING,
        "text",
        "off",
        "What to do when nothing moves any more on any machine: 'report' takes the stacks of all workers and says who "
        "is where, 'restart' does that and starts all workers again, 'off' does not look.",
        value="WHAT",
        choices=("off", "report", "restart"),
        ours=True,
    ),
    Flag(
        "--hang-after",
        SEEING,
        "number",
        300.0,
        "Seconds in which nothing may move before that can be called a hang. What the job has shown to be its own "
        "rhythm counts, if that is slower.",
        value="SECONDS",
        ours=True,
    ),
    Flag(
        "--trace",
        SEEING,
        "text",
        "",
        "Where a trace of the run goes, its generations, starts and restarts as spans: 'otel' or 'otel:URL'. Needs "
        "tenax[otel].",
        value="HANDLER",
        ours=True,
    ),
    Flag(
        "--metrics",
        LOGS,
        "text",
        "",
        "Where metrics go: 'prometheus:PORT', 'statsd:HOST:PORT', 'otel:URL', 'jsonl:PATH', 'console', a handler that "
        "an installed package offers, or several, with commas between them.",
        value="NAME",
        ours=True,
    ),
    Flag(
        "--report",
        LOGS,
        "text",
        None,
        "Also write the report of how the job ended to FILE, as JSON.",
        value="FILE",
        from_environment=False,
        ours=True,
    ),
    Flag(
        "--virtual-local-rank",
        PLACEMENT,
        "switch",
        False,
        "Give every worker LOCAL_RANK=0 and show it only its own GPU, as device 0.",
    ),
    Flag(
        "--numa-binding",
        PLACEMENT,
        "text",
        None,
        "Bind each worker to CPUs near its GPU.",
        value="MODE",
        choices=NUMA_BINDINGS,
        from_environment=False,
    ),
    Flag(
        "--rdzv-id",
        NODES,
        "text",
        "none",
        "Name of the job, in TORCHELASTIC_RUN_ID and in the log folder's name; the same on every machine "
        "(default: a random one for one machine, 'none' for several).",
        value="ID",
    ),
    Flag(
        "--role",
        NODES,
        "text",
        "default",
        "Name of what the workers are, in ROLE_NAME and in front of their lines.",
        value="NAME",
    ),
    Flag(
        "--standalone",
        NODES,
        "switch",
        False,
        "This machine alone, whatever PET_NNODES and PET_RDZV_* say. One node needs no flag at all.",
    ),
    Flag(
        "--master-addr",
        NODES,
        "text",
        "127.0.0.1",
        "One machine: MASTER_ADDR for the workers (default: 127.0.0.1). Several: where they meet, as "
        "--rdzv-endpoint HOST says it.",
        value="HOST",
    ),
    Flag(
        "--master-port",
        NODES,
        "whole",
        None,
        "One machine: MASTER_PORT for the workers (default: a free port, so that jobs never collide). Several: "
        "the port where they meet, next to --master-addr (default: 29500).",
        value="PORT",
        least=0,
        most=65535,
    ),
    Flag(
        "--local-addr",
        NODES,
        "text",
        None,
        "Address under which the other machines and the workers reach this one (default: the one that the others see).",
        value="HOST",
    ),
    Flag(
        "--node-rank",
        NODES,
        "whole",
        0,
        "Which of N machines this is, counted from 0 (default: they are numbered as they come, and a machine that "
        "stays keeps its number).",
        value="N",
        least=0,
    ),
    Flag(
        "--rdzv-backend",
        NODES,
        "text",
        "static",
        "How several machines find each other: tcp (c10d is another name for it), static (tcp with a --node-rank "
        "for each), etcd (or etcd-v2: no machine is special), or an installed one (default: tcp, or static with "
        "--node-rank). One machine has nobody to find, so any name works.",
        value="NAME",
    ),
    Flag(
        "--rdzv-endpoint",
        NODES,
        "text",
        "",
        "Where several machines meet: HOST or HOST:PORT of one of them, the same on all (default port: 29400). "
        "Whoever can listen there serves it. With etcd: its members, with commas between (default port: 2379).",
        value="HOST:PORT",
    ),
    Flag(
        "--rdzv-conf",
        NODES,
        "text",
        "",
        "Settings of the meeting, 'key=value,key=value': join_timeout, last_call_timeout, keep_alive_interval, "
        "keep_alive_max_attempt (seconds and a count), scale_up (now, restart), token_file (a secret that all "
        "machines share), ssl_cert, ssl_cert_key, ca_cert (TLS), node_name, node_order, store_port, "
        "use_agent_store, store_allow. With etcd also user, password_file, outage_timeout (seconds), link_port (of "
        "the elected node), link_tls (false: links without TLS), and managed (true: tenax runs etcd on the hosts of "
        "--rdzv-endpoint).",
        value="SETTINGS",
    ),
)

BY_SPELLING = {spelling: flag for flag in FLAGS for spelling in flag.spellings}
BY_DEST = {flag.dest: flag for flag in FLAGS}

_TRUE = frozenset({"1", "true", "yes", "t", "y", "on"})
_FALSE = frozenset({"0", "false", "no", "f", "n", "off"})
_MIN_PREFIX = 3  # a prefix must be longer than this to count as an abbreviation
_MIN_SIMILARITY = 0.75


def convert(flag: Flag, text: str, source: str) -> Any:
    """Convert ``text`` to the flag's type. ``source`` is the flag as the user wrote it, for messages."""
    if flag.choices and text not in flag.choices:
        raise UsageError(f"{source} takes {_any_of(flag.choices)}, not {text!r}")
    if flag.kind == "text":
        return text
    if flag.kind == "whole":
        return _whole(flag, text, source)
    if flag.kind == "number":
        return _number(text, source)
    if flag.kind == "list":
        return split_list(text)
    return truth(text, source)


def truth(text: str, source: str) -> bool:
    """Parse the environment variable of a switch."""
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise UsageError(f"{source} takes 0, 1, true, false, yes or no, not {text!r}")


def closest_flag(flag: str, known: Iterable[str]) -> str:
    """Return the known flag that starts with this one, or else the most similar one; empty if there is none."""
    import difflib

    names = sorted(known)
    longer = [name for name in names if len(flag) > _MIN_PREFIX and name.startswith(flag)]
    close = longer or difflib.get_close_matches(flag, names, n=1, cutoff=_MIN_SIMILARITY)
    return close[0] if close else ""


def split_list(text: str) -> list[str]:
    """Split at commas. Two commas in a row stand for one literal comma."""
    return [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]


def _whole(flag: Flag, text: str, source: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise UsageError(f"{source} takes {_range(flag)}, not {text!r}") from None
    if (flag.least is not None and value < flag.least) or (flag.most is not None and value > flag.most):
        raise OutOfRange(f"{source} takes {_range(flag)}, not {text!r}")
    return value


def _range(flag: Flag) -> str:
    if flag.most is not None:
        return f"a whole number from {flag.least} to {flag.most}"
    return f"a whole number of at least {flag.least}" if flag.least is not None else "a whole number"


def _number(text: str, source: str) -> float:
    expected = f"{source} takes a number of seconds greater than 0, not {text!r}"
    try:
        value = float(text)
    except ValueError:
        raise UsageError(expected) from None
    if not 0 < value < float("inf"):
        raise OutOfRange(expected)
    if value > MAX_SECONDS:
        raise OutOfRange(f"{source} takes at most {MAX_SECONDS:.0f} seconds, not {text!r}")
    return value


def _any_of(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
