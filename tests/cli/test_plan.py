"""--dry-run: the whole plan in words, and nothing done."""

from __future__ import annotations

from tenax.cli.arguments import parse
from tenax.cli.plan import describe


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
  TORCHELASTIC_USE_AGENT_STORE=False
  TORCH_NCCL_ASYNC_ERROR_HANDLING=1
  TENAX_GENERATION=1
  PYTHONFAULTHANDLER=1

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
