"""The watchdog in real runs, with scripts that hang in different ways."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kit.jobs import Done, Runner
from kit.processes import EventCollector, Pipe, is_alive, launch, leaving_nothing, needs_torch, on_linux, python, until
from tenax._core import events
from tenax._node.journal import read_journal
from tenax._processes.keeper import KeeperProcess
from tenax._processes.stacks import stacks_signal
from tenax.testing.replay import replay

pytestmark = [on_linux, pytest.mark.process]

ON = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
# The number is what was written, less what the request took to arrive on a busy machine.
LATE = re.compile(r"did not leave the scope 'the step' (within 0\.\d+ s|in time)")

# What scripts begin with.
HEAD = """
import os, signal, sys, threading, time
from worker_kit import RANK, ATTEMPT, note, stay, ignore, ready
from tenax import timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
def hang_in_here(how):
    with timer.expires(after=0.3, scope="the step"):
        how()
"""


def script(runner: Runner, body: str) -> str:
    return runner.script(HEAD + body)


def stacks_of(done: Done) -> str:
    """Return the part of the report with the stacks."""
    heading = "  Stacks of its threads when it was late, innermost call first:\n"
    assert heading in done.report, done
    return done.report.partition(heading)[2].partition("\nOutcome")[0]


HANGS = {
    "in a sleep": "hang_in_here(lambda: time.sleep(600))",
    "in C code that holds the interpreter lock": "hang_in_here(lambda: sum(range(10**15)))",
    "in a loop": "hang_in_here(lambda: any(False for _ in iter(int, 1)))",
}


@pytest.mark.parametrize("body", HANGS.values(), ids=HANGS)
def test_a_worker_that_hangs_is_killed_and_the_report_shows_where(runner: Runner, body: str) -> None:
    """With its scope and stacks; the exit code is the signal's."""
    done = runner.run("--log-dir=logs", "--report=report.json", script(runner, body), env=ON)
    assert done.code == 128 + signal.SIGKILL, done
    assert LATE.search(done.report.splitlines()[1])
    assert re.fullmatch(rf"killed by SIGKILL: {LATE.pattern}", done.field("ended"))
    assert "in hang_in_here" in stacks_of(done)
    cause = json.loads((runner.home / "report.json").read_text())["first_cause"]
    assert "in hang_in_here" in cause["stacks"]
    assert LATE.fullmatch(cause["reason"])
    assert (cause["exit_code"], cause["signal"]) == (-9, "SIGKILL")


def test_a_thread_that_hangs_is_shown_with_all_others(runner: Runner) -> None:
    body = """
thread = threading.Thread(target=hang_in_here, args=(lambda: time.sleep(600),))
thread.start()
def wait_for_it():
    thread.join()
wait_for_it()
"""
    stacks = stacks_of(runner.run(script(runner, body), env=ON))
    assert "in hang_in_here" in stacks
    assert "in wait_for_it" in stacks


def test_the_main_thread_is_shown_however_many_threads_there_are(runner: Runner) -> None:
    """faulthandler shows only the newest hundred threads, and the main thread is the oldest."""
    body = """
for _ in range(150):
    threading.Thread(target=stay, daemon=True).start()
hang_in_here(stay)
"""
    done = runner.run("--log-dir=logs", "--report=report.json", script(runner, body), env=ON)
    assert done.code == 128 + signal.SIGKILL, done
    stacks = json.loads((runner.home / "report.json").read_text())["first_cause"]["stacks"]
    assert "in hang_in_here" in stacks


