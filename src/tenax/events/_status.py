"""Creates TorchElastic's status events, ``torchelastic.worker.status.*``. Pure.

The metadata has TorchElastic's keys. The nested ``metadata``, a JSON text, has TorchElastic's keys and additional ones;
its values are plain, where TorchElastic wraps some of them in lists of one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from tenax.events.api import Event, EventMetadataValue, EventSource

PREFIX = "torchelastic.worker.status."


class Origin(msgspec.Struct, frozen=True):
    """The origin of an event, the same for all events of an agent."""

    run_id: str
    role: str
    hostname: str
    rdzv_backend: str
    entry_point: str


class Moment(msgspec.Struct, frozen=True):
    """The time of an event, and the agent's state at that time."""

    timestamp_ms: int  # since the epoch
    total_run_time_s: int = 0  # since the run began
    group_rank: int | None = None  # None: there was no group yet
    group_world_size: int | None = None
    restarts_used: int = 0


class WorkerOfGroup(msgspec.Struct, frozen=True):
    """The worker that an event is about, and its exit code if it has ended."""

    local_rank: int
    global_rank: int
    role_rank: int
    role_world_size: int
    worker_id: str | None = None  # a local agent's is the pid
    pid: int | None = None
    exit_code: int | None = None  # negative: the number of the signal that ended it


def status_event(
    state: str,
    origin: Origin,
    moment: Moment,
    worker: WorkerOfGroup | None = None,
    *,
    name: str = "",
    raw_error: str | None = None,
    duration_ms: float | None = None,
    more: Mapping[str, object] = {},
) -> Event:
    """Return an event about a worker, or about the agent if ``worker`` is None.

    ``name``: empty for the default. ``raw_error``: of a worker, see ``error_as_json``. ``more``: added to the nested
    metadata.
    """
    nested: dict[str, object] = {"group_world_size": moment.group_world_size, "entry_point": origin.entry_point}
    if worker is not None:
        nested |= {
            "local_rank": worker.local_rank,
            "role_rank": worker.role_rank,
            "role_world_size": worker.role_world_size,
            "exit_code": worker.exit_code,
            "worker_pid": worker.pid,
        }
    metadata: dict[str, EventMetadataValue] = {
        "run_id": origin.run_id,
        "global_rank": None if worker is None else worker.global_rank,
        "group_rank": moment.group_rank,
        "worker_id": None if worker is None else worker.worker_id,
        "role": origin.role,
        "hostname": origin.hostname,
        "state": state,
        "total_run_time": moment.total_run_time_s,
        "rdzv_backend": origin.rdzv_backend,
        "raw_error": raw_error,
        "metadata": json.dumps({**nested, **more}),
        "agent_restarts": moment.restarts_used,
        "duration_ms": duration_ms,
    }
    source = EventSource.AGENT if worker is None else EventSource.WORKER
    return Event(name or PREFIX + state, source, moment.timestamp_ms, metadata)


def error_as_json(message: str, traceback: str, timestamp_s: float) -> str:
    """Return a worker's error for ``raw_error``, in the format of TorchElastic's error file."""
    extra = {"py_callstack": traceback, "timestamp": str(int(timestamp_s))}
    return json.dumps({"message": {"message": message, "extraInfo": extra}})
