"""``tenax status [RUN_ID]``: shows the status of a run on one screen, once or until the run ends."""

from __future__ import annotations

import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from shutil import get_terminal_size

from tenax._core.requests import StatusRequest
from tenax._engines.tcp.operator import ConnectionLost, Declined
from tenax._view.status import RunStatus
from tenax._view.text import outcome_text
from tenax.cli.command import NoSuchJob, print_json
from tenax.cli.job import SELECTOR_HELP, Job, JobSelector, NotResponding, RunHasEnded, find_job, parse_job_arguments
from tenax.cli.run import allows_colour, is_terminal, print_page, print_stderr
from tenax.cli.status_screen import event_lines, render

STATUS_USAGE = f"""\
usage: tenax status [RUN_ID] [--watch] [--json] [--endpoint HOST:PORT ...]

Show the status of a run: its phase and what it waits for, generation and restarts, how its time was spent, its nodes,
failures and last events.

  tenax status                                the only run on this host, or how the last one ended
  tenax status llama                          one of several, by its run id ('tenax ps' lists them)
  tenax status --watch                        refresh until the run ends, or Ctrl-C; to a pipe: one line per event
  tenax status llama --json                   for programs
  tenax status llama --endpoint host0:29400 --rdzv-conf token_file=FILE
                                              from a host without a node of the run

{SELECTOR_HELP}
Exit code 0: the status was shown, even if the run failed. 1: there is no such run, or it does not respond. 2: wrong
usage.
"""

_WAIT_S = 1.0  # refresh at least this often, because ages are shown
_RETRY_S = 1.0  # after a failed request: there is no event for the run becoming reachable
_MAX_TRIES = 30  # in a row, to find the run again


def status(argv: Sequence[str]) -> int:
    arguments = parse_job_arguments(argv, switches=("--watch", "--json"))
    selector = JobSelector.of(arguments)
    as_json = "--json" in arguments.switches
    try:
        found = find_job(selector)
    except RunHasEnded as error:
        return _show_ended(error, as_json=as_json)
    with found as job:
        if "--watch" in arguments.switches:
            try:
                return _Watch(selector, job, as_json=as_json).run()
            except KeyboardInterrupt:
                print_page("\n" if is_terminal(sys.stdout) else "")
                return 0
        status = _ask(job)
    if as_json:
        return print_json(status, indent=2)
    if is_terminal(sys.stdout):
        return print_page(render(status, get_terminal_size().columns, colour=allows_colour(sys.stdout)), is_styled=True)
    return print_page(render(status, max(80, get_terminal_size().columns)))


def _show_ended(error: RunHasEnded, *, as_json: bool) -> int:
    from tenax._view.summary import format_summary, summary_of
    from tenax.cli.journal_commands import read_histories

    histories = read_histories(error.ended.folders).histories
    if not histories:
        raise error
    if as_json:
        return print_json(summary_of(histories).runs[-1], indent=2)
    return print_page(format_summary(summary_of(histories)))


def _ask(job: Job, mark: str = "") -> RunStatus:
    return job.ask(StatusRequest(mark, _WAIT_S if mark else 0.0, with_activity=True), RunStatus)


def is_reader_gone(within_s: float = 0.0) -> bool:
    """Return True if the reader of stdout has closed the pipe (``| head``), or closes it within this time."""
    waiter = select.poll()
    if sys.stdout is not None:
        with suppress(OSError):  # an object in this process that has no descriptor
            waiter.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in waiter.poll(within_s * 1000))


# --- --watch ----------------------------------------------------------------------------------------------------------


class _Watch:
    """Shows the run after every change, until it ends.

    On a terminal the screen is redrawn in place. This changes no terminal mode, so nothing has to be restored, even
    after SIGKILL. A pipe or file gets one line per event; with ``as_json``, one JSON value per line.
    """

    def __init__(self, selector: JobSelector, job: Job, *, as_json: bool) -> None:
        self._selector = selector
        self._job = job
        self._as_json = as_json
        self._is_screen = is_terminal(sys.stdout) and not as_json
        self._has_drawn = False
        self._shown_until = -1.0  # the time of the last event
        self._mark = ""
        self._last_message = ""

    def run(self) -> int:
        while True:
            try:
                status = _ask(self._job, self._mark)
            except Declined as error:  # the agent runs, but has lost its coordinator
                self._print(f"the run does not respond, retrying: {error}")
                self._mark = ""
                if is_reader_gone(_RETRY_S):
                    return 0
                continue
            except ConnectionLost:
                if not self._reconnect():
                    return 0
                continue
            has_changed = status.mark != self._mark or self._is_screen
            self._mark, self._last_message = status.mark, ""
            failed = self._show(status) if has_changed else 0
            if failed or is_reader_gone():
                return failed
            if status.outcome:
                if not self._as_json:
                    self._print(outcome_message(status))
                return 0

    def _show(self, status: RunStatus) -> int:
        if self._as_json:
            return print_json(status)
        if self._is_screen:
            width, height = get_terminal_size()
            text = render(status, width, height - 1, colour=allows_colour(sys.stdout))
            begin = "\x1b[H" if self._has_drawn else "\x1b[H\x1b[2J"
            self._has_drawn = True
            return print_page(begin + text.replace("\n", "\x1b[K\n") + "\x1b[J", is_styled=True)
        lines = event_lines(status, self._shown_until)
        self._shown_until = max((self._shown_until, *(event.at for event in status.events)))
        return print_page("".join(f"{line}\n" for line in lines))

    def _reconnect(self) -> bool:
        """Find the run again: its coordinator may have moved, or its agent here has exited. False if it is gone."""
        self._job.close()
        self._mark = ""
        for _ in range(_MAX_TRIES):
            try:
                self._job = find_job(self._selector)
            except NoSuchJob as error:
                self._print(str(error))
                is_gone = not self._selector.endpoint and not isinstance(error, NotResponding)
                if is_gone or is_reader_gone(_RETRY_S):
                    return False
            else:
                return True
        return False

    def _print(self, text: str) -> None:
        """Print a message unless it repeats the last one."""
        if text != self._last_message:
            self._last_message = text
            print_stderr(f"tenax status: {text}")


def outcome_message(status: RunStatus) -> str:
    ended = outcome_text(status.outcome) or "has ended"
    return f"the run {status.run_id!r} {ended}" + (f": {status.why}" if status.why else "")
