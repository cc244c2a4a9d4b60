"""The flags of ``tenax run``: one table that feeds the parser, the help page and ``tenax.run.get_args_parser``.

Names, defaults and ``PET_*`` variables are torchrun's; ``tests/cli`` compares them with the real one. The table
defines names and value types only. ``options`` checks which flags can be combined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from tenax._core.bounds import MAX_SECONDS
from tenax._node.job import ON_HANG, START_METHODS
from tenax._node.signals import DEFAULT_SIGNALS

NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")

GROUPS = (
    "what to run",
    "how many workers",
    "restarts and stopping",
    "logs",
    "observing",
    "placement",
    "names and nodes",
)
WHAT, MANY, STOPPING, LOGS, OBSERVING, PLACEMENT, NODES = GROUPS


class UsageError(ValueError):
    """The command line cannot be executed as written. The message is for the user."""

    hint = "\ntry: tenax run --help"


class OutOfRange(UsageError):
    """A number outside the range of its flag."""


@contextmanager
def usage_errors(where: str = "") -> Iterator[None]:
    """Turn a ValueError into a ``UsageError`` with its message, after ``where``."""
    try:
        yield
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"{where}{str(error).rstrip('.')}") from error


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
    most: int | None = None  # for whole numbers, which begin at 0
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


# A table: the properties of a flag on one line, then its help.
# fmt: off
FLAGS = (
    Flag("--module", WHAT, "switch", False, short="-m", help=
         "SCRIPT is the name of a module, run as 'python -m' does."),
    Flag("--no-python", WHAT, "switch", False, help=
         "SCRIPT is a program: start it directly, without Python."),
    Flag("--run-path", WHAT, "switch", False, help=
         "Run SCRIPT in worker processes that Python's multiprocessing starts (see --start-method) instead of in new "
         "interpreters."),
    Flag("--start-method", WHAT, "text", "spawn", value="METHOD", choices=START_METHODS, help=
         "How --run-path starts its processes."),
    Flag("--compat", WHAT, "switch", False, ours=True, help=
         "In Python workers and their child processes, torch.distributed.elastic, torch.distributed.launcher, "
         "torch.distributed.run and torchelastic import tenax's modules, even if torch is not installed."),
    Flag("--preload", WHAT, "text", "auto", value="MODULES", ours=True, help=
         "Modules to import once per node, separated by commas. Workers are forked from the process that imported "
         "them, and as many standbys wait for a restart. 'auto': the third-party modules that SCRIPT imports; "
         "'none': every worker imports on its own."),
    Flag("--standby-setup", WHAT, "text", "", value="MODULE:FUNCTION", ours=True, help=
         "Function that each standby calls before it is needed, with the environment of the worker that it may "
         "replace. 'tenax.elastic:prepare_cuda' creates the CUDA context."),
    Flag("--dry-run", WHAT, "switch", False, from_environment=False, ours=True, help=
         "Print what would run (commands, environment, ranks, logs) and start nothing."),
    Flag("--nproc-per-node", MANY, "text", "1", value="N", help=
         "Workers on this node: a number, 'gpu' for one per visible GPU, 'cpu' for one per usable CPU, or 'auto' for "
         "GPUs if there are any, else CPUs."),
    Flag("--nnodes", MANY, "text", "1:1", value="N", help=
         "Nodes in the job: N, or MIN:MAX if nodes may join and leave. More than one node requires --rdzv-endpoint."),
    Flag("--max-restarts", STOPPING, "whole", 0, value="N", help=
         "Maximum number of restarts after failures, counted once for the whole job. Nodes that join, leave or are "
         "lost are not counted."),
    Flag("--restart-policy", STOPPING, "text", "budget", value="NAME", ours=True, help=
         "Policy that decides what follows a failure: 'budget' (restart until --max-restarts are used), the name of "
         "an installed one, or MODULE:CLASS. The policy of the coordinator's node decides for the whole job."),
    Flag("--fatal-exit-codes", STOPPING, "text", "", value="CODES", ours=True, help=
         "Exit codes, from 1 to 255, after which the job fails without a restart: '2,64'."),
    Flag("--fatal-errors", STOPPING, "text", "", value="NAMES", ours=True, help=
         "The same for exceptions, by class name: 'ValueError,ConfigError'."),
    Flag("--shutdown-timeout", STOPPING, "whole", None, value="SECONDS", help=
         "Grace period: seconds between SIGTERM and SIGKILL when workers are stopped (default: "
         "TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30)."),
    Flag("--signals-to-handle", STOPPING, "text", DEFAULT_SIGNALS, value="NAMES", help=
         "Signals that stop the job gracefully; they are forwarded to the workers."),
    Flag("--notice-signals", STOPPING, "text", "", value="NAMES", ours=True, help=
         "Signals with which a scheduler announces that it will take this node, such as SIGUSR1. All workers of the "
         "job continue and can read the notice with tenax.preemption (default: none)."),
    Flag("--notice-seconds", STOPPING, "number", None, value="SECONDS", ours=True, help=
         "Seconds from the notice until the node is taken (default: unknown)."),
    Flag("--monitor-interval", STOPPING, "number", 0.1, value="SECONDS", help=
         "No effect; accepted for compatibility with torchrun. tenax does not poll its workers."),
    Flag("--log-dir", LOGS, "text", None, value="DIR", help=
         "Folder for log files and the journal; each run creates its own folder in it (default: a temporary folder)."),
    Flag("--redirects", LOGS, "text", "0", value="STREAMS", short="-r", help=
         "Streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both; or per local rank, '0:1,1:3'."),
    Flag("--tee", LOGS, "text", "0", value="STREAMS", short="-t", help=
         "Streams that go to files and to the terminal, where each line gets its worker's prefix; same values as "
         "--redirects."),
    Flag("--local-ranks-filter", LOGS, "text", "", value="RANKS", help=
         "Show only these local ranks on the terminal: '0' or '0,1,2' (default: all)."),
    Flag("--duplicate-stdout-filters", LOGS, "list", (), value="TEXTS", help=
         "Also copy stdout lines that contain one of these texts to filtered_stdout.log; ',,' is a comma inside a "
         "text."),
    Flag("--duplicate-stderr-filters", LOGS, "list", (), value="TEXTS", help=
         "The same for stderr and filtered_stderr.log."),
    Flag("--logs-specs", LOGS, "text", None, value="NAME", from_environment=False, help=
         "Name of an installed 'torchrun.logs_specs' entry point that decides where logs go."),
    Flag("--event-log-handler", LOGS, "text", "null", value="NAME", help=
         "Where events go: 'console', 'jsonl:PATH', a handler of an installed package, or several, separated by "
         "commas."),
    Flag("--dashboard", OBSERVING, "text", "", value="[PORT]", ours=True, alone="0", help=
         "Serve a live page of the whole run on the coordinator's node, at this PORT of the loopback address or at "
         "HOST:PORT; without a value: at any free port. The printed link contains a secret."),
    Flag("--on-hang", OBSERVING, "text", "report", value="ACTION", choices=ON_HANG, ours=True, help=
         "What to do when no worker on any node makes progress: 'report' samples the stacks of all workers and "
         "reports where each is, 'restart' also restarts all workers, 'off' disables the detection."),
    Flag("--hang-after", OBSERVING, "number", 300.0, value="SECONDS", ours=True, help=
         "Seconds without progress that count as a hang; longer if the job's own steps take longer."),
    Flag("--trace", OBSERVING, "text", "", value="HANDLER", ours=True, help=
         "Where a trace of the run goes, with generations, starts and restarts as spans: 'otel' or 'otel:URL'. "
         "Requires tenax[otel]."),
    Flag("--metrics", LOGS, "text", "", value="NAME", ours=True, help=
         "Where metrics go: 'prometheus:PORT', 'statsd:HOST:PORT', 'otel:URL', 'jsonl:PATH', 'console', a handler of "
         "an installed package, or several, separated by commas."),
    Flag("--report", LOGS, "text", None, value="FILE", from_environment=False, ours=True, help=
         "Also write the failure report to FILE, as JSON."),
    Flag("--virtual-local-rank", PLACEMENT, "switch", False, help=
         "Give every worker LOCAL_RANK=0 and only its own GPU, as device 0."),
    Flag("--numa-binding", PLACEMENT, "text", None, value="MODE", choices=NUMA_BINDINGS, from_environment=False, help=
         "Bind each worker to CPUs near its GPU."),
    Flag("--rdzv-id", NODES, "text", "none", value="ID", help=
         "Run id, in TORCHELASTIC_RUN_ID and in the name of the log folder; the same on every node (default: a "
         "random one for one node, 'none' for several)."),
    Flag("--role", NODES, "text", "default", value="NAME", help=
         "Role of the workers, in ROLE_NAME and in the prefix of their lines."),
    Flag("--standalone", NODES, "switch", False, help=
         "Run on this node alone and ignore PET_NNODES and PET_RDZV_*. Without these variables it is not needed."),
    Flag("--master-addr", NODES, "text", "127.0.0.1", value="HOST", help=
         "One node: MASTER_ADDR of the workers (default: 127.0.0.1). Several nodes: the host of the endpoint, like "
         "--rdzv-endpoint HOST."),
    Flag("--master-port", NODES, "whole", None, value="PORT", most=65535, help=
         "One node: MASTER_PORT of the workers (default: a free port). Several nodes: the port of the endpoint, with "
         "--master-addr (default: 29500)."),
    Flag("--local-addr", NODES, "text", None, value="HOST", help=
         "Address at which other nodes and workers reach this node (default: the source address of its connection to "
         "the coordinator)."),
    Flag("--node-rank", NODES, "whole", 0, value="N", help=
         "Rank of this node, from 0 to N - 1 (default: nodes are ranked in the order in which they join, and keep "
         "their rank while they stay)."),
    Flag("--rdzv-backend", NODES, "text", "static", value="NAME", help=
         "How nodes find each other: tcp (or c10d), static (tcp with a --node-rank for each node), etcd (or etcd-v2; "
         "any node can serve the coordinator), or an installed backend (default: tcp, or static with --node-rank). "
         "One node needs no rendezvous, so any name works."),
    Flag("--rdzv-endpoint", NODES, "text", "", value="HOST:PORT", help=
         "Address where the nodes connect: HOST or HOST:PORT of one of them, the same on all nodes (default port: "
         "29400). The node that can listen there serves the coordinator. With etcd: the etcd members, separated by "
         "commas (default port: 2379)."),
    Flag("--rdzv-conf", NODES, "text", "", value="SETTINGS", help=
         "Settings of the rendezvous, 'key=value,key=value': join_timeout, last_call_timeout, keep_alive_interval "
         "(seconds), keep_alive_max_attempt (a count), scale_up (now, restart), token_file (a secret that all nodes "
         "share), ssl_cert, ssl_cert_key, ca_cert (TLS), node_name, node_order, store_port, use_agent_store, "
         "store_allow. With etcd also user, password_file, outage_timeout (seconds), link_port (of the leader), "
         "link_tls (false: links without TLS), and managed (true: tenax runs etcd on the hosts of --rdzv-endpoint)."),
)
# fmt: on

BY_SPELLING = {spelling: flag for flag in FLAGS for spelling in flag.spellings}
BY_DEST = {flag.dest: flag for flag in FLAGS}

_TRUE = frozenset({"1", "true", "yes", "t", "y", "on"})
_FALSE = frozenset({"0", "false", "no", "f", "n", "off"})
_MIN_PREFIX = 3  # a prefix must be longer than this to count as an abbreviation
_MIN_SIMILARITY = 0.75


def convert(flag: Flag, text: str, source: str) -> Any:
    """Convert ``text`` to the flag's type. ``source`` is the flag as the user wrote it, for messages."""
    if flag.choices and text not in flag.choices:
        raise UsageError(f"{source} takes {', '.join(flag.choices[:-1])} or {flag.choices[-1]}, not {text!r}")
    match flag.kind:
        case "whole":
            return _whole(flag, text, source)
        case "number":
            return seconds(text, source)
        case "switch":
            return truth(text, source)
        case "list":  # two commas in a row stand for one literal comma
            return [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]
    return text


