"""The environment of a worker: names and values that scripts written for torchrun rely on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenax._core.environment import WorkerEnvironment, only_device, worker_environment
from tenax._core.model import AgentSettings, Assignment

CORE = settings.get_profile("core")

AGENT = AgentSettings(run_id="job-7", role="trainer", local_world_size=4, max_restarts=3)
SECOND_OF_TWO = Assignment(
    generation=5,
    group_rank=1,
    group_world_size=2,
    first_global_rank=4,
    world_size=8,
    first_role_rank=2,
    role_world_size=6,
    master_addr="node-0",
    master_port=29500,
    use_agent_store=True,
    restarts_used=2,
    why="node-3 was lost",
)


def test_the_variables_of_a_worker() -> None:
    """Exactly these variables, each a string in TorchElastic's format."""
    assert worker_environment(AGENT, SECOND_OF_TWO, local_rank=3, inherited={}) == {
        "RANK": "7",
        "LOCAL_RANK": "3",
        "GROUP_RANK": "1",
        "ROLE_RANK": "5",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "4",
        "WORLD_SIZE": "8",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "node-0",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job-7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TENAX_GENERATION": "5",
        "TENAX_GENERATION_REASON": "node-3 was lost",
        "PYTHONFAULTHANDLER": "1",
    }


