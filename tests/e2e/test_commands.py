"""The command line: the plan, usage errors, and the other commands."""

from __future__ import annotations

import os
import re
import sys

import pytest

from kit.jobs import TENAX, Runner

# --- the plan ---------------------------------------------------------------------------------------------------------

PLAN = """\
Dry run, nothing is started. The command would run 2 workers on this node.

script      train.py
interpreter {python} (the one that runs tenax)
preload     what the script imports, once per node; workers are forked (--preload)
folder      {home}
run id      job7
role        actor
restarts    up to 3: a failure restarts all workers (--max-restarts)
stopping    SIGTERM, SIGINT, SIGHUP, SIGQUIT stop the job and are forwarded to the workers
            SIGTERM, 5 s grace period, SIGKILL (--shutdown-timeout)
logs        logs/job7_<random>/attempt_<restarts>/<local rank>/
            to files only: none (--redirects)
            to files and the terminal: stdout of local rank 0, stdout and stderr of local rank 1 (--tee)
hangs       after 5 min without progress, report the stacks (--on-hang)
threads     OMP_NUM_THREADS=4, inherited
placement   workers may run on any CPU

environment of every worker, added to what is inherited:
  GROUP_RANK=0
  ROLE_NAME=actor
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
  command     {python} -u train.py --lr 0.1 'a b' cuda:0
  RANK=0
  LOCAL_RANK=0
  ROLE_RANK=0
  TORCHELASTIC_ERROR_FILE=<log folder>/attempt_0/0/error.json

worker 1: global rank 1 of 2
  command     {python} -u train.py --lr 0.1 'a b' cuda:1
  RANK=1
  LOCAL_RANK=1
  ROLE_RANK=1
  TORCHELASTIC_ERROR_FILE=<log folder>/attempt_0/1/error.json
"""


def test_dry_run_prints_the_plan_and_starts_nothing(runner: Runner) -> None:
    script = runner.script("raise SystemExit('it was started')")
    done = runner.run(
        *("--dry-run", "--nproc-per-node", "2", "--max-restarts", "3", "--shutdown-timeout", "5", "--rdzv-id", "job7"),
        *(
            "--role",
            "actor",
            "--tee",
            "0:1,1:3",
            "--log-dir",
            "logs",
            script,
            "--lr",
            "0.1",
            "a b",
            "cuda:${local_rank}",
        ),
        program=[sys.executable, "-m", "tenax", "run"],
        env={"OMP_NUM_THREADS": "4"},
    )
    assert (done.code, done.err) == (0, ""), done
    assert done.out == PLAN.format(python=sys.executable, home=runner.home)
    assert not (runner.home / "logs").exists()
    assert os.listdir(runner.home / "tmp") == []


# --- usage errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node"),
        (["--nnodes", "2", "train.py"], "--nnodes 2"),
        (["--no-python", "-m", "train"], "--no-python"),
        (["--standalone", "--rdzv-backend", "etcd", "train.py"], "--standalone"),
        (["--node-rank", "1", "train.py"], "--node-rank 1"),
        (["--rdzv-endpoint", "host:1", "--master-port", "2", "train.py"], "--master-port 2"),
        (["--tee", "5:3", "--nproc-per-node", "2", "train.py"], "local rank 5"),
        (["--local-ranks-filter", "7", "train.py"], "local rank 7"),
        (["--max-restarts", "-1", "train.py"], "--max-restarts"),
        (["--shutdown-timeout", "soon", "train.py"], "--shutdown-timeout"),
        (["--signals-to-handle", "SIGFOO", "train.py"], "SIGFOO"),
        (["--signals-to-handle", "SIGKILL", "train.py"], "SIGKILL"),
        (["--log-dir", "train.py", "train.py"], "--log-dir train.py"),
        (["--report", "no/such/folder/r.json", "train.py"], "no/such/folder"),
        (["--nproc_per_nod", "2", "train.py"], "--nproc-per-node"),
        (["--master-port", "99999", "train.py"], "--master-port"),
        (["tarin.py"], "did you mean 'train.py'"),
        (["no/such/folder/train.py"], "no/such/folder"),
        (["--no-python", "no-such-program"], "no-such-program"),
        ([], "no script"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_invalid_command_line_is_rejected_with_one_message(
    runner: Runner, arguments: list[str], expected: str
) -> None:
    """Exit code 2, a message that names the mistake, a pointer to --help, and no worker is started."""
    runner.script("from worker_kit import note; note('started')")
    done = runner.run(*arguments)
    assert (done.code, done.out) == (2, "")
    message, try_this = done.err.splitlines()
    assert message.startswith("tenax run: ")
    assert expected in message
    assert try_this == "try: tenax run --help"
    assert not runner.noted("started")
    assert os.listdir(runner.home / "tmp") == []


def test_a_removed_working_directory_is_reported(runner: Runner) -> None:
    """Without a traceback."""
    command = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    done = runner.run(str(runner.home / runner.script("")), program=["sh", "-c", command, "sh", *TENAX, "run"])
    assert done.code == 2
    assert done.err.startswith("tenax run: the current folder was removed"), done


def test_flags_without_effect_are_noted(runner: Runner) -> None:
    done = runner.run("--monitor-interval", "1", runner.script("print('ran')"), "--max-restarts=3")
    assert (done.code, done.out) == (0, "ran\n")
    notes = [line for line in done.err.splitlines() if line.startswith("tenax run: note: ")]
    assert len(notes) == 2
    assert "--monitor-interval 1 has no effect" in notes[0]
    assert "'--max-restarts=3' is after the script" in notes[1]


# --- unwritable consoles ----------------------------------------------------------------------------------------------


def test_an_unwritable_console_does_not_change_the_exit_code(runner: Runner) -> None:
    """Messages and pages on a full or closed device cause no traceback."""
    runner.script("raise SystemExit(3)")
    with open("/dev/full", "wb") as full:
        assert runner.run("--monitor-interval", "1", "train.py", stderr=full).code == 3
        assert runner.run("--no-such-flag", "train.py", stderr=full).code == 2
        done = runner.run("--dry-run", "train.py", stdout=full)
    assert (done.code, done.err) == (1, "tenax: could not write to stdout: No space left on device\n")
    for streams in (">&-", "2>&-"):
        done = runner.run("--dry-run", "train.py", program=["sh", "-c", f'exec "$@" {streams}', "sh", *TENAX, "run"])
        assert (done.code, done.err) == (0, "")


# --- the other commands -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train.py"], "did you mean: tenax run train.py"),
        (["--nproc-per-node", "2", "train.py"], "did you mean: tenax run --nproc-per-node 2 train.py"),
        (["runn"], "did you mean 'tenax run'"),
        (["launch"], "unknown command 'launch'"),
    ],
)
def test_an_unknown_command_is_rejected_with_a_suggestion(runner: Runner, arguments: list[str], expected: str) -> None:
    runner.script("")
    done = runner.run(*arguments, program=TENAX)
    assert (done.code, done.out) == (2, "")
    assert expected in done.err
    assert "Traceback" not in done.err