@pytest.mark.parametrize("culprit", ["enters later", "does not enter"])
def test_the_report_shows_where_the_others_were(runner: Runner, culprit: str) -> None:
    """The first late worker may only wait for another one."""
    body = f"""
def all_reduce():
    stay()
def load_data():
    stay()
ready()
if RANK != 1:
    hang_in_here(all_reduce)
elif {culprit == "enters later"}:
    time.sleep(0.1)
    hang_in_here(load_data)
load_data()
"""
    done = runner.run("--nproc-per-node=3", "--log-dir=logs", "--report=report.json", script(runner, body), env=ON)
    assert done.code == 128 + signal.SIGKILL, done
    report = json.loads((runner.home / "report.json").read_text())
    shown = {each["rank"]: each["stacks"] for each in report["other_failures"] + report["stopped"]}
    cause = report["first_cause"]
    assert "in load_data" in (shown | {cause["rank"]: cause["stacks"]})[1]
    assert "in load_data" in done.report
    assert "in all_reduce" in done.report
    if culprit == "does not enter":
        assert [each["rank"] for each in report["stopped"]] == [1]
        assert "  rank 1, not late:\n" in done.report


def test_the_run_continues_after_a_restart(runner: Runner) -> None:
    """All workers are restarted as after any failure."""
    body = """
note("pid", os.getpid())
if ATTEMPT == 0:
    ready()
    if RANK == 1:
        hang_in_here(stay)
    stay()
with timer.expires(after=600):
    print("rank", RANK, "is done")
"""
    done = runner.run("--nproc-per-node=3", "--max-restarts=1", "--log-dir=logs", script(runner, body), env=ON)
    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == [f"rank {rank} is done" for rank in range(3)]
    pid = runner.note("pid", 1)
    assert any(re.fullmatch(rf"rank 1 \(pid {pid}\) {LATE.pattern}", line) for line in done.messages)
    assert "stopping rank 1 (SIGKILL)" in done.messages
    assert "generation 2 (restart 1 of 1): starting 3 workers, ranks 0 to 2 of 3" in done.messages
    assert not any("rank 0" in line for line in done.messages), "siblings end as asked"


def test_the_journal_replays(runner: Runner) -> None:
    """It contains the event, the decision, and all fields of the recorded events."""
    runner.run("--log-dir=logs", "--max-restarts=1", script(runner, "ATTEMPT or hang_in_here(stay)"), env=ON)
    header, steps, footer = read_journal(str(runner.run_dir() / "journal.jsonl"))
    replayed = replay(header, steps, footer)
    assert replayed.differences == []
    assert replayed.is_complete
    (late,) = [step for step in steps if type(step.event).__name__ == "ScopeExpired"]
    assert [type(command).__name__ for command in late.commands] == ["DumpStacks"]
    assert (late.event.scope, late.event.signal) == ("the step", 9)
    assert late.event.expiration_time == pytest.approx(header.wall_time + late.at - header.at, abs=5)
    (ended,) = [command for step in steps for command in step.commands if type(command).__name__ == "EndWorker"]
    assert (ended.pid, ended.signal) == (late.event.pid, 9)


def test_a_worker_that_ignores_its_signal_is_killed_after_the_grace_period(runner: Runner) -> None:
    body = """
ignore("SIGTERM")
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"], signal.SIGTERM))
hang_in_here(stay)
"""
    done = runner.run("--shutdown-timeout=1", script(runner, body), env=ON)
    assert done.code == 128 + signal.SIGKILL, done
    assert "stopping rank 0 (SIGTERM)" in done.messages
    assert "stopping rank 0 because the grace period is over (SIGKILL)" in done.messages


def test_a_worker_that_leaves_its_scopes_is_left_alone(runner: Runner) -> None:
    """Thousands of scopes, nested and in threads; no file is left."""
    body = """
def work():
    for _ in range(300):
        with timer.expires(after=30), timer.expires(after=60, scope=f"outer {threading.get_ident()}"):
            pass
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    done = runner.run("--nproc-per-node=2", script(runner, body), env=ON)
    assert done.code == 0, done
    assert not list((runner.home / "tmp").glob("tenax-watchdog-*"))


@needs_torch
def test_torchelastics_client_works_with_the_agent(runner: Runner) -> None:
    """In a script that does not import tenax."""
    body = """
