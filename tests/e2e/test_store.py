"""The workers' store: started with the first connection, empty for every generation, stopped with the run."""

from __future__ import annotations

import os
import signal

import pytest

from kit.jobs import Runner, holders, is_alive, until
from store.users import UNPRIVILEGED_UID, answer_to
from tenax._engines.free_port import free_port


def test_without_connections_no_store_process_is_started(runner: Runner) -> None:
    """The agent only listens; also after a restart."""
    script = runner.script(
        """
        import os, sys
        from worker_kit import *
        note("where", f"{os.environ['TORCHELASTIC_USE_AGENT_STORE']} {os.environ['MASTER_PORT']}")
        ready()
        wait_for("go")
        sys.exit(ATTEMPT == 0)
        """
    )
    job = runner.start("--nproc-per-node", "2", "--max-restarts", "1", script)
    ports = []
    for attempt in range(2):
        workers = runner.pids(2, attempt)
        assert runner.store_pids() == []
        used, port = runner.note("where", attempt=attempt).split()
        assert used == "True"
        assert holders(int(port), [job.process.pid, *workers]) == [job.process.pid]
        ports.append(port)
        for rank in range(2):
            runner.leave_note("go", rank, attempt)
    assert job.wait().code == 0
    assert len(set(ports)) == 2


# Workers that use the store through tenax, and leave a key in it.
MEETS = """
    import os, sys
    from tenax.store import TCPStore
    from worker_kit import *

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=30)
    note("stale", store.check(["stale key"]) if RANK == 0 else "")
    store.wait(["started"]) if RANK else store.set("started", b"")
    count = store.add("here", 1)
    store.set(f"rank {RANK}", str(os.getpid()))
    store.wait([f"rank {rank}" for rank in range(WORLD)])
    store.set("stale key", str(ATTEMPT))
    note("met", f"{os.environ['MASTER_PORT']} {store.get('here').decode()}")
    ready()
    wait_for("go")
    sys.exit(ATTEMPT == 0)
"""


def test_each_generation_gets_an_empty_store(runner: Runner) -> None:
    """One process serves all generations, each at another port."""
    job = runner.start("--nproc-per-node", "2", "--max-restarts", "1", runner.script(MEETS))
    seen = []
    for attempt in range(2):
        workers = runner.pids(2, attempt)
        (store,) = runner.store_pids()
        assert runner.note("stale", attempt=attempt) == "False"
        (port, here), _ = [runner.note("met", rank, attempt).split() for rank in range(2)]
        assert here == "2"
        assert holders(int(port), [store, *workers]) == [store]
        seen.append((store, port))
        for rank in range(2):
            runner.leave_note("go", rank, attempt)
    assert job.wait().code == 0
    (first, old_port), (second, new_port) = seen
    assert first == second
    assert old_port != new_port
    assert not is_alive(first)


def test_a_given_master_port_is_used_by_every_generation(runner: Runner) -> None:
    """With an empty store each time."""
    port = str(free_port())
    job = runner.start("--nproc-per-node", "2", "--max-restarts", "1", "--master-port", port, runner.script(MEETS))
    for attempt in range(2):
        runner.pids(2, attempt)
        assert runner.note("met", attempt=attempt) == f"{port} 2"
        assert runner.note("stale", attempt=attempt) == "False"
        for rank in range(2):
            runner.leave_note("go", rank, attempt)
    assert job.wait().code == 0


def test_a_killed_store_is_reported_and_replaced_in_the_next_generation(runner: Runner) -> None:
    job = runner.start("--nproc-per-node", "2", "--max-restarts", "1", runner.script(MEETS))
    runner.pids(2)
    (store,) = runner.store_pids()
    os.kill(store, signal.SIGKILL)
    job.until_printed("the workers' store was lost: its process was killed by SIGKILL")
    for rank in range(2):
        runner.leave_note("go", rank)
    runner.pids(2, 1)
    (another,) = runner.store_pids()
    assert another != store
    for rank in range(2):
        runner.leave_note("go", rank, 1)
    assert job.wait().code == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped and killed"])
def test_the_store_exits_with_a_killed_agent(runner: Runner, number: signal.Signals) -> None:
    job = runner.start("--nproc-per-node", "2", runner.script(MEETS))
    runner.pids(2)
    (store,) = runner.store_pids()
    job.send(number)
    if number is signal.SIGSTOP:
        job.send(signal.SIGKILL)
    assert job.wait().code == -signal.SIGKILL
    until(lambda: not is_alive(store), "the end of the store")


def test_a_store_under_sigstop_does_not_delay_the_end(runner: Runner) -> None:
    job = runner.start("--nproc-per-node", "2", "--max-restarts", "1", runner.script(MEETS))
    runner.pids(2)
    (store,) = runner.store_pids()
    os.kill(store, signal.SIGSTOP)
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    assert not is_alive(store)


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (["--rdzv-conf", "use_agent_store=false"], {}),
        ([], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    ],
    ids=["flag", "torch's variable"],
)
def test_a_worker_can_host_the_store(runner: Runner, arguments: list[str], env: dict[str, str]) -> None:
    """Then the port is free for rank 0, and the workers see that in a variable."""
    script = runner.script(
        """
        import os
        from tenax.store import TCPStore
        from worker_kit import *
        assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), WORLD, RANK == 0, timeout=30)
        store.set(f"rank {RANK}", "here")
        store.wait(["rank 0", "rank 1"])
        ready()
        wait_for("go")
        """
    )
    job = runner.start("--nproc-per-node", "2", *arguments, script, env=env)
    runner.pids(2)
    assert runner.store_pids() == []
    for rank in range(2):
        runner.leave_note("go", rank)
    assert job.wait().code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="a process of another user needs root to be started")
def test_another_user_of_the_host_cannot_use_the_store(runner: Runner) -> None:
    """In a run of one node with default flags. A message shows what was rejected, and how to allow it."""
    script = runner.script(
        """
        import os
        from worker_kit import *
        note("port", os.environ["MASTER_PORT"])
        ready()
        wait_for("go")
        """
    )
    job = runner.start(script)
    runner.pids(1)
    port = int(runner.note("port"))
    assert answer_to("127.0.0.1", port, UNPRIVILEGED_UID) == b""
    assert answer_to("127.0.0.1", port, 0) == b"abcd"
    runner.leave_note("go")
    done = job.wait()
    assert done.code == 0
    messages = " ".join(done.err.split())
    assert f"127.0.0.1 is a process of uid {UNPRIVILEGED_UID}, but the run belongs to uid 0" in messages
    assert "--rdzv-conf store_allow=127.0.0.1" in messages
