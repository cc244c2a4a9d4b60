"""Slurm: what its variables mean. The environments are from real steps, without what is not read."""

from __future__ import annotations

import msgspec
import pytest

from tenax._schedulers.slurm import Slurm, hosts, records, runs_of, should_requeue
from tenax.cli.arguments import parse
from tenax.cli.flags import UsageError
from tenax.cli.scheduled_run import Membership, Refused, grace_within
from tenax.scheduler import Allocation


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


# The second task of: srun -N3 --ntasks-per-node=1, Slurm 22.05, from a login host.
STEP = variables(
    "SLURMD_NODENAME=n2 SLURM_GTIDS=1 SLURM_JOBID=1 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=n[1-3] SLURM_JOB_NUM_NODES=3 "
    "SLURM_LAUNCH_NODE_IPADDR=10.77.0.1 SLURM_LOCALID=0 SLURM_NNODES=3 SLURM_NODEID=1 SLURM_NODELIST=n[1-3] "
    "SLURM_NTASKS=3 SLURM_NTASKS_PER_NODE=1 SLURM_PROCID=1 SLURM_STEPID=0 SLURM_STEP_ID=0 "
    "SLURM_STEP_LAUNCHER_PORT=33837 SLURM_STEP_NODELIST=n[1-3] SLURM_STEP_NUM_NODES=3 SLURM_STEP_NUM_TASKS=3 "
    "SLURM_STEP_TASKS_PER_NODE=1(x3) SLURM_TASKS_PER_NODE=1(x3) HOME=/home/alice"
)
# The batch script of: sbatch -N3 --gpus-per-node=2, Slurm 22.05.
BATCH = variables(
    "CUDA_VISIBLE_DEVICES=0,1 SLURMD_NODENAME=n1 SLURM_GPUS_ON_NODE=2 SLURM_JOB_GPUS=0,1 SLURM_JOB_ID=2 "
    "SLURM_JOB_NODELIST=n[1-3] SLURM_JOB_NUM_NODES=3 SLURM_LOCALID=0 SLURM_NNODES=3 SLURM_NODEID=0 SLURM_NTASKS=3 "
    "SLURM_PROCID=0 SLURM_TASKS_PER_NODE=1(x3) HOME=/home/alice"
)
# srun in that script, the third node; then one with -N1 -w n2.
STEP_OF_BATCH = BATCH | variables(
    "SLURMD_NODENAME=n3 SLURM_NODEID=2 SLURM_PROCID=2 SLURM_STEP_GPUS=0,1 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-3] "
    "SLURM_STEP_NUM_NODES=3 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=1(x3)"
)
ONE_NODE = BATCH | variables(
    "SLURMD_NODENAME=n2 SLURM_NNODES=1 SLURM_NODEID=0 SLURM_STEP_ID=1 SLURM_STEP_NODELIST=n2 SLURM_STEP_NUM_NODES=1 "
    "SLURM_STEP_NUM_TASKS=1"
)
# An array task, after it was requeued twice.
ARRAY = STEP | variables(
    "SLURM_ARRAY_JOB_ID=3 SLURM_ARRAY_TASK_ID=7 SLURM_JOB_ID=4 SLURM_RESTART_COUNT=2 SLURM_NODEID=0 SLURM_PROCID=0"
)
# srun --het-group=0,1 in a heterogeneous job of 2 + 1 nodes; its components are the jobs 5 and 6.
HETEROGENEOUS = STEP | variables(
    "SLURM_HET_SIZE=2 SLURM_JOB_ID=5 SLURM_JOB_ID_HET_GROUP_0=5 SLURM_JOB_ID_HET_GROUP_1=6 SLURM_STEP_ID=2 "
    "SLURM_NODEID=2 SLURM_PROCID=2 SLURM_STEP_NODELIST=n[1-3]"
)
# Slurm 23.11 has the job's end and, with MpiParams=ports, reserved ports; salloc's shell is a step of its own there.
NEWER = STEP | variables("SLURM_JOB_END_TIME=1794894772 SLURM_STEP_RESV_PORTS=12000-12002 SLURM_OOM_KILL_STEP=0")
INTERACTIVE = BATCH | variables("SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1")
# srun -N3 --pty bash: only the first task has the terminal.
TERMINAL = STEP | variables("SLURM_NODEID=0 SLURM_PROCID=0 SLURM_PTY_PORT=42035 SLURM_PTY_WIN_COL=80")
TOO_MANY = STEP | variables("SLURM_NODEID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=6 SLURM_NTASKS=6")