import os, time
import torch.distributed.elastic.timer as timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=60):
    pass
with timer.expires(after=0.3, scope="the step"):
    time.sleep(600)
"""
    done = runner.run(runner.script(body), env=ON, timeout_s=100)
    assert done.code == 128 + signal.SIGKILL, done
    assert LATE.search(done.report)
    assert 'train.py", line 8 in <module>' in stacks_of(done)


# --- which requests are accepted --------------------------------------------------------------------------------------


def test_garbage_and_a_flood_do_no_harm(runner: Runner) -> None:
    """One worker writes megabytes of invalid data; the scopes of the other are still watched."""
    body = """
if RANK == 0:
    pipe = os.open(os.environ["TORCHELASTIC_TIMER_FILE"], os.O_WRONLY)
    for chunk in (b"\\n" * 4096, b"{" * 4096, b'{"pid": 1}\\n' * 300, os.urandom(4096)) * 200:
        os.write(pipe, chunk)
    os.write(pipe, b"\\n")
    note("flooded")
    stay()
for _ in range(100):
    with timer.expires(after=60):
        pass
while not os.path.exists(os.path.join(os.environ["E2E_NOTES"], "flooded.0.0")):
    with timer.expires(after=60):
        pass
hang_in_here(stay)
"""
    done = runner.run("--nproc-per-node=2", script(runner, body), env=ON)
    assert done.code == 128 + signal.SIGKILL, done
    assert "rank 1" in done.report.splitlines()[1]
    assert sum("invalid request" in line for line in done.messages) == 1


def test_a_request_for_a_foreign_process_kills_no_process(runner: Runner) -> None:
    """Neither a foreign process, nor the agent, nor a child of the worker; a warning is printed."""
    foreign = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    body = f"""
import json, subprocess
child = subprocess.Popen(["sleep", "600"])
pipe = os.open(os.environ["TORCHELASTIC_TIMER_FILE"], os.O_WRONLY)
for pid in ({foreign.pid}, child.pid, os.getppid(), {os.getpid()}):
    fields = {{"version": 1, "pid": pid, "scope_id": "x", "expiration_time": 1.0, "signal": 9}}
    os.write(pipe, json.dumps(fields).encode() + b"\\n")
with timer.expires(after=60):
    pass
print(child.poll())
"""
    try:
        done = runner.run(script(runner, body), env=ON)
        assert done.code == 0, done
        assert done.out == "None\n"
        assert is_alive(foreign.pid)
        assert sum("it is not a worker of this node" in line for line in done.messages) == 1
    finally:
        foreign.kill()
        foreign.wait()


def test_a_program_without_python_is_killed_without_stacks(runner: Runner) -> None:
    """The dump signal would kill it. The report has the reason for the missing stacks."""
    runner.script(
        """\
        #!/bin/sh
        late='"scope_id": "shell", "expiration_time": 1.0, "signal": 15'
        echo "{\\"version\\": 1, \\"pid\\": $$, $late}" > "$TORCHELASTIC_TIMER_FILE"
        sleep 600
        """,
        "work.sh",
    )
    (runner.home / "work.sh").chmod(0o755)
    done = runner.run("--no-python", "./work.sh", env=ON)
    assert done.code == 128 + signal.SIGTERM, done
    assert "the scope 'shell' in time (no stacks: it is not a Python program" in done.field("ended")


# --- where ------------------------------------------------------------------------------------------------------------


def test_without_a_log_folder_the_stacks_are_on_stderr(runner: Runner) -> None:
    done = runner.run("--log-dir=/dev/null", script(runner, "hang_in_here(stay)"), env=ON)
    assert done.code == 128 + signal.SIGKILL, done
    assert "in hang_in_here" in done.err.partition("=" * 80)[0]
    assert "in hang_in_here" in done.report


def test_child_processes_inherit_nothing_of_the_stack_dumps(runner: Runner) -> None:
    """No variable, no descriptor, no signal handler."""
    body = """
