"""Logs specs: names of files and directories; nothing is erased."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tenax._logs.specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, load_logs_specs


def environments(count: int, run_id: str = "job", restart: int = 0) -> dict[int, dict[str, str]]:
    return {rank: {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": str(restart)} for rank in range(count)}


def test_the_layout_is_that_of_torchelastic(tmp_path: Path) -> None:
    """Run directory, attempt, local rank; the error file is in the environment."""
    specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL)
    envs = environments(2)
    made = specs.reify(envs)
    run = Path(specs.run_log_dir)
    assert run.parent == tmp_path
    assert run.name.startswith("job_")
    assert len(run.name) == len("job_") + 4
    assert made.stdouts == {rank: str(run / "attempt_0" / str(rank) / "stdout.log") for rank in range(2)}
    assert made.stderrs == {rank: str(run / "attempt_0" / str(rank) / "stderr.log") for rank in range(2)}
    assert made.tee_stdouts == made.tee_stderrs == {}
    assert made.error_files == {rank: str(run / "attempt_0" / str(rank) / "error.json") for rank in range(2)}
    assert [env["TORCHELASTIC_ERROR_FILE"] for env in envs.values()] == list(made.error_files.values())
    assert made.filtered_stdout == str(run / "attempt_0" / "filtered_stdout.log")
    assert made.filtered_stderr == str(run / "attempt_0" / "filtered_stderr.log")
    assert sorted(os.listdir(run / "attempt_0")) == ["0", "1"]


def test_a_teed_stream_is_also_written_to_a_file(tmp_path: Path) -> None:
    """Whether or not it is redirected; other streams stay on the console."""
    made = DefaultLogsSpecs(str(tmp_path), redirects={0: Std.ERR}, tee={0: Std.OUT, 1: Std.ALL}).reify(environments(3))
    assert made.tee_stdouts == {0: made.stdouts[0], 1: made.stdouts[1]}
    assert made.tee_stderrs == {1: made.stderrs[1]}
    assert made.stdouts[0].endswith("0/stdout.log")
    assert made.stderrs[0].endswith("0/stderr.log")
    assert made.stdouts[2] == made.stderrs[2] == ""


def test_a_map_may_name_ranks_of_two_digits(tmp_path: Path) -> None:
    tee = Std.from_str("0:1,11:2")
    made = DefaultLogsSpecs(str(tmp_path), tee=tee).reify(environments(12))
    assert list(made.tee_stdouts) == [0]
    assert list(made.tee_stderrs) == [11]
    assert made.stderrs[11].endswith("11/stderr.log")


def test_ranks_outside_the_filter_are_not_shown(tmp_path: Path) -> None:
    """They are not teed, and streams without a file are dropped. An empty filter filters nothing."""
    made = DefaultLogsSpecs(str(tmp_path), redirects=Std.NONE, tee=Std.OUT, local_ranks_filter={1}).reify(
        environments(2)
    )
    assert list(made.tee_stdouts) == [1]
    assert made.stdouts[0].endswith("0/stdout.log")
    assert made.stderrs == {0: os.devnull, 1: ""}
    all_ranks = DefaultLogsSpecs(str(tmp_path), tee=Std.OUT, local_ranks_filter=set()).reify(environments(2))
    assert list(all_ranks.tee_stdouts) == [0, 1]


def test_devnull_as_log_directory_writes_no_files() -> None:
    """No directories and no error file either; tee still shows lines."""
    specs = DefaultLogsSpecs(os.devnull, redirects=Std.ERR, tee=Std.OUT)
    envs = environments(2)
    made = specs.reify(envs)
    assert made.stdouts == made.stderrs == {0: "", 1: ""}
    assert made.tee_stdouts == {0: os.devnull, 1: os.devnull}
    assert made.error_files == {0: "", 1: ""}
    assert envs[0]["TORCHELASTIC_ERROR_FILE"] == ""
    assert made.filtered_stdout == made.filtered_stderr == ""
    assert specs.run_log_dir == ""
    assert specs.root_log_dir == os.devnull


def test_an_earlier_attempt_is_never_erased(tmp_path: Path) -> None:
    """A second start with the same restart count gets its own directory."""
    specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL)
    first = specs.reify(environments(1))
    Path(first.stdouts[0]).write_text("evidence")
    Path(first.error_files[0]).write_text("{}")
    second, third = specs.reify(environments(1)), specs.reify(environments(1))
    assert Path(first.stdouts[0]).read_text() == "evidence"
    assert len({first.stdouts[0], second.stdouts[0], third.stdouts[0]}) == 3
    assert sorted(os.listdir(specs.run_log_dir)) == ["attempt_0", "attempt_0.1", "attempt_0.2"]
    assert specs.reify(environments(1, restart=1)).stdouts[0].endswith("attempt_1/0/stdout.log")


@pytest.mark.parametrize(
    "run_id", ["a/b", "../../up", "..", "", "with space", "x" * 400, "ß" * 300, "a\0b", "a\nb", "$(x)"]
)
def test_any_run_id_becomes_one_directory(tmp_path: Path, run_id: str) -> None:
    """One level below the log directory, whatever the run id."""
    specs = DefaultLogsSpecs(str(tmp_path))
    specs.reify(environments(1, run_id=run_id))
    assert os.path.dirname(specs.run_log_dir) == str(tmp_path)
    assert len(os.listdir(tmp_path)) == 1


def test_directories_are_created_by_the_first_start(tmp_path: Path) -> None:
    """With their parents; creating the specs creates nothing."""
    specs = DefaultLogsSpecs(str(tmp_path / "a" / "b"))
    assert not os.listdir(tmp_path)
    run = specs.open_run_log_dir("job")
    assert os.path.isdir(run)
    assert specs.run_log_dir == run
    assert specs.reify(environments(1)).error_files[0].startswith(run)


def test_the_default_is_a_temporary_directory(tmp_path: Path) -> None:
    """A new private one below TMPDIR, created once."""
    saved = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(tmp_path)
    try:
        specs = DefaultLogsSpecs()
        root = specs.root_log_dir
        assert os.path.dirname(root) == str(tmp_path)
        assert os.stat(root).st_mode & 0o777 == 0o700
        assert specs.root_log_dir == root
        assert os.path.dirname(specs.run_log_dir) == root
    finally:
        del os.environ["TMPDIR"]
        if saved is not None:
            os.environ["TMPDIR"] = saved


def test_a_file_as_log_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file; choose another path"):
        DefaultLogsSpecs(str(tmp_path / "file"))


def test_specs_and_destinations_are_values(tmp_path: Path) -> None:
    """They compare by content and show it; destinations are mutable and take positional arguments."""
    one, other = DefaultLogsSpecs(str(tmp_path), tee=Std.OUT), DefaultLogsSpecs(str(tmp_path), tee=Std.OUT)
    assert one == other
    assert one != DefaultLogsSpecs(str(tmp_path), tee=Std.ERR)
    assert str(tmp_path) in repr(one)
    made = LogsDest({0: "a"}, {0: "b"}, error_files={0: "e"})
    made.filtered_stdout = "f"
    assert made == LogsDest({0: "a"}, {0: "b"}, {}, {}, {0: "e"}, "f", "")
    assert LogsDest().stdouts is not LogsDest().stdouts


def test_an_unknown_name_is_rejected_with_the_known_ones() -> None:
    """The default needs no search."""
    assert load_logs_specs(None) is load_logs_specs("default") is DefaultLogsSpecs
    assert issubclass(DefaultLogsSpecs, LogsSpecs)
    with pytest.raises(
        ValueError, match=r"unknown logs specs 'unregistered'; known in the entry-point group .*: .*default"
    ):
        load_logs_specs("unregistered")


@pytest.mark.process
def test_a_plugin_is_loaded_from_the_entry_point_group(tmp_path: Path) -> None:
    """torchrun.logs_specs."""
    import subprocess
    import sys

    (tmp_path / "my_specs.py").write_text(
        "from tenax._logs.specs import LogsSpecs, LogsDest\n"
        "class MySpecs(LogsSpecs):\n"
        "    def reify(self, envs): return LogsDest(filtered_stdout='mine')\n"
        "    @property\n"
        "    def root_log_dir(self): return ''\n"
    )
    info = tmp_path / "my_specs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-specs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nmine = my_specs:MySpecs\n")
    code = "from tenax._logs.specs import load_logs_specs; print(load_logs_specs('mine')().reify({}).filtered_stdout)"
    source = str(Path(__file__).parents[2] / "src")
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{source}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout == "mine\n"
