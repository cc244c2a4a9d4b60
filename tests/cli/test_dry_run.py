"""--dry-run describes the run and starts nothing."""

from __future__ import annotations

import shlex

import pytest

from tenax.cli.arguments import parse
from tenax.cli.dry_run import describe
from tenax.cli.flags import UsageError


def dry_run(args: list[str], **environ: str) -> str:
    environ = {"OMP_NUM_THREADS": "4", **environ}
    return describe(parse(args, environ), interpreter="/opt/python", cwd="/home/me", environ=environ)


def test_the_description_of_one_node() -> None:
    """Command, environment, ranks, logs, restarts, stopping."""
    args = "--nproc-per-node 2 --max-restarts 3 --tee 3 --log-dir logs --rdzv-id job7 train.py --name"
    assert (
        dry_run([*args.split(), "a b"])
        == """\
Dry run, nothing is started. The command would run 2 workers on this node.

script      train.py
interpreter /opt/python (the one that runs tenax)
preload     what the script imports, once per node; workers are forked (--preload)
folder      /home/me
run id      job7
role        default
restarts    up to 3: a failure restarts all workers (--max-restarts)
stopping    SIGTERM, SIGINT, SIGHUP, SIGQUIT stop the job and are forwarded to the workers
            SIGTERM, 30 s grace period, SIGKILL (--shutdown-timeout)
logs        logs/job7_<random>/attempt_<restarts>/<local rank>/
            to files only: none (--redirects)
            to files and the terminal: stdout and stderr (--tee)
hangs       after 5 min without progress, report the stacks (--on-hang)
threads     OMP_NUM_THREADS=4, inherited
placement   workers may run on any CPU

environment of every worker, added to what is inherited:
  GROUP_RANK=0
  ROLE_NAME=default
  LOCAL_WORLD_SIZE=2
  WORLD_SIZE=2
  GROUP_WORLD_SIZE=1
  ROLE_WORLD_SIZE=2
  MASTER_ADDR=127.0.0.1
  MASTER_PORT=<a free port>
  TORCHELASTIC_RESTART_COUNT=0
  TORCHELASTIC_MAX_RESTARTS=3
  TORCHELASTIC_RUN_ID=job7
  TORCHELASTIC_USE_AGENT_STORE=True
  TORCH_NCCL_ASYNC_ERROR_HANDLING=1
  TENAX_GENERATION=1
  TENAX_GENERATION_REASON='first generation'
  PYTHONFAULTHANDLER=1
  TENAX_NOTICE_FILE=<log folder>/notice-1.json

worker 0: global rank 0 of 2
  command     /opt/python -u train.py --name 'a b'
  RANK=0
  LOCAL_RANK=0
  ROLE_RANK=0
  TORCHELASTIC_ERROR_FILE=<log folder>/attempt_0/0/error.json

worker 1: global rank 1 of 2
  command     /opt/python -u train.py --name 'a b'
  RANK=1
  LOCAL_RANK=1
  ROLE_RANK=1
  TORCHELASTIC_ERROR_FILE=<log folder>/attempt_0/1/error.json
"""
    )


