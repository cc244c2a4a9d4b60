"""What only Slurm's controller knows, asked with ``scontrol``: how long the job may run, whether it is preempted."""

from __future__ import annotations

import subprocess
import time

_TIMEOUT_S = 10.0


def scontrol(*arguments: str) -> str:
    """Return what scontrol prints. Times are in seconds since the epoch. Raises OSError with the reason."""
    command = ("env", "SLURM_TIME_FORMAT=%s", "scontrol", "-o", *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"scontrol did not answer within {_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise OSError((done.stderr.strip() or f"scontrol exited with {done.returncode}").splitlines()[-1])
    return done.stdout


def records(text: str) -> list[dict[str, str]]:
    """Parse the output of ``scontrol -o show``: one record per line."""
    return [dict(word.partition("=")[::2] for word in line.split() if "=" in word) for line in text.splitlines()]


def seconds_left(job: str) -> float | None:
    """Return the seconds until Slurm stops the job: its time limit, or the end of the grace time of a preemption."""
    try:
        found = records(scontrol("show", "job", job))
    except OSError:
        return None
    end = found[0].get("EndTime", "") if found else ""
    return max(1.0, int(end) - time.time()) if end.isdecimal() else None


def requeue(job: str) -> str:
    """Requeue the job if it is being preempted and its batch script would otherwise end it."""
    try:
        found = records(scontrol("show", "job", job))
        if not found or not should_requeue(found[0]):
            return ""
        scontrol("requeue", job)
    except OSError as error:
        return f"could not requeue the preempted Slurm job {job}: {error}"
    return f"requeued the preempted Slurm job {job}"


def should_requeue(record: dict[str, str]) -> bool:
    """Whether a job that still runs is being preempted. A job that was cancelled has another state."""
    return (
        record.get("JobState") == "RUNNING"
        and record.get("PreemptTime", "None") not in ("None", "Unknown", "N/A")
        and record.get("Requeue") == "1"
        and record.get("BatchFlag") == "1"
    )