def fields(allocation: Allocation) -> str:
    """The fields that differ between the cases, without the note."""
    values = msgspec.structs.asdict(allocation)
    names = ("run_id", "nodes", "endpoint", "node_order", "workers", "restarts", "is_first")
    return " ".join(f"{name}={values[name]}" for name in names if values[name] not in ("", 0))


@pytest.mark.parametrize(
    ("environ", "nodes", "expected"),
    [
        pytest.param(STEP, 0, "run_id=1.0 nodes=3 endpoint=n1:16415 node_order=1", id="step"),
        pytest.param(
            STEP_OF_BATCH, 0, "run_id=2.0 nodes=3 endpoint=n1:16446 node_order=2 workers=2", id="step in a script"
        ),
        pytest.param(BATCH, 0, "run_id=2 nodes=1 workers=2 is_first=True", id="batch script"),
        pytest.param(ONE_NODE, 0, "run_id=2.1 nodes=1 workers=2 is_first=True", id="step of one node"),
        pytest.param(ONE_NODE, 3, "run_id=2 nodes=3 endpoint=n1:16445 node_order=1 workers=2", id="one step per node"),
        pytest.param(
            ARRAY, 0, "run_id=3_7.0-r2 nodes=3 endpoint=n1:16508 node_order=0 restarts=2 is_first=True", id="array"
        ),
        pytest.param(HETEROGENEOUS, 0, "run_id=5.2 nodes=3 endpoint=n1:16541 node_order=2", id="heterogeneous"),
        pytest.param(NEWER, 0, "run_id=1.0 nodes=3 endpoint=n1:12000 node_order=1", id="reserved ports"),
        pytest.param(INTERACTIVE, 0, "run_id=2 nodes=1 workers=2 is_first=True", id="interactive shell"),
        pytest.param(TERMINAL, 0, "run_id=1 nodes=1 is_first=True", id="srun --pty"),
        pytest.param(STEP, 1, "run_id=1.0 nodes=1 is_first=True", id="--standalone"),
        pytest.param(
            TOO_MANY | {"SLURM_PROCID": "1"}, 6, "run_id=1.0 nodes=3 endpoint=n1:16415 node_order=1", id="--nnodes 6"
        ),
    ],
)
def test_allocations(environ: dict[str, str], nodes: int, expected: str) -> None:
    assert fields(Slurm(lambda _: "").allocation(environ, nodes)) == expected


def test_a_note_says_what_was_found() -> None:
    slurm = Slurm(lambda _: "")
    assert slurm.allocation(STEP, 0).note == ""  # the first node prints it
    assert slurm.allocation(ARRAY, 0).note == "Slurm step 4.0 on n[1-3]: run 3_7.0-r2, endpoint n1:16508"
    assert (
        slurm.allocation(BATCH, 0).note
        == "using only this node of the 3 nodes of Slurm job 2; to use all, start it with srun"
    )
    assert slurm.allocation(TERMINAL, 0).note.startswith("using only this node of the 3 nodes of Slurm job 1;")
    assert slurm.allocation(BATCH, 1).note == ""


def test_more_tasks_than_nodes_are_refused_once() -> None:
    with pytest.raises(Refused) as first:
        parse(["train.py"], TOO_MANY)
    assert str(first.value) == (
        "this step has 6 tasks on 3 nodes; tenax needs one per node: add --ntasks-per-node=1 to srun"
    )
    with pytest.raises(Refused) as second:
        parse(["train.py"], TOO_MANY | {"SLURM_PROCID": "1"})
    assert str(second.value) == ""
    with pytest.raises(Refused, match="4 tasks on 1 node;"):
        parse(["train.py"], ONE_NODE | {"SLURM_STEP_NUM_TASKS": "4"})
    assert parse(["--standalone", "train.py"], TOO_MANY).max_nodes == 1


