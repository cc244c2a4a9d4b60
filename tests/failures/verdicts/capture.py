"""Writes what the workers of a job printed as a case of ``played/``, one file per framework.

The texts are verbatim, with these exceptions: paths and names of the machine are replaced; frames of C++ and marks
below source lines are left out; of a long Python traceback the first and last frames are kept; workers that printed the
same but for numbers share a text. Of a worker that was stopped before it printed its exception, the text is that of its
error file.
"""

from __future__ import annotations

import re
import socket
import sys
import sysconfig
from pathlib import Path
from typing import Any

from tenax._core.model import AWAITED, EXITED_EARLY

from .framework_run import Result
from .frameworks import JOBS
from .played import NODES, SLOTS

_HERE = Path(__file__).parent
_NOISE = re.compile(
    r"(?:\[rank\d+\]: )?(?:frame #\d+: |    @ +0x|\s+[~^]+\s*$|C\+\+ CapturedTraceback|#\d+ |Extension modules: )"
)
_FRAME = re.compile(r"(?:\[rank\d+\]: )?  File \"")
_MAX_FRAMES = 3  # before and after what is left out
_MAX_LINES = 120
_UNPLAYABLE = {"out_of_memory"}  # the kernel's counters prove it, not the output


def save(results: list[Result]) -> None:
    """Write the cases; one of the same name is replaced."""
    order = {_title(job.name): number for number, job in enumerate(JOBS)}
    for framework in sorted({result.job.framework for result in results}):
        path = _HERE / "played" / f"{framework}.txt"
        old = path.read_text() if path.exists() else ""
        cases = {text.partition("\n")[0]: text for text in ("\n" + old).split("\n== ")[1:]}
        for result in results:
            if result.job.framework == framework and result.job.kind not in _UNPLAYABLE:
                case = _case(result)
                cases[case.partition("\n")[0]] = case
        texts = [cases[title] for title in sorted(cases, key=lambda title: order[f"{framework} {title}"])]
        path.write_text("".join(f"== {text.rstrip()}\n\n" for text in texts).rstrip() + "\n")


def _title(name: str) -> str:
    return name.replace("_", " ")


def _case(result: Result) -> str:
    report = result.report
    failures = [report["first_cause"], *report["other_failures"]]
    consequences = len(report["victims"])
    lines = [
        _title(result.job.name).partition(" ")[2],
        f"expect {result.job.kind} of {report['first_cause']['rank']}",
        f"counts {len(failures) - consequences} {consequences}",
    ]
    groups: dict[tuple[str, str], tuple[list[int], str]] = {}
    for failure in failures:
        how, text = _left(failure, result.stderr.get(failure["rank"], ""))
        groups.setdefault((how, re.sub(r"\d+", "0", text)), ([], text))[0].append(failure["rank"])
    for (how, _), (ranks, text) in groups.items():
        lines += [f"-- {','.join(map(str, ranks))} {how}", *([text] if text else [])]
    accounted = {each["rank"] for each in (*failures, *report["stopped"])}
    if done := [rank for rank in range(NODES * SLOTS) if rank not in accounted]:
        lines.append(f"-- {','.join(map(str, done))} done")
    return "\n".join(lines)


def _left(failure: dict[str, Any], stderr: str) -> tuple[str, str]:
    """Return how a worker ended and what it printed."""
    if failure["cause"] == EXITED_EARLY:
        return "done", ""
    if failure["cause"] in AWAITED:
        return "silent", _clean("\n".join(failure["last_lines"]))
    code = failure["exit_code"]
    if failure["message"] and code in (-15, -9):  # it had failed before tenax stopped it
        code = 1
    is_printed = failure["message"][:60] in stderr.replace("\n", " ")
    if not is_printed and not failure["traceback"] and failure["error_type"]:
        return "raises", _clean(failure["message"])  # known from its error file, of which the report has one line
    return f"exit {code}", _clean(stderr if is_printed or not failure["traceback"] else failure["traceback"])


def _clean(text: str) -> str:
    lines = [line.rstrip() for line in text.rstrip().split("\n") if not _NOISE.match(line)]
    text = "\n".join(_with_few_frames(lines)[-_MAX_LINES:])
    for path, name in (
        (str(_HERE), "/job"),
        (sysconfig.get_path("stdlib"), "/usr/lib/python3"),
        (sys.prefix, "/venv"),
    ):
        text = text.replace(path, name)
    text = re.sub(r"/[^\s\"']*/site-packages\b", "/venv/lib/python3/site-packages", text)
    text = re.sub(r"/\S*/(?:tenax-lane-[^/\s'\"]+|corpus_\w+)/[a-z_0-9]+(?=[/'\"\s.:,]|$)", "/job", text)
    text = re.sub(r"/\S*/failures/verdicts\b", "/job", text)
    text = re.sub(r"[\x00-\x08\x0b-\x1f]", "", text)
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node0", text)
    # A line must not look like the beginning of a case or of a worker.
    return "\n".join(line if not line.startswith(("== ", "-- ")) else " " + line for line in text.split("\n")).strip(
        "\n"
    )


def _with_few_frames(lines: list[str]) -> list[str]:
    """Leave out the frames in the middle of long tracebacks."""
    kept: list[str] = []
    frames: list[list[str]] = []
    for line in [*lines, ""]:
        if _FRAME.match(line):
            frames.append([line])
        elif frames and re.match(r"(?:\[rank\d+\]: )?    ", line):
            frames[-1].append(line)
        else:
            chosen = frames if len(frames) <= 2 * _MAX_FRAMES else frames[:_MAX_FRAMES] + frames[-_MAX_FRAMES:]
            kept += [each for frame in chosen for each in frame]
            frames = []
            kept.append(line)
    return kept[:-1]
