"""Kubernetes, LSF and PBS: what their variables mean. And schedulers of other packages."""

from __future__ import annotations

import msgspec
import pytest

from tenax._schedulers.host_lists import Lsf, Pbs
from tenax._schedulers.kubernetes import IndexedJob, LeaderWorkerSet, MasterVariables
from tenax.cli.arguments import parse
from tenax.cli.flags import UsageError
from tenax.scheduler import Allocation, Scheduler, find_scheduler

DOMAIN = "train.default.svc.cluster.local"
POD = IndexedJob(lambda: f"train-2.{DOMAIN}")
INDEX = {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2"}
GROUP = {"LWS_LEADER_ADDRESS": "llm-0.llm.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"}
LSF = {"LSB_JOBID": "812", "LSB_JOBINDEX": "0", "LSB_MCPU_HOSTS": "hosta 8 hostb 8 hostc 4"}
PBS = {"PBS_JOBID": "44[3].server", "PBS_NODEFILE": "/var/spool/pbs/aux/44"}
PBS_HOSTS = "r1n1.cluster\nr1n1.cluster\nr1n2.cluster\n"


def fields(allocation: Allocation | None) -> str:
    """The fields that are set."""
    if allocation is None:
        return ""
    values = msgspec.structs.asdict(allocation)
    names = ("scheduler", "run_id", "nodes", "endpoint", "node_order", "is_first")
    return " ".join(str(values[name]) for name in names if values[name] != "")


@pytest.mark.parametrize(
    ("scheduler", "environ", "nodes", "expected"),
    [
        pytest.param(POD, INDEX, 4, f"Kubernetes train 4 train-0.{DOMAIN}:29400 2 False", id="indexed job"),
        pytest.param(POD, INDEX, 1, "Kubernetes 1 True", id="indexed job --standalone"),
        pytest.param(IndexedJob(lambda: "train-2"), INDEX, 4, "Kubernetes 1 True", id="no subdomain"),
        pytest.param(
            IndexedJob(lambda: "js-w-0-1.js.ns.svc"),
            {"JOB_COMPLETION_INDEX": "1"},
            2,
            "Kubernetes js-w-0 2 js-w-0-0.js.ns.svc:29400 1 False",
            id="JobSet",
        ),
        pytest.param(
            LeaderWorkerSet(), GROUP, 0, "LeaderWorkerSet llm-0 4 llm-0.llm.default:29400 3 False", id="LeaderWorkerSet"
        ),
        pytest.param(LeaderWorkerSet(), GROUP, 1, "", id="LeaderWorkerSet --standalone"),
        pytest.param(Lsf("hostb"), LSF, 3, "LSF 812 3 hosta:18410 1 False", id="LSF"),
        pytest.param(Lsf("hostb"), LSF, 0, "LSF 812 1 True", id="LSF without --nnodes"),
        pytest.param(Lsf("hosta"), LSF | {"LSB_JOBINDEX": "5"}, 1, "LSF 812_5 1 True", id="LSF array"),
        pytest.param(Pbs("r1n2", lambda _: PBS_HOSTS), PBS, 2, "PBS 44_3 2 r1n1.cluster:22804 1 False", id="PBS"),
        pytest.param(Pbs("login", lambda _: PBS_HOSTS), PBS, 2, "PBS 44_3 1 True", id="PBS on another host"),
        pytest.param(MasterVariables(), {"MASTER_ADDR": "a"}, 0, "", id="MASTER_ADDR alone"),
    ],
)
def test_allocations(scheduler: Scheduler, environ: dict[str, str], nodes: int, expected: str) -> None:
    assert fields(scheduler.allocation(environ, nodes)) == expected


def test_an_indexed_job_is_asked_for_its_number_of_nodes() -> None:
    with pytest.raises(UsageError, match=r"pod 2 of an Indexed Job.*add --nnodes N, or --standalone"):
        parse(["train.py"], INDEX)
    assert parse(["--standalone", "train.py"], INDEX).max_nodes == 1
    options = parse(["--nnodes", "4", "--rdzv-endpoint", "train-0.train", "train.py"], INDEX)
    assert (options.max_nodes, options.rdzv_endpoint) == (4, "train-0.train")


def test_kubeflow_variables_override_the_indexed_job() -> None:
    kubeflow = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "t-0-0.t", "PET_MASTER_PORT": "29400"}
    options = parse(["train.py"], {**INDEX, **kubeflow})
    assert (options.max_nodes, options.rdzv_endpoint, options.rdzv_configs) == (2, "t-0-0.t:29400", {"rank": 1})


def test_a_leader_worker_set_needs_no_flags() -> None:
    options = parse(["train.py"], GROUP)
    assert (options.min_nodes, options.rdzv_endpoint, options.run_id) == (4, "llm-0.llm.default:29400", "llm-0")
    assert options.rdzv_configs == {"node_order": "3"}


def test_variables_of_torch_alone_get_a_note() -> None:
    options = parse(["train.py"], {"MASTER_ADDR": "a", "WORLD_SIZE": "4", "RANK": "1"})
    assert options.max_nodes == 1
    assert "this node runs alone; for one run of 4 nodes add --nnodes 4" in options.notes[0]
    options = parse(["--nnodes", "4", "--master-addr", "a", "train.py"], {"MASTER_ADDR": "a", "WORLD_SIZE": "4"})
    assert options.notes == ()


class Grid(Scheduler):
    def allocation(self, environ: dict[str, str], nodes: int) -> Allocation:  # type: ignore[override]
        assert nodes == 0
        hosts = environ["GRID_HOSTS"].split()
        return Allocation(scheduler="Grid", run_id="g7", nodes=len(hosts), endpoint=f"{hosts[0]}:1234", node_order="1")


def test_a_scheduler_of_another_package() -> None:
    environ = {"TENAX_SCHEDULER": f"{__name__}:Grid", "GRID_HOSTS": "a b"}
    options = parse(["train.py"], environ)
    assert (options.max_nodes, options.rdzv_endpoint, options.run_id) == (2, "a:1234", "g7")
    assert options.rdzv_configs == {"node_order": "1"}
    with pytest.raises(UsageError, match="unknown scheduler 'other'"):
        parse(["train.py"], {"TENAX_SCHEDULER": "other"})


def test_a_scheduler_without_commands_knows_nothing_and_does_nothing() -> None:
    scheduler = find_scheduler(GROUP)
    assert scheduler is not None
    assert scheduler.seconds_left("1") is None
    assert scheduler.requeue("1") == ""
    assert find_scheduler({}) is None