def test_nearby_runs_have_different_ids_and_ports() -> None:
    slurm = Slurm(lambda _: "")
    found = [
        slurm.allocation(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}, 0)
        for job in range(1000, 1200)
        for step in range(20)
    ]
    found += [slurm.allocation(ONE_NODE | {"SLURM_JOB_ID": str(job)}, 3) for job in range(1000, 1200)]
    assert len({each.endpoint for each in found}) == len({each.run_id for each in found}) == len(found)
    assert all(1024 < int(each.endpoint.partition(":")[2]) < 32768 for each in found)


@pytest.mark.parametrize(
    ("nodelist", "expected"),
    [
        ("n1", "n1"),
        ("n[1-3,7]", "n1 n2 n3 n7"),
        ("a,b[2],c", "a b2 c"),
        ("gpu[008-011]", "gpu008 gpu009 gpu010 gpu011"),
        ("rack[1-2]n[1-2],login", "rack1n1 rack1n2 rack2n1 rack2n2 login"),
        ("r[1-2]-x.cluster", "r1-x.cluster r2-x.cluster"),
    ],
)
def test_lists_of_nodes(nodelist: str, expected: str) -> None:
    assert " ".join(hosts(nodelist)) == expected


def test_a_list_without_nodes_is_rejected() -> None:
    with pytest.raises(UsageError, match="list of nodes is empty"):
        parse(["train.py"], STEP | {"SLURM_STEP_NODELIST": ""})


def test_the_allocation_fills_in_flags_that_were_not_given() -> None:
    options = parse(["train.py"], STEP_OF_BATCH | {"SLURM_CONF": "/nowhere"})
    assert (options.min_nodes, options.max_nodes, options.nproc_per_node, options.run_id) == (3, 3, 2, "2.0")
    assert (options.rdzv_backend, options.rdzv_endpoint) == ("tcp", "n1:16446")
    assert options.rdzv_configs == {"node_order": "2", "token_file": "/home/alice/.config/tenax/cluster-secret"}
    assert options.notice_signals == "SIGUSR1"
    assert options.notice_s is None
    assert options.notes == ()


def test_flags_and_variables_override_the_allocation() -> None:
    line = "--nnodes 2:3 --rdzv-id mine --nproc-per-node 4 --rdzv-endpoint other:1234 --shutdown-timeout 7 train.py"
    options = parse(line.split(), STEP_OF_BATCH)
    assert (options.min_nodes, options.max_nodes, options.nproc_per_node, options.run_id) == (2, 3, 4, "mine")
    assert (options.rdzv_endpoint, options.shutdown_timeout) == ("other:1234", 7)
    assert options.rdzv_configs == {"node_order": "2"}  # the secret is for the endpoint of the allocation
    options = parse(["train.py"], STEP | {"PET_NNODES": "1:3", "TENAX_RDZV_TOKEN": "x" * 32, "TENAX_NODE_ORDER": "z"})
    assert (options.min_nodes, options.max_nodes, options.rdzv_configs) == (1, 3, {})
    options = parse(["--node-rank", "2", "--signals-to-handle", "SIGTERM,SIGUSR1", "train.py"], STEP)
    assert "node_order" not in options.rdzv_configs
    assert options.notice_signals == ""
    options = parse(["--standalone", "train.py"], STEP)
    assert (options.max_nodes, options.rdzv_backend, options.run_id) == (1, "local", "1.0")
    options = parse(["--rdzv-backend", "etcd", "--rdzv-endpoint", "e:2379", "train.py"], STEP)
    assert (options.max_nodes, options.rdzv_endpoint) == (3, "e:2379")


def test_gpus_that_cannot_be_found_are_noted() -> None:
    environ = STEP_OF_BATCH | {"SLURM_NODEID": "0", "CUDA_VISIBLE_DEVICES": "", "SLURM_STEP_GPUS": "0,1,2,3,4,5,6,7,8"}
    options = parse(["--nproc-per-node", "auto", "train.py"], environ)
    assert options.notes[1].startswith(
        f"--nproc-per-node auto found {options.nproc_per_node}, but Slurm gave this node 9"
    )