import subprocess
note("own", open("/proc/self/status").read())
code = "import os; print(os.environ.get('TENAX_STACKS_SIGNAL'), len(os.listdir('/proc/self/fd')), flush=True); "
code += "print(open('/proc/self/status').read())"
note("child", subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, close_fds=False).stdout)
"""
    done = runner.run("--log-dir=logs", script(runner, body), env=ON)
    assert done.code == 0, done
    assert catches(runner.note("own"))
    child = runner.note("child")
    # Three streams, the socket to the agent (a wrapper passes it on), and the folder that is being listed.
    assert child.splitlines()[0] == "None 5"
    assert not catches(child)


def catches(status: str) -> bool:
    (caught,) = [line for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught.split()[1], 16) >> (stacks_signal() - 1) & 1)


def test_the_pipe_can_be_at_a_given_path(runner: Runner) -> None:
    """Only its owner may use it. A leftover pipe is replaced, and the pipe is removed at the end."""
    path = runner.home / "my timers"
    os.mkfifo(path, 0o666)
    body = """
note("path", os.environ["TORCHELASTIC_TIMER_FILE"])
note("mode", os.stat(os.environ["TORCHELASTIC_TIMER_FILE"]).st_mode)
ATTEMPT or hang_in_here(stay)
"""
    done = runner.run("--max-restarts=1", script(runner, body), env={**ON, "TORCHELASTIC_TIMER_FILE": str(path)})
    assert done.code == 0, done
    assert runner.note("path") == str(path)
    assert stat.S_IMODE(int(runner.note("mode"))) == 0o600
    assert not path.exists()


def test_by_default_the_pipe_is_in_a_private_folder(runner: Runner) -> None:
    """With a unique name."""
    body = """
path = os.environ["TORCHELASTIC_TIMER_FILE"]
note("path", path)
note("modes", f"{os.stat(path).st_mode:o} {os.stat(os.path.dirname(path)).st_mode:o}")
"""
    paths = set()
    for _ in range(2):
        assert runner.run(script(runner, body), env=ON).code == 0
        paths.add(runner.note("path"))
        assert runner.note("modes") == "10600 40700"
    assert len(paths) == 2
    assert not any(os.path.exists(os.path.dirname(path)) for path in paths)


@pytest.mark.parametrize("place", ["a file", "no folder", "in use"])
def test_an_unusable_pipe_is_rejected_before_the_run_starts(runner: Runner, place: str) -> None:
    """Two agents on one pipe would each read half of the requests."""
    path = runner.home / ("missing/timers" if place == "no folder" else "timers")
    reader = -1
    if place == "a file":
        path.write_text("precious")
    elif place == "in use":
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    done = runner.run(script(runner, ""), env={**ON, "TORCHELASTIC_TIMER_FILE": str(path)})
    assert done.code == 2, done
    assert f"TORCHELASTIC_TIMER_FILE is {str(path)!r}" in done.err
    assert "Traceback" not in done.err
    if place == "a file":
        assert path.read_text() == "precious"
    if reader >= 0:
        os.close(reader)


def test_a_run_inside_a_worker_has_its_own_pipe(runner: Runner) -> None:
    """It inherits both variables, and does not use the pipe of its parent agent."""
    runner.script(HEAD + 'note("inner", os.environ["TORCHELASTIC_TIMER_FILE"])', "inner.py")
    body = """
import subprocess
note("outer", os.environ["TORCHELASTIC_TIMER_FILE"])
sys.exit(subprocess.run([sys.executable, "-m", "tenax", "run", "inner.py"]).returncode)
"""
    done = runner.run(script(runner, body), env=ON)
    assert done.code == 0, done
    assert runner.note("inner") != runner.note("outer")


@pytest.mark.parametrize("value", [None, "0", "true"])
def test_the_watchdog_is_off_by_default(runner: Runner, value: str | None) -> None:
    """No pipe, no variable, no signal handler, and no import."""
    body = """
