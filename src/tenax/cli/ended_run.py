"""Finds the log folders of an ended run from the notes that its agents left on this host.

Several agents of the run may have run here, in parallel or one after another, and its id may have been used before.
Agents belong to the same run if they had the same run id and rendezvous, and their lifetimes overlap.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import msgspec

from tenax._node.control_socket import RunNote, last_runs


class EndedRun(msgspec.Struct, frozen=True):
    run_id: str
    folders: tuple[str, ...]  # that still exist; the coordinator's last folder first, else the one written last
    noted: tuple[str, ...] = ()  # all folders, including removed ones


class _Agent(msgspec.Struct, frozen=True):
    """An agent's note, and how long it and its coordinator ran, judged by their files."""

    note: RunNote
    until: float
    coordinated_until: float


def ended_run(name: str, environ: Mapping[str, str] | None = None) -> EndedRun | None:
    """Return the last run on this host with this run id or agent pid, or None. Raises OSError."""
    notes = last_runs(environ)
    latest = next((note for note in notes if name in (note.run_id, str(note.pid))), None)
    if latest is None:
        return None
    agents = [_agent(note) for note in notes if note.which_run == latest.which_run]
    same_run = _overlapping(next(agent for agent in agents if agent.note is latest), agents)
    same_run.sort(key=lambda agent: (agent.coordinated_until, agent.until), reverse=True)
    noted = tuple(dict.fromkeys(agent.note.log_dir for agent in same_run if agent.note.log_dir))
    return EndedRun(latest.run_id, tuple(folder for folder in noted if os.path.isdir(folder)), noted)


def _overlapping(first: _Agent, agents: Iterable[_Agent]) -> list[_Agent]:
    """Return the agents that are connected to the first by a chain of overlapping lifetimes."""
    found, others = [first], [agent for agent in agents if agent is not first]
    for one in found:  # grows during the loop
        met = [other for other in others if other.note.since <= one.until and one.note.since <= other.until]
        found += met
        others = [other for other in others if other not in met]
    return found


def _agent(note: RunNote) -> _Agent:
    coordinated_until = _last_written(note.log_dir, "coordinator")
    until = max(note.since, coordinated_until, _last_written(note.log_dir, "journal"))
    return _Agent(note, until, coordinated_until)


def _last_written(folder: str, kind: str) -> float:
    """Return when the last journal of this kind was written, in seconds since the epoch; 0 if there is none."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith(kind) and name.endswith(".jsonl")]
        return max((os.stat(os.path.join(folder, name)).st_mtime for name in names), default=0.0)
    except OSError:
        return 0.0
