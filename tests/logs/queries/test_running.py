"""``tenax logs`` of a running run, with real agents and workers."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from kit.addresses import own_endpoint
from kit.jobs import Done, Running, until
from tenax._failures.exit_codes import CANCELLED

from .conftest import Run

pytestmark = pytest.mark.process


def lines(done: Done | Running) -> list[str]:
    return done.out.splitlines()


def until_shown(follower: Running, text: str) -> None:
    until(
        lambda: text in follower.out or follower.process.poll() is not None,
        lambda: f"{text!r} in:\n{follower.out}\n---\n{follower.err}",
    )
    assert text in follower.out, (follower.out, follower.err)


def test_lines_are_shown_in_order_of_arrival(run: Run) -> None:
    """All; of one rank; of one stream; with a text; the last ones; and errors for what does not exist."""
    run.start("--nproc-per-node", "3")
    workers = run.hub.generation(3)
    for number in range(3):
        for rank in (1, 0):  # rank 2 is silent
            run.print_text(workers[rank], f"step {number}\n", to=1)
            run.settle()
    run.print_text(workers[0], "a warning\n", to=2)
    expected = [f"rank {rank} | step {number}" for number in range(3) for rank in (1, 0)] + ["rank 0 | a warning"]
    done = run.logs()
    assert (done.code, lines(done), done.err) == (0, expected, "")
    assert lines(run.logs("seen", "--rank", "1-2")) == [line for line in expected if "rank 1" in line]
    assert lines(run.logs("seen", "--stream", "stderr")) == ["rank 0 | a warning"]
    assert lines(run.logs("seen", "--grep", "step 2")) == expected[4:6]
    assert lines(run.logs("seen", "--last", "2", "--since", "1h")) == expected[-2:]
    assert lines(run.logs("seen", "--last", "all", "--generation", "1")) == expected
    timed = lines(run.logs("seen", "--times", "--last", "1"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} rank 0 \| a warning", timed[0])
    for arguments, message in (
        (["--rank", "2"], "no such lines"),
        (["--grep", "absent"], "no such lines"),
        (["--generation", "7"], "no generation 7 yet; the run is in generation 1"),
        (["--rank", "77"], "generation 1 has no rank 77; it has ranks 0 to 2"),
    ):
        done = run.logs("seen", *arguments)
        assert (done.code, done.out, done.err) == (1, "", f"tenax logs: {message}\n")
    run.finish(workers)


def test_any_output_of_a_worker_is_shown_safely(run: Run) -> None:
    """Invalid UTF-8, escape sequences, a progress bar, a huge line, an unfinished line."""
    run.start("--nproc-per-node", "1")
    (worker,) = run.hub.generation(1)
    run.print_text(worker, "\xff\x00 \x1b[31mred\x1b[0m \x1b]0;title\x07\n", to=2)
    run.print_text(worker, "\r10 %\r20 %\r30 %\n" + "windows\r\n", to=2)
    run.print_text(worker, "h" * 30_000 + "\n", to=2)
    run.print_text(worker, "what is it waiting for", to=2)
    shown = lines(run.logs("seen", "--stream", "stderr"))
    assert shown[0] == r"rank 0 | \xff\x00 red \x1b]0;title\x07"
    assert shown[1:3] == ["rank 0 | 30 %", "rank 0 | windows"]
    assert re.fullmatch(r"rank 0 \| h+ \[\.\.\. 13616 bytes left out \.\.\.\] h+", shown[3])
    assert shown[4:] == ["rank 0 | what is it waiting for"]
    run.finish([worker])


def test_bytes_that_are_no_longer_in_memory_are_reported(run: Run) -> None:
    run.start("--nproc-per-node", "1")
    (worker,) = run.hub.generation(1)
    text = "".join(f"{number:06} {'m' * 92}\n" for number in range(3000))
    run.print_text(worker, text)
    done = run.logs("seen", "--last", "all")
    assert done.code == 0
    shown = [line.removeprefix("rank 0 | ") for line in lines(done)]
    assert shown[0].startswith("[...] ")
    assert shown[1:] == text.splitlines()[-len(shown) + 1 :]
    (missing,) = re.findall(
        r"^tenax logs: (\d+) bytes of stdout of rank 0 in generation 1 are no longer in memory$", done.err, re.M
    )
    assert int(missing) + sum(len(line) + 1 for line in shown) - len("[...] ") == len(text)
    run.finish([worker])


def test_lines_of_an_earlier_generation_are_shown(run: Run) -> None:
    """Without log files."""
    run.start("--nproc-per-node", "2", "--max-restarts", "1")
    first = run.hub.generation(2)
    run.print_text(first[0], "all is well\n")
    # Read before the next line is printed: lines that the log writer reads in one turn have no order.
    assert lines(run.logs("seen")) == ["rank 0 | all is well"]
    run.print_text(first[1], "RuntimeError: boom\n", to=2)
    run.exit_worker(first[1], 1)
    second = run.hub.generation(2, number=2)
    run.print_text(second[1], "once more\n")
    assert lines(run.logs("seen", "--generation", "1", "--rank", "1")) == ["rank 1 | RuntimeError: boom"]
    assert lines(run.logs("seen")) == ["rank 1 | once more"]
    for last in ("all", "9"):
        assert lines(run.logs("seen", "--generation", "all", "--last", last)) == [
            "--- generation 1",
            "rank 0 | all is well",
            "rank 1 | RuntimeError: boom",
            "--- generation 2",
            "rank 1 | once more",
        ]
    run.finish(second)


def test_a_follower_gets_each_line_once_across_a_restart(run: Run) -> None:
    """In order, including the first ones of the next generation; it ends with the run."""
    run.start("--nproc-per-node", "2", "--max-restarts", "1")
    first = run.hub.generation(2)
    run.print_text(first[0], "before the follower\n")
    follower = run.follow("seen", "--follow")
    until_shown(follower, "before the follower")
    for number in range(20):
        run.print_text(first[number % 2], f"one {number}\n")
    run.exit_worker(first[0], 1)
    second = run.hub.generation(2, number=2)
    run.print_text(second[0], "two begins\n")
    until_shown(follower, "two begins")
    run.print_text(second[1], "two continues\n")
    until_shown(follower, "two continues")
    run.finish(second)
    done = follower.wait()
    assert done.code == 0, done
    shown = lines(done)
    assert shown[0] == "rank 0 | before the follower"
    assert [line for line in shown if line.startswith("rank 0 | one")] == [f"rank 0 | one {n}" for n in range(0, 20, 2)]
    assert [line for line in shown if line.startswith("rank 1 | one")] == [f"rank 1 | one {n}" for n in range(1, 20, 2)]
    assert shown[21:] == ["--- generation 2", "rank 0 | two begins", "rank 1 | two continues"]


@pytest.mark.parametrize("flags", [[], ["--tee", "3"], ["--redirects", "3"]], ids=["memory", "tee", "files"])
def test_a_follower_sees_why_the_run_failed(run: Run, flags: list[str]) -> None:
    """The last lines of every generation, printed just before a worker exits; then how the run ended."""
    run.start("--nproc-per-node", "2", "--max-restarts", "1", *flags)
    follower = run.follow("seen", "--follow")
    for number in (1, 2):
        workers = run.hub.generation(2, number=number)
        run.print_text(workers[1], f"begins {number}\n")
        until_shown(follower, f"begins {number}")
        run.print_and_exit(workers[0], "Traceback\n" + "  File\n" * 50 + "ValueError, unfinished", 1)
    done = follower.wait()
    output = ["rank 0 | Traceback", *["rank 0 |   File"] * 50, "rank 0 | ValueError, unfinished"]
    expected = ["rank 1 | begins 1", *output, "--- generation 2", "rank 1 | begins 2", *output]
    assert (done.code, lines(done)) == (0, expected)
    assert re.fullmatch(r"tenax logs: the run 'seen' failed: .*\n", done.err)
    assert run.agents[0].wait().code == 1


def test_a_follower_sees_the_last_lines_of_all_nodes(run: Run) -> None:
    """Whether connected to the agent with the coordinator, to another agent, or at the endpoint."""
    endpoint = own_endpoint()
    flags = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "tcp", "--rdzv-endpoint", endpoint]
    agents = [run.start(*flags), run.start(*flags)]
    workers = run.hub.generation(2)
    followers = [run.follow(str(agent.pid), "--follow") for agent in agents]
    followers.append(run.follow("seen", "--follow", "--endpoint", endpoint))
    for worker in workers:
        run.print_text(worker, f"begins {worker.rank}\n")
        for follower in followers:
            until_shown(follower, f"begins {worker.rank}")
    for worker in workers:
        run.print_and_exit(worker, f"last lines of {worker.rank}\n" * 100)
    for follower in followers:
        done = follower.wait()
        assert (done.code, done.err) == (0, "tenax logs: the run 'seen' succeeded: all 2 workers succeeded\n")
        for rank in (0, 1):
            output = [line for line in lines(done) if line.startswith(f"rank {rank} |")]
            assert output == [f"rank {rank} | begins {rank}"] + [f"rank {rank} | last lines of {rank}"] * 100
    for agent in agents:
        assert agent.wait().code == 0


def test_for_a_lost_node_the_location_of_its_lines_is_reported(run: Run) -> None:
    """Instead of an unknown rank."""
    endpoint = own_endpoint()
    flags = ["--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-backend", "tcp", "--rdzv-endpoint", endpoint]
    flags += ["--rdzv-conf", "last_call_timeout=600"]
    agent = run.start(*flags)
    lost = run.start(*flags)
    workers = run.hub.generation(4)
    run.print_text(workers[0], "of rank 0\n")
    run.print_text(workers[3], "of rank 3\n")
    workers[0].ask('{"stubborn": true}')  # generation 1 ends when this one does
    lost.send(signal.SIGKILL)
    agent.until_printed("stopping all workers")
    where = "its log files are on that host ('tenax logs FOLDER' shows them)"
    gone = f"tenax logs: the node of ranks 2 to 3 in generation 1 has left the run; {where}\n"
    done = run.logs("seen", "--rank", "3")
    assert (done.code, done.out, done.err) == (1, "", gone)
    done = run.logs("seen", "--rank", "0,3")
    assert (done.code, done.out, done.err) == (0, "rank 0 | of rank 0\n", gone)
    run.exit_worker(workers[0])
    workers = run.hub.generation(2, number=2)
    done = run.logs("seen", "--rank", "3", "--generation", "1")
    missing = f"tenax logs: no such lines; if the node of rank 3 has left the run, {where}\n"
    assert (done.code, done.out, done.err) == (1, "", missing)
    run.agents.remove(lost)
    run.runner.leaves_within_s = 1.0  # helpers of a killed agent exit by themselves
    run.finish(workers)


def test_ctrl_c_on_a_terminal_ends_with_a_newline(run: Run) -> None:
    """The shell's prompt does not follow the ``^C``."""
    from kit.jobs import TENAX, Terminal

    run.start("--nproc-per-node", "1")
    (worker,) = run.hub.generation(1)
    run.print_text(worker, "first\n")
    terminal = Terminal([*TENAX, "logs", "seen", "--follow"], run.runner, env={"TENAX_PRIVATE_DIR": run.private_dir})
    try:
        terminal.until("first\r\n")
        terminal.type(b"\x03")
        assert terminal.wait() == CANCELLED
        assert terminal.seen.endswith("first\r\n^C\r\n")
    finally:
        terminal.close()
    run.finish([worker])