import os
from worker_kit import note
note("env", [name for name in os.environ if "TIMER_FILE" in name or "STACKS" in name])
note("status", open("/proc/self/status").read())
"""
    program = [sys.executable, "-X", "importtime", "-m", "tenax", "run"]
    env = {} if value is None else {"TORCHELASTIC_ENABLE_FILE_TIMER": value}
    done = runner.run("--on-hang=off", "--log-dir=logs", runner.script(body), program=program, env=env)
    assert done.code == 0, done
    assert runner.note("env") == "[]"
    assert not catches(runner.note("status"))
    assert not list(Path(runner.home).rglob("stacks.txt"))
    assert "tenax._node.supervisor" in done.err
    assert "tenax.timer" not in done.err
    assert "tenax._core.watchdog" not in done.err
    assert ("TORCHELASTIC_ENABLE_FILE_TIMER is 'true'" in done.err) == (value == "true")


def test_an_agent_with_hooks_warns_once_about_an_unknown_value(runner: Runner) -> None:
    """However many attempts there are."""
    program = """
from tenax.agent.server import LocalElasticAgent, WorkerSpec
class Looking(LocalElasticAgent):
    def _monitor_workers(self, worker_group):
        return super()._monitor_workers(worker_group)
if __name__ == "__main__":
    Looking(WorkerSpec(entrypoint="false", max_restarts=1, monitor_interval=0.01)).run()
"""
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "yes"}
    done = runner.run(program=[sys.executable, runner.script(program)], env=env)
    assert done.err.count("TORCHELASTIC_ENABLE_FILE_TIMER is 'yes'; only '1' enables the watchdog") == 1, done


# --- functions --------------------------------------------------------------------------------------------------------

FUNCTIONS = """
import os, signal, sys
from tenax import timer
from tenax.launcher import LaunchConfig, elastic_launch
from tenax._logs.specs import DefaultLogsSpecs
from tenax.multiprocessing.errors import ChildFailedError

def train():
    assert "TENAX_STACKS_SIGNAL" not in os.environ
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=0.3, scope="the step"):
        if os.environ["RANK"] == "1":
            while True:
                signal.pause()
    return "done"

if __name__ == "__main__":
    config = LaunchConfig(1, 1, 2, start_method=sys.argv[1], max_restarts=0, logs_specs=DefaultLogsSpecs("logs"))
    try:
        elastic_launch(config, train)()
    except ChildFailedError as error:
        ((rank, failure),) = error.failures.items()
        print(rank, failure.exitcode, failure.message["message"])
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_functions_are_watched(runner: Runner, method: str) -> None:
    """With every start method."""
    done = runner.run(program=[sys.executable, runner.script(FUNCTIONS), method], env=ON)
    assert done.code == 0, done
    assert re.fullmatch(rf"1 -9 {LATE.pattern}\n", done.out), done
    (stacks,) = runner.run_dir().glob("attempt_0/1/stacks.txt")
    assert "in train" in stacks.read_text()


OLD_HOOKS = (
    FUNCTIONS.partition("if __name__")[0]
    + """
from tenax.agent.server import WorkerSpec
from tenax.agent.server.local_elastic_agent import LocalElasticAgent

class Looking(LocalElasticAgent):
    def _monitor_workers(self, worker_group):
        return super()._monitor_workers(worker_group)

if __name__ == "__main__":
    spec = WorkerSpec(entrypoint=train, local_world_size=2, monitor_interval=0.01, max_restarts=int(sys.argv[1]))
    result = Looking(spec, DefaultLogsSpecs("logs")).run()
    print(sorted(result.failures), result.failures[1].message["message"])
"""
)