def test_each_flag_changes_the_description() -> None:
    assert "MASTER_ADDR=head\n  MASTER_PORT=29501\n" in dry_run(["--master-addr=head", "--master-port=29501", "t.py"])
    assert "MASTER_ADDR=10.0.0.1\n" in dry_run(["--local-addr=10.0.0.1", "t.py"])
    assert "script      module pkg.train\n" in dry_run(["-m", "pkg.train"])
    assert "command     /opt/python -u -m pkg.train --x\n" in dry_run(["-m", "pkg.train", "--x"])
    program = dry_run(["--no-python", "./run it", "--x"])
    assert "script      program ./run it\n" in program
    assert "interpreter" not in program
    assert "command     './run it' --x\n" in program
    assert "interpreter /py/other (PYTHON_EXEC)\n" in dry_run(["t.py"], PYTHON_EXEC="/py/other")
    assert "run by multiprocessing, fork" in dry_run(["--run-path", "--start-method=fork", "t.py"])
    assert "none: the first failure ends the job" in dry_run(["t.py"])
    assert "SIGTERM, 5 s grace period, SIGKILL" in dry_run(["--shutdown-timeout=5", "t.py"])
    assert "stopping    SIGUSR1 stop" in dry_run(["--signals-to-handle=SIGUSR1", "t.py"])
    with_notice = dry_run(["--notice-signals=SIGUSR1,SIGUSR2", "--notice-seconds=90", "t.py"])
    assert "            SIGUSR1, SIGUSR2: notice of preemption in 1 min 30 s (--notice-signals)\n" in with_notice
    assert "SIGUSR1: notice of preemption (--notice-signals)\n" in dry_run(["--notice-signals=SIGUSR1", "t.py"])
    fatal = dry_run(["--max-restarts=3", "--fatal-exit-codes=3,64", "--fatal-errors=ConfigError", "t.py"])
    assert "            no restart after exit code 3 or exit code 64 or ConfigError (--fatal-exit-codes, --f" in fatal
    policy = dry_run(["--max-restarts=3", "--restart-policy=tenax.policy:BudgetPolicy", "t.py"])
    assert "restarts    decided by tenax.policy:BudgetPolicy, given --max-restarts 3 (--restart-policy)\n" in policy
    with pytest.raises(UsageError, match="unknown restart policy 'mine'; known: "):
        dry_run(["--restart-policy=mine", "t.py"])
    assert "USE_AGENT_STORE=False\n" in dry_run(["--rdzv-conf=use_agent_store=no", "t.py"])
    assert "USE_AGENT_STORE=False\n" in dry_run(["t.py"], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert "logs        <a new temporary folder>/<run id>_<random>/" in dry_run(["t.py"])
    without_logs = dry_run(["--log-dir=/dev/null", "t.py"])
    assert "no files (--log-dir /dev/null)" in without_logs
    assert "TORCHELASTIC_ERROR_FILE" not in without_logs
    assert "to files only: stdout of local rank 0, stdout and stderr of local rank 10 (--r" in dry_run(
        ["--nproc-per-node=11", "-r0:1,10:3,5:0", "t.py"]
    )
    assert "shown on the terminal: local ranks 0, 2 only\n" in dry_run(
        ["--nproc-per-node=3", "--local-ranks-filter=2,0", "t.py"]
    )
    assert "filtered_stderr.log: lines with 'loss' or 'a,b'\n" in dry_run(
        ["--duplicate-stderr-filters=loss,a,,b", "t.py"]
    )
    assert "failure report: r.json (--report)\n" in dry_run(["--report=r.json", "t.py"])
    assert "prefix of a worker's line: '[${rank}] '\n" in dry_run(
        ["t.py"], TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[${rank}] "
    )


def test_virtual_local_rank_shows_each_workers_device() -> None:
    """Each worker has local rank 0 and its own device."""
    text = dry_run(["--virtual-local-rank", "--nproc-per-node=2", "t.py"], CUDA_VISIBLE_DEVICES="5,7")
    assert "  LOCAL_RANK=0\n" in text
    assert "  CUDA_VISIBLE_DEVICES=5\n" in text
    assert "  CUDA_VISIBLE_DEVICES=7\n" in text


def test_the_number_of_threads_is_shown() -> None:
    """Without OMP_NUM_THREADS, several workers share the cores; for one worker it is not set."""
    options = parse(["--nproc-per-node=2", "t.py"], {})
    text = describe(options, interpreter="/opt/python", cwd="/", environ={})
    assert "threads     OMP_NUM_THREADS=" in text
    assert "\n  OMP_NUM_THREADS=" in text
    alone = describe(parse(["t.py"], {}), interpreter="/opt/python", cwd="/", environ={})
    assert "threads     OMP_NUM_THREADS is not set" in alone


def test_a_number_of_workers_that_was_counted_is_shown_with_its_flag() -> None:
    assert "(--nproc-per-node cpu) on this node" in dry_run(["--nproc-per-node=cpu", "t.py"])


def test_the_description_of_several_nodes() -> None:
    """Rendezvous and its settings; what the coordinator decides later is in angle brackets."""
    text = dry_run(
        ["--nproc-per-node", "2", "--nnodes", "2:4", "--rdzv-endpoint", "host0", "--max-restarts", "3", "train.py"]
    )
    assert text.startswith(
        "Dry run, nothing is started. The command would run 2 workers on this node, which is one of 2 to 4.\n"
    )
    assert (
        """
run id      none
role        default
nodes       2 to 4: nodes may join and leave; each change restarts the workers
            ranked in the order in which they join; a node that stays keeps its rank
rendezvous  at host0:29400, served by the node that can listen there
            when 2 nodes have joined, others may join for another 5 s (last_call_timeout)
            a node that joins later starts a new generation at once (scale_up)
            the job fails after 10 min with too few nodes (join_timeout)
            a node without a heartbeat for 5 s is lost (keep_alive_interval, keep_alive_max_attempt)
            secret: none, so any process that reaches the endpoint can join (token_file, TENAX_RDZV_TOKEN)
            TLS: off (ssl_cert, ssl_cert_key, ca_cert)
restarts    up to 3, counted once for all nodes: a failure restarts all workers (--max-restarts)
"""
        in text
    )
    assert (
        """
  RANK=<rank>
  GROUP_RANK=<rank of this node>
  ROLE_RANK=<rank>
  ROLE_NAME=default
  LOCAL_WORLD_SIZE=2
  WORLD_SIZE=<all workers>
  GROUP_WORLD_SIZE=<nodes>
  ROLE_WORLD_SIZE=<all workers>
  MASTER_ADDR=<address of node 0>
  MASTER_PORT=<a free port of node 0>
"""
        in text
    )
    assert "\nworker 1: ranks are assigned when all nodes have joined\n" in text


def test_each_rendezvous_setting_changes_the_description() -> None:
    def rendezvous(args: str, settings: str = "", **environ: str) -> str:
        conf = [f"--rdzv-conf={settings}"] if settings else []
        return dry_run([*args.split(), *conf, "t.py"], **environ)

    fixed = rendezvous("--nnodes 2 --node-rank 1 --rdzv-endpoint host0", "store_port=5000,last_call_timeout=9")
    assert "nodes       2: workers start when all have joined; a lost node must be replaced\n" in fixed
    assert "            this is node 1 (--node-rank)\n" in fixed
    assert "\n  GROUP_RANK=1\n" in fixed
    assert "\n  GROUP_WORLD_SIZE=2\n" in fixed
    assert "\n  MASTER_PORT=5000\n" in fixed
    assert "last_call" not in fixed
    assert "rendezvous  at [fe80::1]:29500, " in rendezvous("--nnodes 2 --node-rank 0 --master-addr fe80::1")
    elastic = "--nnodes 1:3 --rdzv-endpoint host0:7"
    terms = rendezvous(elastic, "last_call_timeout=0.5,join_timeout=60,keep_alive_interval=2,scale_up=restart")
    assert "when 1 node has joined, others may join for another 0.5 s" in terms
    assert "the job fails after 1 min with too few nodes" in terms
    assert "a node without a heartbeat for 10 s is lost" in terms
    assert "a node that joins later waits for the next restart (scale_up)\n" in terms
    assert "ranked by node_order, which is 'rack-3' here\n" in rendezvous(elastic, "node_order=rack-3")
    assert "ranked by node_order, which is '4' here\n" in rendezvous(elastic, TENAX_NODE_ORDER="4")
    third_party = rendezvous("--nnodes 2 --rdzv-backend mine --rdzv-endpoint there")
    assert "rendezvous  by the installed backend 'mine' at there\n" in third_party
    assert "USE_AGENT_STORE=<set by the rendezvous>\n" in third_party


def test_watchdog_health_checks_and_worker_sockets_are_shown_if_enabled(tmp_path) -> None:
    """A line for each, and the variables that workers get."""
    without = dry_run(["t.py"])
    for title in ("watchdog", "health", "queries"):
        assert f"\n{title} " not in without
    text = dry_run(
        ["--nproc-per-node=2", "t.py"],
        TORCHELASTIC_ENABLE_FILE_TIMER="1",
        TORCHELASTIC_HEALTH_CHECK_PORT="8080",
        TORCH_WORKER_SERVER_SOCKET=f"{tmp_path}/a job",
    )
    assert "\nwatchdog    kills a worker that does not leave a timer's scope in time" in text
    assert "\nhealth      served at port 8080 (TORCHELASTIC_HEALTH_CHECK_PORT)\n" in text
    command = shlex.join(["tenax", "ask", f"{tmp_path}/a job"])
    assert f"\nqueries     of workers that use worker_main: {command} (TORCH_WORKER_SERVER_SOCKET)\n" in text
    assert "  TORCHELASTIC_TIMER_FILE=<a pipe created for the run>\n" in text
    for rank in range(2):
        assert "  TORCH_WORKER_SERVER_SOCKET=" + shlex.quote(f"{tmp_path}/a job/rank{rank}") + "\n" in text
    named = dry_run(
        ["t.py"],
        TORCHELASTIC_ENABLE_FILE_TIMER="1",
        TORCHELASTIC_TIMER_FILE=f"{tmp_path}/pipe",
        TORCHELASTIC_HEALTH_CHECK_PORT="0",
    )
    assert "  TORCHELASTIC_TIMER_FILE=" + shlex.quote(f"{tmp_path}/pipe") + "\n" in named
    assert "\nhealth      served at a free port (TORCHELASTIC_HEALTH_CHECK_PORT)\n" in named
    several = dry_run(["--nnodes=2", "--rdzv-endpoint=host0", "t.py"], TORCH_WORKER_SERVER_SOCKET=f"{tmp_path}/job")
    assert f"  TORCH_WORKER_SERVER_SOCKET=<{tmp_path}/job/rank and its rank>\n" in several


def test_handlers_of_metrics_and_events_are_shown() -> None:
    """As written. No handler is created."""
    handlers = ["--metrics=prometheus:9464,jsonl:m.jsonl", "--event-log-handler=jsonl:/no/such/folder/e.jsonl"]
    text = dry_run([*handlers, "t.py"])
    assert "\nmetrics     prometheus:9464, jsonl:m.jsonl\nevents      jsonl:/no/such/folder/e.jsonl\n" in text
    assert "\nmetrics " not in dry_run(["t.py"])
    assert "\nevents " not in dry_run(["t.py"])


@pytest.mark.parametrize(("flag", "kind"), [("--metrics", "metric"), ("--event-log-handler", "event")])
def test_an_unknown_handler_is_rejected(flag: str, kind: str) -> None:
    with pytest.raises(UsageError, match=f"unknown {kind} handler 'zz'; known: console, "):
        dry_run([flag, "console,zz:1", "t.py"])


def test_a_secret_is_never_shown(tmp_path) -> None:
    """Only its source is."""
    secret = tmp_path / "secret"
    secret.write_text("geheim geheim geheim")
    secret.chmod(0o600)
    args = ["--nnodes=2", "--rdzv-endpoint=host0"]
    for text, source in (
        (dry_run([*args, "t.py"], PET_RDZV_CONF="token=geheim geheim geheim"), "set (token)"),
        (dry_run([*args, f"--rdzv-conf=token_file={secret}", "t.py"]), f"from {secret} (token_file)"),
        (dry_run([*args, "t.py"], TENAX_RDZV_TOKEN="geheim geheim geheim"), "set (TENAX_RDZV_TOKEN)"),
    ):
        assert f"            secret: {source}\n" in text
        assert "geheim" not in text
    text = dry_run(["--metrics=otel:https://me:geheim@collector:4318/v1/metrics,console", "t.py"])
    assert "\nmetrics     otel:https://***@collector:4318/v1/metrics, console\n" in text