def test_the_agent_store_flag_is_true_or_false_as_python_writes_it() -> None:
    """torch compares with the exact string "True"."""
    alone = worker_environment(AGENT, Assignment(1), 0, {})
    assert alone["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_variables_of_a_generation_are_never_inherited() -> None:
    """A launcher that is started in a worker of another job does not pass on that job's ranks."""
    stale = dict.fromkeys(worker_environment(AGENT, SECOND_OF_TWO, 0, {}), "stale")
    fresh = worker_environment(AGENT, SECOND_OF_TWO, 0, inherited=stale)
    inherited = {name for name, value in fresh.items() if value == "stale"}
    assert inherited == {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTHONFAULTHANDLER"}


@given(
    local_world_size=st.integers(1, 16),
    group_world_size=st.integers(1, 16),
    restarts_used=st.integers(0, 5),
    virtual=st.booleans(),
)
@settings(CORE, max_examples=50)
def test_every_rank_of_a_job_is_assigned_once(
    local_world_size: int, group_world_size: int, restarts_used: int, virtual: bool
) -> None:
    """Over all nodes and slots, RANK and ROLE_RANK count from 0 to the world size without a gap."""
    agent = AgentSettings("run", "trainer", local_world_size, 5)
    world_size = local_world_size * group_world_size
    workers = [
        worker_environment(
            agent,
            Assignment(
                1,
                group_rank=group_rank,
                group_world_size=group_world_size,
                first_global_rank=group_rank * local_world_size,
                world_size=world_size,
                first_role_rank=group_rank * local_world_size,
                role_world_size=world_size,
                restarts_used=restarts_used,
            ),
            local_rank,
            {},
            WorkerEnvironment(virtual_local_rank=virtual),
        )
        for group_rank in range(group_world_size)
        for local_rank in range(local_world_size)
    ]
    assert [int(worker["RANK"]) for worker in workers] == list(range(world_size))
    assert [int(worker["ROLE_RANK"]) for worker in workers] == list(range(world_size))
    assert {worker["WORLD_SIZE"] for worker in workers} == {str(world_size)}
    assert {worker["TORCHELASTIC_RESTART_COUNT"] for worker in workers} == {str(restarts_used)}
    for worker in workers:
        assert all(isinstance(value, str) for value in worker.values())
        assert 0 <= int(worker["LOCAL_RANK"]) < local_world_size


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTHONFAULTHANDLER"])
def test_values_of_the_user_are_kept(name: str) -> None:
    """A default never replaces the user's value, not even an empty one."""
    for value in ("0", "", "3"):
        assert worker_environment(AGENT, SECOND_OF_TWO, 0, {name: value})[name] == value


def test_omp_threads_are_set_only_if_the_user_has_not_set_them() -> None:
    """Each worker gets its share. Without shares, or with a value of the user, the variable is not set."""
    shares = WorkerEnvironment(omp_num_threads=(3, 3, 2, 2))
    threads = [
        worker_environment(AGENT, SECOND_OF_TWO, rank, {}, shares)["OMP_NUM_THREADS"]
        for rank in range(AGENT.local_world_size)
    ]
    assert threads == ["3", "3", "2", "2"]
    assert "OMP_NUM_THREADS" not in worker_environment(AGENT, SECOND_OF_TWO, 0, {"OMP_NUM_THREADS": "8"}, shares)
    assert "OMP_NUM_THREADS" not in worker_environment(AGENT, SECOND_OF_TWO, 0, {})


def test_with_a_virtual_local_rank_every_worker_has_local_rank_0_and_one_device() -> None:
    """The workers differ by their device; RANK is unchanged."""
    options = WorkerEnvironment(virtual_local_rank=True)
    inherited = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    workers = [worker_environment(AGENT, SECOND_OF_TWO, rank, inherited, options) for rank in range(4)]
    assert [worker["LOCAL_RANK"] for worker in workers] == ["0"] * 4
    assert [worker["CUDA_VISIBLE_DEVICES"] for worker in workers] == ["4", "5", "6", "7"]
    assert [worker["RANK"] for worker in workers] == ["4", "5", "6", "7"]


def test_without_a_virtual_local_rank_the_devices_are_inherited() -> None:
    """CUDA_VISIBLE_DEVICES is not set."""
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(AGENT, SECOND_OF_TWO, 0, {"CUDA_VISIBLE_DEVICES": "4,5"})


@pytest.mark.parametrize(
    ("visible", "local_rank", "device"),
    [
        (None, 0, "0"),
        (None, 11, "11"),
        ("3", 0, "3"),
        ("3,1", 1, "1"),
        (" 3 , 1 ", 1, "1"),
        ("GPU-8932f937,GPU-46a2b5c1", 1, "GPU-46a2b5c1"),
        ("MIG-1/2/0,MIG-1/3/0", 0, "MIG-1/2/0"),
        ("0,1,", 1, "1"),
    ],
)
def test_the_device_of_a_worker(visible: str | None, local_rank: int, device: str) -> None:
    """It is the visible device at the local rank's position, by number or name; all are visible by default."""
    assert only_device(visible, local_rank) == device


@pytest.mark.parametrize(("visible", "local_rank"), [("", 0), ("0", 1), ("0,1", 2), (" , ", 0)])
def test_too_few_devices_are_an_error(visible: str, local_rank: int) -> None:
    """The message has what is missing, the variable that was read, and what to do."""
    with pytest.raises(ValueError, match=r"needs one device per worker, but CUDA_VISIBLE_DEVICES=.* start fewer"):
        only_device(visible, local_rank)


def test_a_null_byte_in_the_reason_is_replaced() -> None:
    """The reason may come from another host; a null byte in it must not prevent a worker's start."""
    environment = worker_environment(AGENT, Assignment(1, why="a\0b was lost"), 0, {})
    assert environment["TENAX_GENERATION_REASON"] == "a b was lost"


def test_the_fencing_token_grows_when_the_scheduler_restarts_the_job() -> None:
    """The first generation of a restarted job has a greater token than any generation before."""
    tokens = [
        int(
            worker_environment(AGENT, Assignment(generation), 0, {}, WorkerEnvironment(job_restarts=restarts))[
                "TENAX_GENERATION"
            ]
        )
        for restarts, generation in ((0, 1), (0, 999_999), (1, 1), (1, 2), (12, 1))
    ]
    assert tokens == sorted(set(tokens))
    assert tokens[:3] == [1, 999_999, 1_000_001]
