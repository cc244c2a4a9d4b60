"""The command: jobs of real frameworks fail on two nodes with four workers each, and the reports are checked.

./dev corpus                        every job; prints the score
./dev corpus --only ddp --jobs 2    those whose name contains it
./dev corpus --capture              also write what the workers printed to tests/failures/verdicts/played/
./dev corpus --keep FOLDER          keep the files of each job; jobs that have files there are not run again
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from failures.verdicts.capture import save
from failures.verdicts.framework_run import Result, run
from failures.verdicts.frameworks import JOBS, Job
from lanes import print_line


def main(argv: list[str] | None = None) -> int:
    """Return 1 if a verdict was wrong."""
    options = _parser().parse_args(argv)
    chosen = [job for job in JOBS if any(part in job.name for part in options.only.split(","))]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tenax-lane-", ignore_cleanup_errors=True) as home:
        folder = Path(options.keep or home)
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(functools.partial(_run, folder), chosen))
        if options.capture:
            save([result for result in results if not result.errors])
    wrong = [result.job.name for result in results if result.errors]
    print_line(
        f"{len(results) - len(wrong)} right of {len(results)}, in {time.monotonic() - began:.0f} s"
        + (f"; wrong: {', '.join(wrong)}" if wrong else "")
    )
    return 1 if wrong else 0


def _run(folder: Path, job: Job) -> Result:
    began = time.monotonic()
    try:
        result = run(job, folder / job.name)
    except Exception as error:  # one job must not end the others
        result = Result(job, [f"{type(error).__name__}: {error}"], {}, {}, "")
    took = f"{job.name} ({time.monotonic() - began:.0f} s)"
    print_line(f"{took}: {'; '.join(result.errors)}\n{result.report_text}" if result.errors else f"{took}: right")
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="./dev corpus", description="Check the diagnosis of failures of frameworks.")
    parser.add_argument("--only", default="", help="parts of the names of jobs, separated by commas (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="jobs at a time (default: 2)")
    parser.add_argument("--keep", default="", metavar="FOLDER", help="keep the files of each job, and use them again")
    parser.add_argument("--capture", action="store_true", help="write the output of right jobs as played cases")
    return parser


if __name__ == "__main__":
    sys.exit(main())