def test_help_and_version_print_to_stdout(runner: Runner) -> None:
    """Every flag is on the help page."""
    for arguments in ([], ["help"], ["--help"], ["help", "run"], ["run", "-h"], ["help", "replay"], ["version"]):
        done = runner.run(*arguments, program=TENAX)
        assert (done.code, done.err) == (0, ""), arguments
        assert done.out
    page = runner.run("--help").out
    for flag in (
        "--nproc-per-node",
        "--max-restarts",
        "--tee",
        "--redirects",
        "--report",
        "--dry-run",
        "--numa-binding",
    ):
        assert flag in page


def test_replay_prints_what_happened_and_checks_every_decision(runner: Runner) -> None:
    """It takes the journal or its folder."""
    script = runner.script("from worker_kit import ATTEMPT; raise SystemExit(ATTEMPT == 0)")
    assert runner.run("--max-restarts", "1", "--log-dir", "logs", "--rdzv-id", "job7", script).code == 0
    run = runner.run_dir()
    stories = [runner.run(str(path), program=[*TENAX, "replay"]) for path in (run, run / "journal.jsonl")]
    assert [story.code for story in stories] == [0, 0]
    assert stories[0].out == stories[1].out
    story = stories[0].out
    order = [
        "run job7 of train.py",
        "generation 1: starting",
        "exited with code 1",
        "restart 1 of 1",
        "the run succeeded",
    ]
    assert [story.index(text) for text in order] == sorted(story.index(text) for text in order)
    assert "every decision follows from the recorded events" in story


def test_replay_reads_the_journal_of_a_killed_agent(runner: Runner) -> None:
    """And reports that it has no end."""
    job = runner.start("--log-dir", "logs", runner.script("from worker_kit import *; ready(); stay()"))
    runner.pids(1)
    job.process.kill()
    job.wait()
    story = runner.run(str(runner.run_dir()), program=[*TENAX, "replay"])
    assert story.code == 0
    assert "the agent was killed, or the run has not ended" in story.out


@pytest.mark.parametrize("content", [b"", b"hello\n", b"{}\n", b"\x00\xff" * 100, b'{"line":"header"}\n'])
def test_replay_rejects_a_file_that_is_not_a_journal(runner: Runner, content: bytes) -> None:
    (runner.home / "file").write_bytes(content)
    for path in ("file", "no-such-file", "."):
        done = runner.run(path, program=[*TENAX, "replay"])
        assert (done.code, done.out) == (2, "")
        assert re.match("tenax replay: .*\n", done.err)
        assert "Traceback" not in done.err


def test_replay_names_a_decision_that_does_not_follow(runner: Runner) -> None:
    """With exit code 1."""
    assert runner.run("--log-dir", "logs", runner.script("")).code == 0
    journal = runner.run_dir() / "journal.jsonl"
    text = journal.read_text()
    assert '"exit_code":0' in text
    journal.write_text(text.replace('"exit_code":0', '"exit_code":1', 1))
    done = runner.run(str(journal), program=[*TENAX, "replay"])
    assert done.code == 1
    assert "do not follow from the recorded events" in done.out
