"""--dry-run: the whole plan in words, and nothing done."""

from __future__ import annotations

import shlex

import pytest

from tenax.cli.arguments import parse
from tenax.cli.dry_run import describe
from tenax.cli.flags import UsageError


def plan(words: list[str], **environ: str) -> str:
    environ = {"OMP_NUM_THREADS": "4", **environ}
    return describe(parse(words, environ), interpreter="/opt/python", cwd="/home/me", environ=environ)


def test_the_whole_page() -> None:
    """What a person reads before a long job: command, environment, ranks, logs, restarts, stopping."""
    words = "--nproc-per-node 2 --max-restarts 3 --tee 3 --log-dir logs --rdzv-id job7 train.py --name"
    assert (
        plan([*words.split(), "a b"])
        == """\
A dry run: nothing is started. The command would run 2 workers on this machine.

script      train.py
interpreter /opt/python (the one that runs tenax)
preload     what the script imports, once; workers are forked from there (--preload)
folder      /home/me
run id      job7
role        default
restarts    up to 3: after a failure all workers are stopped and started again
stopping    SIGTERM, SIGINT, SIGHUP, SIGQUIT stop the job and are passed on to the workers
            what has not ended 30 s after it was asked to is killed
logs        logs/job7_<random>/attempt_<restarts>/<local rank>/
            to files only: none (--redirects)
            to files and the terminal: stdout and stderr (--tee)
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


def test_what_each_flag_changes() -> None:
    """Every choice shows in the plan, in words."""
    assert "MASTER_ADDR=head\n  MASTER_PORT=29501\n" in plan(["--master-addr=head", "--master-port=29501", "t.py"])
    assert "MASTER_ADDR=10.0.0.1\n" in plan(["--local-addr=10.0.0.1", "t.py"])
    assert "script      module pkg.train\n" in plan(["-m", "pkg.train"])
    assert "command     /opt/python -u -m pkg.train --x\n" in plan(["-m", "pkg.train", "--x"])
    program = plan(["--no-python", "./run it", "--x"])
    assert "script      program ./run it\n" in program
    assert "interpreter" not in program
    assert "command     './run it' --x\n" in program
    assert "interpreter /py/other (PYTHON_EXEC)\n" in plan(["t.py"], PYTHON_EXEC="/py/other")
    assert "run by multiprocessing, fork" in plan(["--run-path", "--start-method=fork", "t.py"])
    assert "none: the first failure ends the job" in plan(["t.py"])
    assert "what has not ended 5 s after" in plan(["--shutdown-timeout=5", "t.py"])
    assert "stopping    SIGUSR1 stop" in plan(["--signals-to-handle=SIGUSR1", "t.py"])
    noticing = plan(["--notice-signals=SIGUSR1,SIGUSR2", "--notice-seconds=90", "t.py"])
    assert "            SIGUSR1, SIGUSR2 tell the workers that this machine will be taken in 90 s\n" in noticing
    assert "machine will be taken\n" in plan(["--notice-signals=SIGUSR1", "t.py"])
    fatal = plan(["--max-restarts=3", "--fatal-exit-codes=3,64", "--fatal-errors=ConfigError", "t.py"])
    assert "            none after exit code 3 or exit code 64 or ConfigError (--fatal-exit-codes, --f" in fatal
    policy = plan(["--max-restarts=3", "--restart-policy=tenax.policy:BudgetPolicy", "t.py"])
    assert "restarts    decided by tenax.policy:BudgetPolicy, given --max-restarts 3 (--restart-policy)\n" in policy
    with pytest.raises(UsageError, match="there is no restart policy 'mine'; expected MODULE:CLASS, or a known name: "):
        plan(["--restart-policy=mine", "t.py"])
    assert "USE_AGENT_STORE=False\n" in plan(["--rdzv-conf=use_agent_store=no", "t.py"])
    assert "USE_AGENT_STORE=False\n" in plan(["t.py"], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert "logs        <a new temporary folder>/<run id>_<random>/" in plan(["t.py"])
    nothing = plan(["--log-dir=/dev/null", "t.py"])
    assert "nothing is kept" in nothing
    assert "TORCHELASTIC_ERROR_FILE" not in nothing
    assert "to files only: stdout of local rank 0, stdout and stderr of local rank 10 (--r" in plan(
        ["--nproc-per-node=11", "-r0:1,10:3,5:0", "t.py"]
    )
    assert "shown on the terminal: local ranks 0, 2 only\n" in plan(
        ["--nproc-per-node=3", "--local-ranks-filter=2,0", "t.py"]
    )
    assert "filtered_stderr.log: lines with 'loss' or 'a,b'\n" in plan(["--duplicate-stderr-filters=loss,a,,b", "t.py"])
    assert "a failure report goes to r.json\n" in plan(["--report=r.json", "t.py"])
    assert "in front of a worker's line: '[${rank}] '\n" in plan(
        ["t.py"], TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[${rank}] "
    )


def test_virtual_local_rank_shows_each_workers_device() -> None:
    """Each worker is number 0 on a device of its own."""
    text = plan(["--virtual-local-rank", "--nproc-per-node=2", "t.py"], CUDA_VISIBLE_DEVICES="5,7")
    assert "  LOCAL_RANK=0\n" in text
    assert "  CUDA_VISIBLE_DEVICES=5\n" in text
    assert "  CUDA_VISIBLE_DEVICES=7\n" in text


def test_threads_are_decided_and_said() -> None:
    """Without OMP_NUM_THREADS, several workers share the cores and the plan says how; one worker is left alone."""
    options = parse(["--nproc-per-node=2", "t.py"], {})
    text = describe(options, interpreter="/opt/python", cwd="/", environ={})
    assert "threads     OMP_NUM_THREADS=" in text
    assert "\n  OMP_NUM_THREADS=" in text
    alone = describe(parse(["t.py"], {}), interpreter="/opt/python", cwd="/", environ={})
    assert "threads     OMP_NUM_THREADS is left alone" in alone


def test_a_count_that_was_asked_for_in_words_is_explained() -> None:
    """'cpu' is a number on this machine, and the plan says which."""
    assert "(--nproc-per-node cpu) on this machine" in plan(["--nproc-per-node=cpu", "t.py"])


def test_the_page_of_several_nodes() -> None:
    """Where nodes meet and on which terms; what only their coordinator will know stands in angle brackets."""
    text = plan(
        ["--nproc-per-node", "2", "--nnodes", "2:4", "--rdzv-endpoint", "host0", "--max-restarts", "3", "train.py"]
    )
    assert text.startswith(
        "A dry run: nothing is started. The command would run 2 workers on this machine, one of 2 to 4 "
    )
    assert (
        """
run id      none
role        default
nodes       2 to 4: they may come and go; workers are started again whenever that changes who is in
            numbered as they come; a node that stays keeps its number
meeting     at host0:29400, served by whichever node can listen there
            when 2 are there, others have 5 s more (last_call_timeout)
            a node that comes later ends the running generation at once (scale_up)
            too few nodes for 600 s end the job (join_timeout)
            a node silent for 5 s is lost (keep_alive_interval, keep_alive_max_attempt)
            secret: none, so any process that reaches that place can join (token_file, TENAX_RDZV_TOKEN)
            TLS: no (ssl_cert, ssl_cert_key, ca_cert)
restarts    up to 3, counted once for all nodes: after a failure all workers are stopped and started again
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
    assert "\nworker 1: its ranks are known when all are there\n" in text


def test_what_each_setting_of_the_meeting_changes() -> None:
    """The plan says what a run would do, from the same settings."""

    def meeting(words: str, settings: str = "", **environ: str) -> str:
        conf = [f"--rdzv-conf={settings}"] if settings else []
        return plan([*words.split(), *conf, "t.py"], **environ)

    fixed = meeting("--nnodes 2 --node-rank 1 --rdzv-endpoint host0", "store_port=5000,last_call_timeout=9")
    assert "nodes       2: workers run when all are there, and wait for a replacement when one is lost\n" in fixed
    assert "            this is node 1 (--node-rank)\n" in fixed
    assert "\n  GROUP_RANK=1\n" in fixed
    assert "\n  GROUP_WORLD_SIZE=2\n" in fixed
    assert "\n  MASTER_PORT=5000\n" in fixed
    assert "last_call" not in fixed
    assert "meeting     at [fe80::1]:29500, " in meeting("--nnodes 2 --node-rank 0 --master-addr fe80::1")
    elastic = "--nnodes 1:3 --rdzv-endpoint host0:7"
    terms = meeting(elastic, "last_call_timeout=0.5,join_timeout=60,keep_alive_interval=2,scale_up=restart")
    assert "when 1 is there, others have 0.5 s more" in terms
    assert "too few nodes for 60 s end the job" in terms
    assert "a node silent for 10 s is lost" in terms
    assert "a node that comes later waits for the next restart (scale_up)\n" in terms
    assert "of their node_order; this one's is 'rack-3'\n" in meeting(elastic, "node_order=rack-3")
    assert "of their node_order; this one's is '4'\n" in meeting(elastic, TENAX_NODE_ORDER="4")
    strange = meeting("--nnodes 2 --rdzv-backend mine --rdzv-endpoint there")
    assert "meeting     decided by the installed rendezvous 'mine' at there\n" in strange
    assert "USE_AGENT_STORE=<as the rendezvous says>\n" in strange


def test_what_watches_the_run_is_shown_when_it_is_on(tmp_path) -> None:
    """The watchdog, the health checks and the workers' sockets: a line each, and what workers get of them."""
    quiet = plan(["t.py"])
    for title in ("watchdog", "health", "asking"):
        assert f"\n{title} " not in quiet
    text = plan(
        ["--nproc-per-node=2", "t.py"],
        TORCHELASTIC_ENABLE_FILE_TIMER="1",
        TORCHELASTIC_HEALTH_CHECK_PORT="8080",
        TORCH_WORKER_SERVER_SOCKET=f"{tmp_path}/a job",
    )
    assert "\nwatchdog    on: a worker that does not leave a timer's scope in time is ended" in text
    assert "\nhealth      answered at port 8080 (TORCHELASTIC_HEALTH_CHECK_PORT)\n" in text
    command = shlex.join(["tenax", "ask", f"{tmp_path}/a job"])
    assert f"\nasking      workers that use worker_main: {command} (TORCH_WORKER_SERVER_SOCKET)\n" in text
    assert "  TORCHELASTIC_TIMER_FILE=<a pipe that is made for the run>\n" in text
    for rank in range(2):
        assert "  TORCH_WORKER_SERVER_SOCKET=" + shlex.quote(f"{tmp_path}/a job/rank{rank}") + "\n" in text
    named = plan(
        ["t.py"],
        TORCHELASTIC_ENABLE_FILE_TIMER="1",
        TORCHELASTIC_TIMER_FILE=f"{tmp_path}/pipe",
        TORCHELASTIC_HEALTH_CHECK_PORT="0",
    )
    assert "  TORCHELASTIC_TIMER_FILE=" + shlex.quote(f"{tmp_path}/pipe") + "\n" in named
    assert "\nhealth      answered at a free port (TORCHELASTIC_HEALTH_CHECK_PORT)\n" in named
    several = plan(["--nnodes=2", "--rdzv-endpoint=host0", "t.py"], TORCH_WORKER_SERVER_SOCKET=f"{tmp_path}/job")
    assert f"  TORCH_WORKER_SERVER_SOCKET=<{tmp_path}/job/rank and its rank>\n" in several


def test_where_metrics_and_events_go() -> None:
    """As written, when something is; nothing is made or opened for it."""
    handlers = ["--metrics=prometheus:9464,jsonl:m.jsonl", "--event-log-handler=jsonl:/no/such/folder/e.jsonl"]
    text = plan([*handlers, "t.py"])
    assert "\nmetrics     prometheus:9464, jsonl:m.jsonl\nevents      jsonl:/no/such/folder/e.jsonl\n" in text
    assert "\nmetrics " not in plan(["t.py"])
    assert "\nevents " not in plan(["t.py"])


@pytest.mark.parametrize(("flag", "kind"), [("--metrics", "metric"), ("--event-log-handler", "event")])
def test_a_handler_that_nobody_knows_is_refused(flag: str, kind: str) -> None:
    """As a real run would."""
    with pytest.raises(UsageError, match=f"there is no {kind} handler 'zz'; known are console, "):
        plan([flag, "console,zz:1", "t.py"])


def test_a_secret_is_never_shown(tmp_path) -> None:
    """The plan says where it comes from, and not what it is."""
    secret = tmp_path / "secret"
    secret.write_text("geheim geheim geheim")
    secret.chmod(0o600)
    words = ["--nnodes=2", "--rdzv-endpoint=host0"]
    for text, source in (
        (plan([*words, "t.py"], PET_RDZV_CONF="token=geheim geheim geheim"), "given (token)"),
        (plan([*words, f"--rdzv-conf=token_file={secret}", "t.py"]), f"the content of {secret} (token_file)"),
        (plan([*words, "t.py"], TENAX_RDZV_TOKEN="geheim geheim geheim"), "given (TENAX_RDZV_TOKEN)"),
    ):
        assert f"            secret: {source}\n" in text
        assert "geheim" not in text
    text = plan(["--metrics=otel:https://me:geheim@collector:4318/v1/metrics,console", "t.py"])
    assert "\nmetrics     otel:https://***@collector:4318/v1/metrics, console\n" in text
