"""A run that is over, as the notes of its agents on this host tell: where they have left what they wrote.

Several of its agents may have run here, one after the other or side by side, and its id may have been used before. One
agent's note leads to the others of the same run: those that met at the same place while one of them lived.
"""

from __future__ import annotations

import os

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tenax._node.control_socket import RunNote

_OF_COORDINATORS, _OF_AGENTS = "coordinator", "journal"


class EndedRun(msgspec.Struct, frozen=True):
    run_id: str
    folders: tuple[str, ...]  # that are there; first the one with the coordinator's last journal, else the last end
    noted: tuple[str, ...] = ()  # all that there were


class _Stay(msgspec.Struct, frozen=True):
    """An agent of the run, and how long it was in it, as far as its files tell."""

    note: RunNote
    until: float
    coordinated_until: float


def ended_run(name: str, environ: Mapping[str, str] = os.environ) -> EndedRun | None:
    """The last run on this host with this id, or with an agent of this pid; None: nothing is noted. Raises OSError."""
    from tenax._node.control_socket import last_runs

    notes = last_runs(environ)
    latest = next((note for note in notes if name in (note.run_id, str(note.pid))), None)
    if latest is None:
        return None
    stays = [_stay(note) for note in notes if note.which_run == latest.which_run]
    ours = _together_with(next(stay for stay in stays if stay.note is latest), stays)
    ours.sort(key=lambda stay: (stay.coordinated_until, stay.until), reverse=True)
    noted = tuple(dict.fromkeys(stay.note.log_dir for stay in ours if stay.note.log_dir))
    return EndedRun(latest.run_id, tuple(folder for folder in noted if os.path.isdir(folder)), noted)


def _together_with(first: _Stay, stays: Iterable[_Stay]) -> list[_Stay]:
    """It, and whoever was there at the same time as one that was there at the same time ..."""
    ours, others = [first], [stay for stay in stays if stay is not first]
    for one in ours:  # grows meanwhile
        met = [other for other in others if other.note.since <= one.until and one.note.since <= other.until]
        ours += met
        others = [other for other in others if other not in met]
    return ours


def _stay(note: RunNote) -> _Stay:
    coordinated_until = _last_written(note.log_dir, _OF_COORDINATORS)
    until = max(note.since, coordinated_until, _last_written(note.log_dir, _OF_AGENTS))
    return _Stay(note, until, coordinated_until)


def _last_written(folder: str, kind: str) -> float:
    """When the last journal of this kind was, in seconds since the epoch; 0: there is none."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith(kind) and name.endswith(".jsonl")]
        return max((os.stat(os.path.join(folder, name)).st_mtime for name in names), default=0.0)
    except OSError:
        return 0.0
