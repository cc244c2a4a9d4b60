"""Ended runs, from the notes that their agents left on this host.

Several agents of a run may have run here, in parallel or one after another, and its id may have been used before.
Agents belong to the same run if they had the same run id and rendezvous, and their lifetimes overlap.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import msgspec

from tenax._core.text import some_of
from tenax._node.run_notes import RunNote, last_runs
from tenax.cli.command import NoSuchJob


class EndedRun(msgspec.Struct, frozen=True):
    run_id: str
    folders: tuple[str, ...]  # that still exist; the coordinator's last folder first, else the one written last
    notes: tuple[RunNote, ...]  # of its agents on this host, in the same order
    ended: float = 0.0  # the last sign of it, in seconds since the epoch

    @property
    def noted(self) -> tuple[str, ...]:
        """All log folders, including removed ones."""
        return _distinct(note.log_dir for note in self.notes)

    @property
    def outcome(self) -> str:
        """Empty: its agents were killed."""
        return next((note.outcome for note in self.notes if note.outcome), "")


class _Agent(msgspec.Struct, frozen=True):
    """An agent's note, and how long it and its coordinator ran, judged by their files."""

    note: RunNote
    until: float
    coordinated_until: float


def ended_run(name: str, environ: Mapping[str, str] | None = None) -> EndedRun | None:
    """Return the last ended run on this host with this run id, agent pid or beginning of a run id; "": the last one.

    Raises OSError, and ``NoSuchJob`` if several run ids begin so.
    """
    runs = ended_runs(environ)
    exact = [run for run in runs if name == run.run_id or name in (str(note.pid) for note in run.notes)]
    found = exact or [run for run in runs if run.run_id.startswith(name)]
    ids = _distinct(run.run_id for run in found)
    if name and len(ids) > 1 and not exact:
        raise NoSuchJob(f"{len(ids)} ended runs begin with {name!r}: {some_of(list(ids))}")
    return found[0] if found else None


def ended_runs(environ: Mapping[str, str] | None = None) -> list[EndedRun]:
    """Return the ended runs on this host, the latest first. Raises OSError."""
    agents = [_agent(note) for note in last_runs(environ)]
    runs = []
    while agents:
        same_run = _overlapping(agents[0], [each for each in agents if each.note.which_run == agents[0].note.which_run])
        agents = [agent for agent in agents if agent not in same_run]
        same_run.sort(key=lambda agent: (agent.coordinated_until, agent.until), reverse=True)
        notes = tuple(agent.note for agent in same_run)
        folders = tuple(folder for folder in _distinct(note.log_dir for note in notes) if os.path.isdir(folder))
        runs.append(EndedRun(notes[0].run_id, folders, notes, max(agent.until for agent in same_run)))
    return runs


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in texts if text))


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
    until = note.ended or max(note.since, coordinated_until, _last_written(note.log_dir, "journal"))
    return _Agent(note, until, coordinated_until)


def _last_written(folder: str, kind: str) -> float:
    """Return when the last journal of this kind was written, in seconds since the epoch; 0 if there is none."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith(kind) and name.endswith(".jsonl")]
        return max((os.stat(os.path.join(folder, name)).st_mtime for name in names), default=0.0)
    except OSError:
        return 0.0