def test_a_follower_of_one_generation_ends_with_it(run: Run) -> None:
    run.start("--nproc-per-node", "1", "--max-restarts", "1")
    (first,) = run.hub.generation(1)
    follower = run.follow("seen", "-f", "--generation", "1", "--grep", "x")
    run.print_text(first, "x1\ny\nx2\n")
    until_shown(follower, "x2")
    run.exit_worker(first, 1)
    second = run.hub.generation(1, number=2)
    done = follower.wait()
    assert (done.code, lines(done)) == (0, ["rank 0 | x1", "rank 0 | x2"])
    run.finish(second)


def test_a_follower_ends_when_its_reader_closes(run: Run) -> None:
    """``| head -1``: it ends with the next line, although the run continues."""
    run.start("--nproc-per-node", "1")
    (worker,) = run.hub.generation(1)
    run.print_text(worker, "first\n")
    reader, writer = os.pipe()
    follower = run.follow("seen", "--follow", stdout=writer)
    os.close(writer)
    assert os.read(reader, 100) == b"rank 0 | first\n"
    os.close(reader)
    run.print_text(worker, "second\n")
    done = follower.wait()
    assert (done.code, done.err) == (0, "")
    run.finish([worker])


def test_with_log_files_all_lines_can_be_shown(run: Run) -> None:
    """Also of streams that are not on the console."""
    run.start("--nproc-per-node", "2", "--redirects", "3")
    workers = run.hub.generation(2)
    text = "".join(f"{number:06} {'f' * 92}\n" for number in range(3000))
    run.print_text(workers[1], text)
    run.print_text(workers[0], "small\n")
    done = run.logs("seen", "--last", "all", "--rank", "1")
    assert (done.code, done.err) == (0, "")
    assert [line.removeprefix("rank 1 | ") for line in lines(done)] == text.splitlines()
    assert lines(run.logs("seen", "--grep", "000017 ")) == [f"rank 1 | 000017 {'f' * 92}"]
    run.finish(workers)


