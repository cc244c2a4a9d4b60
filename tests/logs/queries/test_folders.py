"""``tenax logs FOLDER``: the lines of a finished run, from its files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kit.addresses import own_endpoint

from .conftest import Run
from .test_running import lines

pytestmark = pytest.mark.process


def make(run: Run) -> list[str]:
    """Run two generations; return the printed lines in their order."""
    run.start("--nproc-per-node", "2", "--max-restarts", "1", "--redirects", "3")
    first = run.hub.generation(2)
    for rank in (1, 0, 1):
        run.print_text(first[rank], "working\n")
        run.settle()
    run.print_text(first[0], "ValueError\n", to=2)
    run.exit_worker(first[0], 1)
    second = run.hub.generation(2, number=2)
    run.print_text(second[1], "no newline at the end")
    run.finish(second)
    return [
        "--- generation 1",
        "rank 1 | working",
        "rank 0 | working",
        "rank 1 | working",
        "rank 0 | ValueError",
        "--- generation 2",
        "rank 1 | no newline at the end",
    ]


def test_lines_of_a_finished_run_are_shown(run: Run) -> None:
    """By its folder, by the parent folder, and by its run id; with the same filters as for a running one."""
    expected = make(run)
    folder = run.runner.run_dir()
    # Times are known to a tenth of a second; lines that came closer to each other than that keep their order per rank.
    for path in (str(folder), str(run.runner.home / "logs")):
        done = run.logs(path, "--generation", "all")
        assert done.code == 0, done
        assert (sorted(lines(done)), done.err) == (sorted(expected), "")
        assert lines(done)[0] == "--- generation 1"
        assert lines(done)[5:] == expected[5:]
    assert lines(run.logs(str(folder))) == ["rank 1 | no newline at the end"]
    done = run.logs("seen", "--generation", "1", "--stream", "stderr")
    assert lines(done) == ["rank 0 | ValueError"]
    assert "the run 'seen' has ended; reading its folder" in done.err
    done = run.logs(str(folder), "--generation", "all", "--last", "all", "--rank", "1")
    assert lines(done) == ["--- generation 1", "rank 1 | working", "rank 1 | working", *expected[5:]]
    done = run.logs(str(folder), "--grep", "absent")
    assert (done.code, done.out, done.err) == (1, "", "tenax logs: no such lines\n")


def test_a_last_generation_without_output_is_reported_with_the_next_step(run: Run) -> None:
    run.start("--redirects", "3")
    run.finish(run.hub.generation(1))
    done = run.logs(str(run.runner.run_dir()))
    silent = "the workers of the last generation wrote nothing; '--generation all' also shows the earlier ones"
    assert (done.code, done.out, done.err) == (1, "", f"tenax logs: {silent}\n")


def test_without_times_lines_are_shown_file_by_file(run: Run) -> None:
    """For files of an older tenax, or copied without their times; a note is printed."""
    make(run)
    folder = run.runner.run_dir()
    shutil.rmtree(folder / "journal.times")
    done = run.logs(str(folder), "--generation", "1", "--times")
    assert "files have no times" in done.err
    assert [line.strip() for line in lines(done)] == [
        "rank 0 | working",
        "rank 0 | ValueError",
        "rank 1 | working",
        "rank 1 | working",
    ]


def test_folders_of_two_nodes_of_a_run_are_merged(run: Run) -> None:
    flags = ["--nnodes", "2", "--rdzv-backend", "tcp", "--rdzv-endpoint", own_endpoint(), "--tee", "3"]
    run.start(*flags)
    run.start(*flags)
    workers = run.hub.generation(2)
    run.print_text(workers[1], "from one\n")
    run.print_text(workers[0], "from zero\n")
    run.finish(workers)
    folders = sorted(str(path) for path in (run.runner.home / "logs").iterdir())
    assert len(folders) == 2
    for arguments in (folders, [str(run.runner.home / "logs")]):
        done = run.logs(*arguments)
        assert (done.code, sorted(lines(done))) == (0, ["rank 0 | from zero", "rank 1 | from one"])


def test_invalid_log_folders_are_rejected(run: Run, tmp_path: Path) -> None:
    run.start("--nproc-per-node", "1")
    run.finish(run.hub.generation(1))
    folder = run.runner.run_dir()
    done = run.logs(str(folder))
    assert (done.code, done.out) == (1, "")
    assert "the run wrote no log files" in done.err
    other = run.runner.home / "logs" / "other"
    shutil.copytree(folder, other)
    journal = other / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"run_id":"seen"', '"run_id":"other"'))
    done = run.logs(str(run.runner.home / "logs"))
    assert (done.code, done.out) == (2, "")
    assert "has several runs; select one: " in done.err
    journal.write_text("nonsense\n")
    done = run.logs(str(other))
    assert done.code == 2
    assert "is not a line of a tenax journal" in done.err