@pytest.mark.parametrize("environ", [STEP | {"TENAX_GENERATION": "1"}, STEP | {"TENAX_SCHEDULER": "none"}])
def test_a_run_within_a_worker_and_a_disabled_scheduler_have_no_allocation(environ: dict[str, str]) -> None:
    options = parse(["train.py"], environ)
    assert (options.max_nodes, options.allocation) == (1, None)


def test_the_grace_period_is_shorter_than_kill_wait() -> None:
    assert [grace_within(seconds) for seconds in (5, 15, 30, 60)] == [2, 10, 25, 30]
    slurm = Slurm({"/c": "#KillWait=9\nSlurmctldHost=a\n KillWait = 15 # seconds"}.__getitem__)
    assert slurm.allocation(STEP | {"SLURM_CONF": "/c"}, 0).kill_wait_s == 15
    options = parse(["--shutdown-timeout", "60", "train.py"], ARRAY | {"SLURM_CONF": "/nowhere"})
    assert options.shutdown_timeout == 60
    assert options.notes[1] == (
        "--shutdown-timeout 60 has no effect beyond 30 s: then Slurm kills the workers (KillWait), and there is no "
        "report"
    )


PREEMPTED = (
    "JobId=7 JobName=sl.sh UserId=alice(1500) JobState=RUNNING Reason=None Requeue=1 Restarts=0 BatchFlag=1 "
    "StartTime=1794894472 EndTime=1794894498 PreemptEligibleTime=1794894472 PreemptTime=1794894488 NodeList=n[1-2] "
    "TRES=cpu=2,node=2"
)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", True),
        ("JobState=RUNNING", "JobState=CANCELLED", False),
        ("JobState=RUNNING", "JobState=COMPLETING", False),
        ("PreemptTime=1794894488", "PreemptTime=None", False),
        ("Requeue=1", "Requeue=0", False),
        ("BatchFlag=1", "BatchFlag=0", False),
    ],
)
def test_a_job_is_requeued_if_it_is_being_preempted(old: str, new: str, expected: bool) -> None:
    assert should_requeue(records(PREEMPTED.replace(old, new))[0]) is expected


def test_a_record_of_scontrol() -> None:
    record = records(PREEMPTED)[0]
    assert (record["EndTime"], record["TRES"], record["NodeList"]) == ("1794894498", "cpu=2,node=2", "n[1-2]")


def test_a_node_without_a_generation_is_first_by_its_allocation() -> None:
    assert Membership().is_first(Allocation(scheduler="Slurm", is_first=True))
    assert not Membership().is_first(Allocation(scheduler="Slurm", is_first=False))


SHOWN_JOB = "JobId=16 ArrayJobId=15 ArrayTaskId=3 JobState=RUNNING Restarts=1 NodeList=n[1-3] NumNodes=3\n"
SHOWN_STEPS = (
    "StepId=15_3.batch State=RUNNING NodeList=n1 Nodes=1 Tasks=1 ResvPorts=(null)\n"
    "StepId=15_3.4 State=RUNNING NodeList=n[2-3] Nodes=2 Tasks=2 ResvPorts=(null)\n"
    "StepId=15_3.5 State=RUNNING NodeList=n2 Nodes=1 Tasks=1 ResvPorts=(null)\n"
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("15_3", ["15_3.4-r1 n2:16884", "15_3-r1 n1:16879"]),  # a step, and the steps of one node together
        ("16", ["15_3.4-r1 n2:16884", "15_3-r1 n1:16879"]),
        ("15_3.4", ["15_3.4-r1 n2:16884"]),
        ("15_3.4-r1", ["15_3.4-r1 n2:16884"]),
        ("15_3.9", []),
        ("llama", []),
    ],
)
def test_runs_are_found_by_the_id_of_their_job(name: str, expected: list[str]) -> None:
    def scontrol(_: str, what: str, job: str) -> str:
        assert job in ("16", "15_3")
        return SHOWN_JOB if what == "job" else SHOWN_STEPS

    assert [" ".join(run) for run in runs_of(name, scontrol)] == expected


def test_an_unknown_job_has_no_runs() -> None:
    def scontrol(*_: str) -> str:
        raise OSError("slurm_load_jobs error: Invalid job id specified")

    assert runs_of("33", scontrol) == []