def test_lines_of_two_nodes_are_merged(run: Run) -> None:
    """Whichever agent is asked, and also remotely, at the endpoint."""
    endpoint = own_endpoint()
    flags = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "tcp", "--rdzv-endpoint", endpoint]
    run.start(*flags)
    run.start(*flags)
    workers = run.hub.generation(4)
    assert len({worker.agent for worker in workers}) == 2
    for number in range(2):
        for rank in (3, 0, 2, 1):
            run.print_text(workers[rank], f"step {number}\n")
            run.settle()
    expected = [f"rank {rank} | step {number}" for number in range(2) for rank in (3, 0, 2, 1)]
    done = run.logs("seen")
    assert (done.code, lines(done), done.err) == (0, expected, "")
    assert lines(run.logs("seen", "--rank", "0,3", "--last", "3")) == [
        "rank 0 | step 0",
        "rank 3 | step 1",
        "rank 0 | step 1",
    ]
    done = run.logs("seen", "--endpoint", endpoint, "--last", "all")
    assert (done.code, lines(done)) == (0, expected)
    follower = run.follow("seen", "--follow", "--last", "1")
    until_shown(follower, "rank 1 | step 1")
    for rank in range(4):
        run.print_text(workers[rank], "and now\n")
    for rank in range(4):
        until_shown(follower, f"rank {rank} | and now")
    run.finish(workers)
    done = follower.wait()
    expected = ["rank 1 | step 1", *(f"rank {rank} | and now" for rank in range(4))]
    assert (done.code, sorted(lines(done))) == (0, sorted(expected))


