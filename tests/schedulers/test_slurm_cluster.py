"""Runs on a real Slurm: three nodes and a login host."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .slurm_cluster import ENDED, SlurmCluster, wait_for, why_not

pytestmark = [pytest.mark.network, pytest.mark.skipif(bool(why_not()), reason=why_not())]

STEP = ("srun", "--ntasks-per-node=1")
# Slurm starts a requeued job minutes later, and boots a node as slowly.
slow = pytest.mark.skipif(not os.environ.get("SLURM_SLOW_TESTS"), reason="takes minutes: ./dev slurm runs it")


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """One cluster for all tests of this file."""
    with tempfile.TemporaryDirectory(prefix="tenax-slurm-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)  # alice is another user
        cluster = SlurmCluster(Path(folder) / "lab")
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def ranks(output: str) -> dict[str, list[str]]:
    """Return the hosts of each run, by rank."""
    found: dict[str, list[str]] = {}
    for run, _, host in sorted(re.findall(r"^run (\S+): rank (\d+) of \d+ on (\w+),", output, re.MULTILINE)):
        found.setdefault(run, []).append(host)
    return found


def test_a_step_is_one_run_without_a_flag(slurm: SlurmCluster) -> None:
    done = slurm.run(*STEP, "-N3", slurm.tenax, "run", "train.py", "plain", "1")
    assert done.returncode == 0, done.stdout
    assert list(ranks(done.stdout).values()) == [["n1", "n2", "n3"]]
    assert done.stdout.count("note: Slurm step") == 1
    secret = slurm.home / ".config" / "tenax" / "cluster-secret"
    assert secret.stat().st_mode & 0o777 == 0o600


def test_a_failure_is_reported_in_full_once(slurm: SlurmCluster) -> None:
    done = slurm.run(*STEP, "-N3", slurm.tenax, "run", "--max-restarts", "0", "train.py", "failing", "50", "fail")
    assert done.returncode == 1
    assert done.stdout.count("First cause") == 1, done.stdout
    assert done.stdout.count("the first node prints the report") == 2, done.stdout


@pytest.mark.parametrize(("nodes", "tasks"), [(1, 2), (2, 4)])
def test_more_tasks_than_nodes_start_nothing(slurm: SlurmCluster, nodes: int, tasks: int) -> None:
    done = slurm.run("srun", f"-N{nodes}", f"-n{tasks}", slurm.tenax, "run", "train.py", "none", "1")
    assert done.returncode == 2
    assert done.stdout.count(f"this step has {tasks} tasks on {nodes} node") == 1, done.stdout
    assert "rank" not in done.stdout


def test_separate_runs_share_nodes(slurm: SlurmCluster) -> None:
    """Two array tasks, two steps, the parts of a heterogeneous job, and a batch script without srun."""
    train = f"{slurm.tenax} run train.py separate 1"
    both = ("-N2", "--ntasks-per-node=1")
    _, array = slurm.submit(f"srun {train}", *both, "--array=1-2")
    _, steps = slurm.submit(f"srun --overlap {train} & srun --overlap {train} & wait", *both)
    parts = f"srun --het-group=0 {train} & srun --het-group=1 {train} & wait"
    _, het = slurm.submit(parts, *both, ":", "-N1", "-n1")
    _, alone = slurm.submit(train, *both)
    found = ranks(wait_for(array, ENDED, count=2))
    assert [len(set(nodes)) for nodes in found.values()] == [2, 2]
    assert {run.partition("_")[2] for run in found} == {"1.0", "2.0"}
    (one, other) = ranks(wait_for(steps, ENDED)).values()
    assert one == other == sorted(set(one))  # Slurm chooses the nodes; both steps use them in the same order
    assert len(one) == 2
    assert sorted(map(len, ranks(wait_for(het, ENDED)).values())) == [1, 2], het.read_text()
    assert list(map(len, ranks(wait_for(alone, ENDED)).values())) == [1]
    assert "using only this node of the 2 nodes" in alone.read_text()


def test_one_command_starts_a_step_on_each_node(slurm: SlurmCluster) -> None:
    """And all steps end with it, also if it is killed."""
    start = f"{slurm.tenax} start --via srun -- train.py"
    left = 'until [ -z "$(ps -eo args | grep "[t]rain.py")" ]; do :; done; echo none left'
    script = f"""{start} started 1
        mkfifo lines
        {start} killed 900 deaf > lines &
        grep -m 2 'of 2 on' < lines
        kill -KILL $!
        srun timeout 2 bash -c '{left}'"""
    done = slurm.run("salloc", "-N2", "--ntasks-per-node=1", "--quiet", "bash", "-c", script)
    lines = re.findall(r"^\[(n\d)\] run \d+: rank (\d) of 2 on (n\d),", done.stdout, re.MULTILINE)
    assert sorted(lines) == [("n1", "0", "n1")] * 2 + [("n2", "1", "n2")] * 2, done.stdout
    assert done.stdout.count("none left") == 2, done.stdout


@slow
@pytest.mark.timeout(900)
def test_preempted_jobs_are_requeued_and_continue(slurm: SlurmCluster) -> None:
    """With and without GraceTime; one with a notice before, and watched from the login host."""
    both = ("-N2", "--ntasks-per-node=1")
    job, output = slurm.submit(f"srun {slurm.tenax} run train.py graceful 900", *both, "-t", "5")
    abrupt, abrupt_output = slurm.submit(f"srun {slurm.tenax} run train.py abrupt 900", *both, "-p", "abrupt")
    for each in (output, abrupt_output):
        wait_for(each, "after step 0", count=2)
    assert f"run {job}.0: running" in slurm.out(slurm.tenax, "status", job)
    assert f"run {job}.0: rank 1 of 2 on" in slurm.out(slurm.tenax, "logs", job)
    slurm.out("scancel", "--signal=USR1", job)
    text = wait_for(output, "rank 0: notice", "rank 1: notice")
    seconds = [float(left) for left in re.findall(r"notice, ([\d.]+) s left", text)]
    assert all(200 < left <= 300 for left in seconds), text
    wait_for(output, "is leaving", count=2)
    slurm.out("srun", "-p", "urgent", "-N3", "--exclusive", "true")
    text = wait_for(output, "rank 0: finished")
    assert f"requeued the preempted Slurm job {job}" in text
    assert text.count("is leaving") == 2, text  # each node printed its own
    check_continued(slurm.home / "graceful", job, text)
    check_continued(slurm.home / "abrupt", abrupt, wait_for(abrupt_output, "rank 0: finished"))


def check_continued(folder: Path, job: str, output: str) -> None:
    """Check that the second life of the job continued from the save of the first, and that its own save wins."""
    first, *_, last = sorted(folder.glob("token-*"))
    assert first.name.startswith("token-000000000001-")
    assert f"run {job}.0-r1: rank 0 of 2" in output
    assert f"token 1000001, after step {first.read_text()}" in output
    (folder / "token-000000000001-step-999999").write_text("999999")  # by a process of the first life
    assert max(folder.glob("token-*")) == last
    assert int(last.read_text()) == int(first.read_text()) + 5


def test_workers_that_ignore_sigterm_are_killed_before_slurm_kills(slurm: SlurmCluster) -> None:
    step = slurm.popen(*STEP, "-N2", slurm.tenax, "run", "train.py", "deaf", "900", "deaf")
    assert step.stdout is not None
    starts = (line for line in iter(step.stdout.readline, "") if "after step 0" in line)
    job = next(starts).split()[1].partition(".")[0]
    next(starts)
    slurm.out("scancel", job)
    text, _ = step.communicate(timeout=60)
    assert text.count("killing all remaining processes: the grace period is over") == 2, text
    assert text.count("was cancelled by SIGTERM") == 1, text
    assert "requeued" not in text


@slow
@pytest.mark.timeout(900)
def test_an_elastic_job_survives_a_power_failure_and_a_drain(slurm: SlurmCluster) -> None:
    """One step per node: the others continue, the node returns, and a drained node exits with 0."""
    flags = "--nnodes 2:3 --rdzv-conf last_call_timeout=1"
    script = f"{slurm.tenax} start --via srun -- {flags} train.py elastic 400"
    job, output = slurm.submit(script, "-N3", "--ntasks-per-node=1", "--no-kill")
    wait_for(output, "of 3 on", count=3)
    with slurm.power_failure("n3"):
        wait_for(output, "of 2 on", count=2)
    text = wait_for(output, "of 3 on", count=6)
    assert "rank 2 of 3 on n3" in text
    slurm.out(slurm.tenax, "drain", "n3", job, "--yes")
    wait_for(output, "this node has left the run, which continues without it")
    assert "finished" in wait_for(output, ENDED)
    slurm.out("scancel", job)
