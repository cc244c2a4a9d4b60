"""The dashboard of a real job: two nodes, real workers, a real browser."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

from selenium.webdriver.common.keys import Keys

from kit.addresses import own_address
from kit.jobs import Runner
from kit.processes import until

from .browser import Page, start_browser
from .test_page import _WATCH

_SCRIPT = """
    from worker_kit import *

    print("I am rank", RANK, "of attempt", ATTEMPT, flush=True)
    ready()
    wait_for("go", 0)
"""


class Job:
    """Two agents; the one that serves the coordinator serves the page."""

    def __init__(self, runner: Runner, *flags: str) -> None:
        self.runner = runner
        script = runner.script(_SCRIPT)
        host = own_address()
        arguments = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint", f"{host}:29400", "--rdzv-id", "job"]
        arguments += ["--max-restarts", "2", "--dashboard", f"{host}:0", *flags, script]
        self.agents = [runner.start(*arguments) for _ in range(2)]

    def stderr(self) -> str:
        return "".join(agent.err for agent in self.agents)

    def link(self) -> str:
        found = until(lambda: re.search(r"dashboard: (http\S+)", self.stderr()), "the link")
        return found[1]

    def finish(self, attempt: int = 0) -> None:
        self.runner.leave_note("go", 0, attempt)
        for agent in self.agents:
            done = agent.wait()
            assert done.code == 0, done


def test_a_killed_worker_is_shown_within_a_second(runner: Runner, page: Page) -> None:
    """The failure and the next generation, within 1 s after the coordinator detected it."""
    job = Job(runner)
    page.open(job.link())
    pids = runner.pids(4)
    page.until_text("generations", "training")
    assert page.text("fact-workers") == "4"
    page.js(_WATCH)
    os.kill(pids[3], signal.SIGKILL)
    page.until_text("fact-generation", "2")
    runner.pids(4, attempt=1)
    failure = page.until_text("failure", "SIGKILL")
    assert "rank 3" in failure
    page.until_text("generations", "Ended: rank 3")
    page.until_true("window.seen.generations.some(([number]) => number === 2)")
    seen: Any = page.js("return [window.seen, window.gap / 1000]")
    late = [at - happened for happened, at, _ in seen[0]["events"]]
    formed: Any = page.js(
        "return fetch('status.json', {headers: {'X-Tenax-Key': new URLSearchParams(location.search).get('key')}})"
        ".then(answer => answer.json()).then(status => status.generations[1].formed_at)"
    )
    second = next(at for number, at in seen[0]["generations"] if number == 2) - formed
    print(f"a killed worker: {len(late)} events, the latest shown after {max(late):.2f} s, generation 2 {second:.2f} s")
    assert max(late) < 1.0 + seen[1]
    assert second < 1.0 + seen[1]
    job.finish(attempt=1)
    page.until_text("connection", "run ended")
    assert "The run succeeded." in page.text("notice")
    assert page.text("phase") == "✓ succeeded"
    assert page.browser_errors() == []


def test_the_log_of_a_worker_is_shown(runner: Runner, page: Page) -> None:
    """Also of the node that does not serve the page."""
    job = Job(runner)
    page.open(job.link())
    runner.pids(4)
    page.until_text("generations", "training")
    for node, local, rank in ((1, 1, 0), (2, 2, 3)):
        page.until_true(f"document.querySelectorAll('.node:nth-child({node}) .worker').length === 2")
        page.click(f".node:nth-child({node}) .worker:nth-child({local})")
        page.until_text("log-lines", f"I am rank {rank} of attempt 0")
        page.press(Keys.ESCAPE)
    job.finish()


def test_a_job_can_be_restarted_from_the_page(runner: Runner, page: Page) -> None:
    """The next generation has new workers; no restart is used."""
    job = Job(runner)
    page.open(job.link())
    first = runner.pids(4)
    page.until_text("generations", "training")
    (runner.notes / "ready.0.0").unlink()  # the next generation has the same restart count, and notes it again
    page.click("#restart")
    page.click("#ask-yes")
    page.until_text("ask-answer", "Done")
    page.until_text("fact-generation", "2")
    assert int(runner.note("ready")) not in first
    page.until_text("generations", "training")
    assert page.text("fact-restarts").startswith("0 used")
    job.finish()


def test_a_killed_browser_does_not_affect_the_job(runner: Runner, tmp_path_factory: Any) -> None:
    """During a stream: the job prints nothing about it."""
    driver = start_browser(str(tmp_path_factory.mktemp("browser")))
    job = Job(runner)
    try:
        Page(driver).open(job.link())
        runner.pids(4)
        for child in _children(driver.service.process.pid):
            os.kill(child, signal.SIGKILL)
    finally:
        driver.quit()
    job.finish()
    assert job.stderr().count("dashboard") == 1, job.stderr()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