def test_the_death_of_a_log_writer_is_reported_to_followers(run: Run) -> None:
    """They continue; later queries report the lost lines too."""
    run.start("--nproc-per-node", "1")
    (worker,) = run.hub.generation(1)
    run.print_text(worker, "soon forgotten\n")
    follower = run.follow("seen", "--follow")
    until_shown(follower, "soon forgotten")
    (log_writer,) = [pid for pid, command in run.runner.alive().items() if "tenax-logs" in command]
    os.kill(log_writer, signal.SIGKILL)
    lost = "are lost: they were only in memory, and the log writer died"
    until(lambda: lost in follower.err, lambda: f"the lost lines; there is {follower.err}")
    run.print_text(worker, "continues\n")
    until_shown(follower, "continues")
    done = run.logs("seen")
    assert lines(done) == ["rank 0 | continues"]
    assert lost in done.err
    run.finish([worker])
    assert lines(follower.wait()) == ["rank 0 | soon forgotten", "rank 0 | continues"]


def test_ranks_have_colours_on_a_terminal(run: Run) -> None:
    from kit.jobs import TENAX, Terminal

    run.start("--nproc-per-node", "2")
    workers = run.hub.generation(2)
    run.print_text(workers[0], "\x1b[31mzero\x1b[0m\n")
    run.print_text(workers[1], "one\n")
    terminal = Terminal([*TENAX, "logs", "seen"], run.runner, env={"TENAX_PRIVATE_DIR": run.private_dir})
    try:
        assert terminal.wait() == 0
        names = re.findall(r"\x1b\[(\d+)mrank (\d) \|\x1b\[0m (\w+)", terminal.seen)
        assert sorted((rank, text) for _, rank, text in names) == [("0", "zero"), ("1", "one")]
        assert len({colour for colour, _, _ in names}) == 2
        assert "\x1b[31mzero" not in terminal.seen
    finally:
        terminal.close()
    run.finish(workers)


def test_invalid_arguments_are_rejected(run: Run, tmp_path: Path) -> None:
    for arguments, message in (
        (["--rank", "x"], "--rank: invalid ranks 'x'; write them as 0,3-5"),
        (["--rank", "5-3"], "--rank: invalid ranks '5-3'; write them as 0,3-5"),
        (["--stream", "both"], "--stream takes stdout or stderr, not 'both'"),
        (["--last", "-1"], "--last takes a number or 'all', not '-1'"),
        (["--generation", "first"], "--generation takes a number or 'all'"),
        (["--since", "soon"], "--since takes a time such as 30s"),
        (["--nonsense"], "unknown flag '--nonsense'"),
        (["a", "b"], "expected one run, not 2"),
        ([str(tmp_path / "none")], "no folder and no run"),
        ([str(tmp_path), str(tmp_path / "none")], f"no folder '{tmp_path / 'none'}'"),
        ([str(tmp_path)], "is not the log folder of a run: it has no journal.jsonl"),
        ([str(tmp_path), "--follow"], "--follow needs a run that is running"),
    ):
        done = run.logs(*arguments)
        assert (done.code, done.out) == (2, ""), done
        assert message in done.err
    done = run.logs("unknown")
    assert done.code == 1
    assert "no run 'unknown' on this host" in done.err
    done = run.logs("--help")
    assert done.code == 0
    assert "tenax logs my-run --follow" in done.out
