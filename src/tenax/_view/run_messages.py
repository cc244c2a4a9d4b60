"""Messages for people about the events and commands of a coordinator. Pure.

A node is named after its host, with a number if several nodes run on one host.
"""

from __future__ import annotations

from collections.abc import Mapping

from tenax._core import coordinator as run
from tenax._core import events, messages
from tenax._core.coordinator import AnyCoordinatorEvent, Send
from tenax._core.model import assert_never
from tenax._core.text import format_duration, format_seconds
from tenax._view.text import exit_summary

_MAX_NAMES = 4


class RunMessages:
    """Call ``lines_for`` for every step, in order."""

    def __init__(self, names: Mapping[str, str] = {}) -> None:
        """``names``: of nodes that joined before the first step."""
        self._names_given = names
        self._hosts: dict[str, list[str]] = {}  # host -> its nodes, in the order they joined
        self._host_of: dict[str, str] = {}
        self._leaving: dict[str, str] = {}  # nodes that announced it, and the message when they are gone
        self._is_over = False

    def lines_for(self, event: AnyCoordinatorEvent, sent: list[Send]) -> list[str]:
        """Return the messages about an event and the commands that followed."""
        match event:
            case run.Received(_, messages.NodeJoined(node)) if node.node_id not in self._host_of:
                self._host_of[node.node_id] = node.where
                self._hosts.setdefault(node.where, []).append(node.node_id)
        happened = self._event_message(event)
        lines = [happened] if happened else []
        if isinstance(event, run.Received):
            self._note_leaving(event.node_id, event.message)
        for send in sent:
            self._is_over |= isinstance(send.event, events.RunEnded)
            if text := _sent_message(send):
                lines.append(f"  to {self._names(send.to)}: {text}")
        return lines

    def _note_leaving(self, node_id: str, message: messages.FromNode) -> None:
        match message:
            case messages.NodeJoined():
                self._leaving.pop(node_id, None)
            case messages.NodeDraining():
                self._leaving[node_id] = "has left"
            case messages.NodeLeft():
                self._leaving[node_id] = ""  # already reported

    def name(self, node_id: str) -> str:
        if node_id in self._names_given:
            return self._names_given[node_id]
        host = self._host_of.get(node_id)
        if host is None:
            return f"node {node_id[:8]}"
        nodes = self._hosts[host]
        return host if len(nodes) == 1 else f"{host} #{nodes.index(node_id) + 1}"

    def _event_message(self, event: AnyCoordinatorEvent) -> str:
        match event:
            case run.Received(_, messages.NodeProgress()):
                return ""  # too frequent, and shown elsewhere
            case run.Received(node_id, message):
                return f"{self.name(node_id)} {_received_message(message)}"
            case run.NodeLost(node_id) if self._is_over:
                return f"{self.name(node_id)} disconnected"
            case run.NodeLost(node_id) if node_id in self._leaving:
                text = self._leaving[node_id]
                return f"{self.name(node_id)} {text}" if text else ""
            case run.NodeLost(node_id, why):
                return f"{self.name(node_id)} was lost: {why}"
            case run.EarlierCoordinatorGone(node_id):
                return f"the earlier coordinator is dead: {self.name(node_id)}" if node_id else ""
            case run.CancelRequested(why):
                return f"an operator ended the run: {why}"
            case run.RestartRequested(why):
                return f"an operator restarted the run: {why}"
            case run.DrainRequested(node_id, why):
                return f"an operator drained {self.name(node_id)}: {why}"
            case run.Opened(generation=0):
                return "this node starts the coordinator"
            case run.Opened(generation=generation):
                return f"this node takes over as coordinator, from generation {generation}"
            case run.Tick():
                return ""
            case run.Resumed(absent_s):
                return f"the coordinator was suspended for {format_duration(absent_s)}; all timeouts begin again"
            case _:
                return assert_never(event)

    def _names(self, node_ids: tuple[str, ...]) -> str:
        shown = [self.name(node_id) for node_id in node_ids[:_MAX_NAMES]]
        more = len(node_ids) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")


def _sent_message(send: Send) -> str:
    match send.event:
        case events.GenerationFormed(part):
            size = f"node {part.group_rank} of {part.group_world_size}"
            return f"generation {part.generation}, {size}, world size {part.world_size} ({part.why})"
        case events.GenerationEnded(generation, why):
            return f"generation {generation} ended: {why}"
        case events.RunEnded(verdict):
            return f"the run {verdict.outcome.text}: {verdict.why}"
        case events.JoinRefused(reason):
            return f"refused: {reason}"
        case events.LeaveNoticed(_, host, why):
            return f"{host} is leaving: {why}"
        case events.LeaveRequested(why):
            return f"leave requested: {why}"
        case events.StacksRequested(_, _, why):
            return f"stacks requested: no activity ({why})"
        case events.HangFound(generation, report):
            from tenax._core.hang_report import reason_of

            reason = reason_of(report)
            if report.locations and (report.is_odd or report.workers == 1):
                return f"generation {generation} hangs: rank {report.locations[0].ranks[0]} {reason}"
            return f"generation {generation} hangs: {reason.removeprefix('hung: ')}"
        case events.HangOver(generation, why):
            return f"generation {generation} does not hang any more{f': {why}' if why else ''}"
        case events.Waiting(why):
            return why
        case _:
            return assert_never(send.event)


def _received_message(message: messages.FromNode) -> str:
    match message:
        case messages.NodeJoined(node, generation, is_running, has_succeeded):
            doing = ", running" if is_running else ", done with" if has_succeeded else ", after"
            workers = "1 worker" if node.slots == 1 else f"{node.slots} workers"
            return f"joined with {workers}" + (f"{doing} generation {generation}" if generation else "")
        case messages.WorkersRunning(generation, pids):
            return f"started its {'worker' if len(pids) == 1 else f'{len(pids)} workers'}"
        case messages.NodeProgress():
            return "reported the progress of its workers"
        case messages.NodeReady():
            return "is ready for a generation"
        case messages.FailureSeen(generation, failure):
            how = exit_summary(failure.exit_code)
            return (
                f"reported that rank {failure.global_rank} failed in generation {generation}: {failure.reason or how}"
            )
        case messages.NodeStopped(generation, failures=failures):
            found = f" ({len(failures)} failed)" if failures else ""
            return f"stopped its workers of generation {generation}{found}"
        case messages.NodeSucceeded(generation):
            return f"succeeded in generation {generation}"
        case messages.NodeQuiet(generation, sent_at, since, why):
            return f"has no activity in generation {generation} for {format_duration(sent_at - since)} ({why})"
        case messages.NodeBusy(generation, why):
            return f"is active again in generation {generation}{f': {why}' if why else ''}"
        case messages.StacksTaken(generation, _, locations):
            count = sum(len(location.ranks) for location in locations)
            return f"sent the stacks of {'1 worker' if count == 1 else f'{count} workers'}"
        case messages.NodeDraining(_, grace_s, why):
            return f"is leaving (up to {format_seconds(grace_s)}): {why}"
        case messages.NodeWillLeave(_, why, in_s):
            return f"will leave{f' (in {format_seconds(in_s)})' if in_s is not None else ''}: {why}"
        case messages.NodeLeft(why):
            return f"left: {why}"
        case _:
            return assert_never(message)