def test_an_agent_with_hooks_watches_scopes(runner: Runner) -> None:
    """Each attempt has its own pipe, and none is left."""
    done = runner.run(program=[sys.executable, runner.script(OLD_HOOKS), "1"], env=ON)
    assert done.code == 0, done
    assert re.fullmatch(rf"\[1\] {LATE.pattern}\n", done.out), done
    assert len(list(runner.run_dir().glob("attempt_*/1/stacks.txt"))) == 2
    assert not list((runner.home / "tmp").glob("tenax-watchdog-*"))


def test_an_agent_with_hooks_records_the_same_events(runner: Runner) -> None:
    """TorchElastic's four, for each attempt."""
    body = OLD_HOOKS.replace("max_restarts=int(sys.argv[1])", 'max_restarts=0, event_log_handler="jsonl:events.jsonl"')
    done = runner.run(program=[sys.executable, runner.script(body)], env=ON)
    assert done.code == 0, done
    lines = [json.loads(line) for line in (runner.home / "events.jsonl").read_text().splitlines()]
    running = [each for each in lines if each["metadata"]["state"] == "RUNNING"]
    names = ["watchdog started", "timer expired", "kill worker process", "watchdog stopped"]
    assert [each["name"] for each in running] == names
    nested = [json.loads(each["metadata"]["metadata"]) for each in running]
    assert [each["watchdog_event"] for each in nested] == names
    assert [each.get("scope_id") for each in nested] == [None, "the step", "the step", None]
    assert [each.get("signal") for each in nested] == [None, 9, 9, None]


DOCUMENTED = """
import multiprocessing as mp
import os, signal
from tenax import timer
from tenax.agent.server import WorkerSpec
from tenax.agent.server.local_elastic_agent import LocalElasticAgent
from tenax._logs.specs import DefaultLogsSpecs

def trainer(message_queue):
    timer.configure(timer.LocalTimerClient(message_queue))
    with timer.expires(after=0.3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 600):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            signal.pause()
    return "done"

if __name__ == "__main__":
    message_queue = mp.get_context("spawn").Queue()
    server = timer.LocalTimerServer(message_queue, max_interval=600)
    server.start()
    spec = WorkerSpec(entrypoint=trainer, args=(message_queue,), local_world_size=2, max_restarts=1)
    print(LocalElasticAgent(spec, DefaultLogsSpecs("logs"), "spawn").run().return_values)
    server.stop()
"""


def test_a_timer_server_in_user_code_works_beside_the_agent(runner: Runner) -> None:
    """As TorchElastic documents it: the server kills workers that hang, and the agent restarts them."""
    runner.leaves_within_s = 1.0  # multiprocessing has a process of its own, which ends after the program
    done = runner.run(program=[sys.executable, runner.script(DOCUMENTED)])
    assert done.code == 0, done
    assert done.out == "{0: 'done', 1: 'done'}\n", done


def test_a_prepared_worker_dumps_its_stacks_and_continues(tmp_path: Path) -> None:
    file = tmp_path / "stacks.txt"
    code = f"""
        import faulthandler, signal, sys
        file = open({str(file)!r}, "w")
        faulthandler.register({stacks_signal()}, file)
        print("ready", flush=True)
        sys.stdin.read()
    """
    with leaving_nothing():
        keeper = KeeperProcess()
        hearing = EventCollector(keeper)
        output = Pipe()
        stdin, stdin_writer = os.pipe()
        keeper.start(1, 0, launch(python(textwrap.dedent(code)), descriptors={0: stdin, 1: output.writer}))
        os.close(stdin)
        output.close_writer()
        hearing.take(events.WorkerStarted)
        assert output.line() == "ready"
        keeper.dump_stacks(1, 0)
        until(lambda: "in <module>" in file.read_text(), "the stacks")
        os.close(stdin_writer)
        assert hearing.take(events.WorkerExited).exit_code == 0
        assert not any(isinstance(event, events.StacksRefused) for event in hearing.events)
        output.close()
        keeper.close()