def truth(text: str, source: str) -> bool:
    value = text.strip().lower()
    if value not in _TRUE | _FALSE:
        raise UsageError(f"{source} takes 0, 1, true, false, yes or no, not {text!r}")
    return value in _TRUE


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return a question about the known word that is most like this one, for the end of a message, or nothing."""
    close = closest_flag(word, known)
    return f"; did you mean {close!r}?" if close else ""


def closest_flag(flag: str, known: Iterable[str]) -> str:
    """Return the known flag that starts with this one, or else the most similar one; empty if there is none."""
    import difflib

    names = sorted(known)
    longer = [name for name in names if len(flag) > _MIN_PREFIX and name.startswith(flag)]
    close = longer or difflib.get_close_matches(flag, names, n=1, cutoff=_MIN_SIMILARITY)
    return close[0] if close else ""


def _whole(flag: Flag, text: str, source: str) -> int:
    number = "a whole number of seconds" if flag.value == "SECONDS" else "a whole number"
    span = ", at least 0" if flag.most is None else f" from 0 to {flag.most}"
    expected = f"{source} takes {number}{span}, not {text!r}"
    try:
        value = int(text)
    except ValueError:
        raise UsageError(expected) from None
    if value < 0 or (flag.most is not None and value > flag.most):
        raise OutOfRange(expected)
    return value


def seconds(text: str, source: str) -> float:
    """Parse a number of seconds. ``source``: the flag, for messages."""
    expected = f"{source} takes a number of seconds, more than 0, not {text!r}"
    try:
        value = float(text)
    except ValueError:
        raise UsageError(expected) from None
    if not 0 < value < float("inf"):
        raise OutOfRange(expected)
    if value > MAX_SECONDS:
        raise OutOfRange(f"{source} takes at most {MAX_SECONDS:.0f} s, not {text!r}")
    return value
