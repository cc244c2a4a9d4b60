"""The coordinator machine's invariants, as a check that runs after every step in tests, replays and the simulator.

The checker derives which nodes are connected, clear or running, and what each was sent, from the coordinator's input
and output, not from its state, so that it also detects a wrong state. From the state it reads only the phase, the
deadlines, the ledger and the verdict. Each error names the invariant by its number (see ``_core/run_state.py``).

With the time of each step it also checks that the ledger counts every second once (L1 of ``_core/ledger.py``).

One checker checks one coordinator, from its first event on.
"""

from __future__ import annotations

import msgspec

from tenax._core import coordinator as run
from tenax._core import events, messages
from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorState, RunDeadline, RunSettings, Send, Step
from tenax._core.model import AWAITED, Assignment, Outcome, Verdict, by_cause
from tenax._core.policy import AnyDecision, GiveUp, Restart, Wait
from tenax._core.record import RunRecord
from tenax.testing.agent_invariants import InvariantBroken, check_text

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(CoordinatorState).decode
# The deadlines that each phase requires; LAST_CALL is checked separately. Other phases have none.
_DEADLINES: dict[type[run.RunPhase], set[RunDeadline]] = {
    run.Gathering: {RunDeadline.JOIN, RunDeadline.WAITING},
    run.Ending: {RunDeadline.WAITING},
    run.Recovering: {RunDeadline.RECOVER},
    run.Paused: {RunDeadline.PAUSE},
}
_SAME_S = 1e-6  # tolerance for sums of seconds, in addition to rounding
_MAX_REPORTED = 256  # failures in a verdict
_OF_HANGS = {RunDeadline.QUIET, RunDeadline.STACKS}
_Parts = dict[str, Assignment]


class _Generation:
    """What is known of one generation: the running one, or the last one."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.parts: _Parts = {}  # empty if an earlier coordinator formed it
        self.ranks: dict[str, int] = {}  # of all known members, including those that are gone
        self.expected = 0  # number of its members
        self.gone: set[str] = set()
        self.done: set[str] = set()
        self.away: set[str] = set()  # done and disconnected; they may reconnect and report it again
        self.failed: set[int] = set()  # global ranks
        self.is_ended = False
        self.is_counted = False  # in the ledger
        self.is_lost = False  # it lost a node
        self.is_broken = False  # it is incomplete or outdated, because a coordinator was lost
        self.is_drained = False  # a node was drained from it
        self.is_opened = False  # it ended to admit a node
        self.decision: AnyDecision | None = None  # the last one of the restart policy about it
        self.is_requested = False  # an operator's restart ended it
        self.is_recorded = False  # an earlier coordinator formed it, and left a record of its members
        self.has_missed_assignment = False  # a member did not receive its assignment before that coordinator was lost

    @property
    def is_uncharged(self) -> bool:
        is_broken = self.has_missed_assignment if self.is_recorded else self.is_broken
        return self.is_lost or is_broken or self.is_drained or self.is_opened or self.is_requested

    @property
    def is_complete(self) -> bool:
        return set(range(self.expected)) <= set(self.ranks.values())

    def has(self, node_id: str) -> bool:
        return node_id in self.ranks and node_id not in self.gone


class RunChecker:
    """Checks one run. Call ``expect`` before and ``check`` after every step.

    ``decides_changes``: the restart policy may charge a change of the nodes, keep a generation that could admit a node,
    or give up after a loss.
    """

    def __init__(self, settings: RunSettings, *, decides_changes: bool = False) -> None:
        self._settings = settings
        self._decides_changes = decides_changes
        self._here: dict[str, messages.NodeInfo] = {}
        self._clear: set[str] = set()  # reported to be clear, and have no assignment since
        self._newly_clear = ""
        self._at_work: dict[str, int] = {}  # nodes whose workers may be alive, and their generation
        self._holding: dict[str, int] = {}  # clear nodes that hold workers, and how many
        self._stopping_held: set[str] = set()  # nodes that were sent to stop them
        self._keeps_survivors = True  # after the last generation
        self._draining: set[str] = set()
        self._superseded: set[str] = set()  # replaced or refused nodes whose workers may be alive
        self._known: dict[str, int] = {}  # the last generation that a node reported or was sent
        self._latest = 0  # the greatest known generation
        self._store = ""  # of that generation
        self._last: _Generation | None = None
        self._failed: set[int] = set()  # global ranks, of all generations
        self._ledger = (0, 0, 0, 0)  # restarts, membership changes, drains, requests
        self._came_at: float | None = None  # when the first node joined, or a later coordinator was opened
        self._inherited_s = 0.0  # time of earlier coordinators
        self._phase: type[run.RunPhase] = run.Gathering
        self._verdict: Verdict | None = None
        self._written = b""
        self._quiet: set[str] = set()  # nodes that reported to be quiet in the last generation
        self._is_hang_reported = False

    def expect(self, state: CoordinatorState, event: AnyCoordinatorEvent) -> None:
        """Remember the state if the event must not change it."""
        must_change_nothing = isinstance(event, run.DrainRequested) or self._is_without_effect(event)
        self._written = _encode(state) if must_change_nothing else b""

    def check(self, state: CoordinatorState, event: AnyCoordinatorEvent, step: Step, now: float | None = None) -> None:
        """Raise ``InvariantBroken`` unless the step from ``event`` kept every invariant."""
        sends = step.sends
        for send in sends:
            check_text(send.event.verdict if isinstance(send.event, events.RunEnded) else send.event)
        if now is not None and self._verdict is None:
            self._check_time(state, event, now)
        if self._verdict is not None:
            self._check_after_the_end(state, event, sends)
            return
        if isinstance(event, run.Opened) and event.verdict is not None:
            self._verdict = event.verdict
            self._check_after_the_end(state, event, sends)
            return
        if self._is_without_effect(event):
            self._check_silence(state, event, sends)
            return
        if isinstance(event, run.Resumed):
            self._check_resumed(state, sends, now)
            return
        self._check_drains(state, event, sends)
        if isinstance(event, run.DrainRequested):
            return
        must_end = self._follow(state, event, sends)
        self._check_ending(state, event, sends, must_end)
        if self._last is not None and step.decision is not None:
            self._last.decision = step.decision
            self._keeps_survivors &= getattr(step.decision, "keeps_survivors", True)
        self._follow_second_stops(state, event, sends)
        self._check_ledger(state, event)
        self._check_forming(state, event, sends)
        if isinstance(state.phase, run.Over):
            self._check_verdict(state, state.phase.verdict, event, step)
        elif any(isinstance(send.event, events.RunEnded) for send in sends):
            raise InvariantBroken(f"C6: the end was sent while {state.phase.name}")
        else:
            self._check_waiting(state, sends)
            self._check_progress(state)
        self._check_deadlines(state)
        if state.generation != self._latest:
            raise InvariantBroken(f"C1: the last generation is {self._latest}, but the state has {state.generation}")
        self._phase = type(state.phase)
        self._ledger = _ledger(state)

    # --- events without effect ----------------------------------------------------------------------------------------

    def _is_without_effect(self, event: AnyCoordinatorEvent) -> bool:
        """Whether the event is from an unknown node, or about a generation that is not the sender's last."""
        if isinstance(event, run.NodeLost | run.DrainRequested):
            return event.node_id not in self._here
        if isinstance(event, run.RestartRequested):
            return self._phase not in (run.Running, run.Paused)
        if not isinstance(event, run.Received) or isinstance(event.message, messages.NodeJoined):
            return False
        node_id, message = event.node_id, event.message
        if node_id not in self._here:
            return True
        if isinstance(message, messages.NodeReady):
            return not self._known[node_id] <= message.generation <= max(self._latest, self._known[node_id])
        if isinstance(message, messages.NodeLeft) or self._is_current(node_id, message.generation):
            return False
        has_stopped = isinstance(message, messages.NodeStopped | messages.NodeSucceeded)
        return not has_stopped or node_id not in self._superseded or message.generation < self._known[node_id]

    def _is_current(self, node_id: str, generation: int) -> bool:
        is_its_last = generation == self._latest == self._known[node_id]
        return is_its_last and self._last is not None and self._last.has(node_id)

    def _check_drains(self, state: CoordinatorState, event: AnyCoordinatorEvent, sends: list[Send]) -> None:
        """Check that only an operator's request drains a node, and that it has no other immediate effect."""
        drained = [send.to for send in sends if isinstance(send.event, events.LeaveRequested)]
        if not isinstance(event, run.DrainRequested):
            if drained:
                raise InvariantBroken(f"C9: {drained} are drained, but no operator requested it")
        elif drained != [(event.node_id,)] or len(sends) > 1 or self._is_changed(state):
            raise InvariantBroken(f"C9: {event.node_id} is drained, but {sends} were sent")

    def _is_changed(self, state: CoordinatorState) -> bool:
        has_another_phase = type(state.phase) is not self._phase
        return has_another_phase or (self._written != b"" and _decode(self._written) != state)  # sets have no order

    def _check_silence(self, state: CoordinatorState, event: AnyCoordinatorEvent, sends: list[Send]) -> None:
        if sends or self._is_changed(state):
            raise InvariantBroken(f"C8: {event} had consequences after generation {self._latest}: {sends}")

    def _check_after_the_end(self, state: CoordinatorState, event: AnyCoordinatorEvent, sends: list[Send]) -> None:
        if state.verdict != self._verdict or state.deadlines:
            raise InvariantBroken(f"C6: the run continues after its end: {state.phase.name}, {state.verdict}")
        newcomer = _newcomer(event)
        for send in sends:
            sent = send.event
            is_the_same = isinstance(sent, events.RunEnded) and sent.verdict == self._verdict
            if send.to != (newcomer,) or not (is_the_same or isinstance(sent, events.JoinRefused)):
                raise InvariantBroken(f"C6: {sent} was sent after the end")
        if newcomer and not sends:
            raise InvariantBroken(f"C6: {newcomer} joined after the end, but was not sent the verdict")

    def _check_resumed(self, state: CoordinatorState, sends: list[Send], now: float | None) -> None:
        """Check that nothing is decided or sent, and that deadlines for nodes are a full period away."""
        if sends or type(state.phase) is not self._phase:
            raise InvariantBroken(f"C10: resumed, but at once {state.phase.name}: {sends}")
        self._check_deadlines(state)
        settings = self._settings
        periods = {
            RunDeadline.JOIN: settings.join_timeout_s,
            RunDeadline.LAST_CALL: settings.last_call_s,
            RunDeadline.RECOVER: state.phase.period_s if isinstance(state.phase, run.Recovering) else 0.0,
            RunDeadline.STACKS: settings.stacks_timeout_s,
        }
        for deadline, at in state.deadlines.items():
            if now is not None and at < now + periods.get(deadline, 0.0):
                raise InvariantBroken(f"C10: resumed, but {deadline.value} is due in {at - now:g} s")

    # --- received messages --------------------------------------------------------------------------------------------

    def _follow(self, state: CoordinatorState, event: AnyCoordinatorEvent, sends: list[Send]) -> bool:
        """Follow an event; return whether it must end the running generation."""
        self._newly_clear = ""
        must_end = False
        match event:
            case run.Opened(generation=generation, store=store):
                self._latest = max(self._latest, generation)
                self._store = store
                if event.record is not None:
                    self._inherit(event.record)
            case run.NodeLost(node_id):
                must_end = self._go(node_id, is_loss=True)
            case run.RestartRequested() if self._phase is run.Paused:
                self._keeps_survivors = False
            case run.RestartRequested() if self._phase is run.Running:
                must_end, self._keeps_survivors = True, False
                if self._last is not None:
                    self._last.is_requested = True
            case run.Received(message=messages.NodeJoined() as joined):
                must_end = self._join(joined, sends)
            case run.Received(node_id, message):
                must_end = self._follow_message(node_id, message)
        must_end |= self._follow_hang(event, sends)
        if self._phase is not run.Recovering or isinstance(event, run.Opened | run.CancelRequested):
            return must_end
        return not isinstance(state.phase, run.Recovering) and self._is_broken_since_recovery()

    def _follow_hang(self, event: AnyCoordinatorEvent, sends: list[Send]) -> bool:
        """Follow a suspected hang; return whether its report must end the generation."""
        last, must_end = self._last, False
        match event:
            case run.Received(node_id, messages.NodeQuiet()):
                self._quiet.add(node_id)
            case run.Received(node_id, messages.NodeBusy() | messages.NodeSucceeded()):
                self._quiet.discard(node_id)
        for send in sends:
            match send.event:
                case events.StacksRequested():
                    at_work = {each for each in last.ranks if last.has(each)} - last.done if last is not None else set()
                    if self._settings.on_hang == "off" or not at_work <= self._quiet or set(send.to) != at_work:
                        raise InvariantBroken(f"H5: a hang is suspected, but {_names(at_work - self._quiet)} are busy")
                case events.HangFound(report=report) if self._settings.on_hang == "restart":
                    if last is not None:  # rank 0 if an adopted member has not replied
                        self._note_failures(last, {report.locations[0].ranks[0] if report.locations else 0})
                    must_end = True
                case events.HangFound():
                    self._is_hang_reported = True
                case events.HangOver():
                    if not self._is_hang_reported:
                        raise InvariantBroken("H6: the end of a hang was sent, but no report")
                    self._is_hang_reported = False
        return must_end

    def _follow_message(self, node_id: str, message: messages.FromNode) -> bool:
        last = self._last
        if isinstance(message, messages.NodeLeft):
            return self._go(node_id, is_loss=message.was_refused or not message.is_clear)
        if isinstance(message, messages.NodeReady):
            return self._become_clear(node_id, message.held)
        assert not isinstance(message, messages.NodeJoined), "handled before"
        if last is None or not self._is_current(node_id, message.generation):
            self._go(node_id, is_loss=True)  # a superseded node has stopped; other such messages were handled before
            return False
        match message:
            case messages.FailureSeen(failure=failure):
                self._note_failures(last, {failure.global_rank})
                return True
            case messages.NodeStopped(failures=failures, was_cut_off=was_cut_off):
                self._at_work.pop(node_id, None)
                self._note_failures(last, {failure.global_rank for failure in failures})
                last.is_lost |= was_cut_off and not last.is_counted
                if node_id in self._superseded:
                    self._go(node_id, is_loss=True)
                return bool(failures)
            case messages.NodeSucceeded():
                self._at_work.pop(node_id, None)
                if node_id in self._superseded:
                    self._go(node_id, is_loss=True)
                elif not last.is_ended and node_id not in self._clear:
                    last.done.add(node_id)
            case messages.NodeDraining():
                self._draining.add(node_id)
                last.is_drained |= not last.is_counted
        return False

    def _note_failures(self, last: _Generation, ranks: set[int]) -> None:
        last.failed |= ranks
        self._failed |= ranks

    def _become_clear(self, node_id: str, held: int) -> bool:
        if node_id in self._superseded:
            return self._go(node_id, is_loss=True)
        self._holding[node_id] = held
        if node_id in self._clear or (held and node_id in self._stopping_held):
            return False
        self._stopping_held.discard(node_id)
        self._newly_clear = node_id
        self._clear.add(node_id)
        self._at_work.pop(node_id, None)
        last = self._last
        if self._phase is not run.Running or last is None or not last.has(node_id):
            return False
        last.gone.add(node_id)  # it stopped its workers because its lease expired
        last.is_lost = True
        return True

    def _follow_second_stops(self, state: CoordinatorState, event: AnyCoordinatorEvent, sends: list[Send]) -> None:
        """Follow nodes that are clear, but must stop the workers that they hold."""
        newcomer = _newcomer(event)
        if isinstance(state.phase, run.Ending) and state.phase.stops:
            self._keeps_survivors = False  # an operator's restart, or a hang in which no rank stands out
        for send in sends:
            if isinstance(send.event, events.GenerationEnded) and send.event.stops:
                for node_id in (self._clear & set(send.to)) - {newcomer}:  # that is the answer to what it reported
                    if self._keeps_survivors or not self._holding.get(node_id):
                        raise InvariantBroken(f"C4: {node_id} must stop held workers, which survive, or has none")
                    self._clear.discard(node_id)
                    self._stopping_held.add(node_id)
                    self._at_work[node_id] = send.event.generation
        kept = {each for each in self._clear if self._holding.get(each)} if not self._keeps_survivors else set()
        if kept and not isinstance(state.phase, run.Over | run.Recovering):
            raise InvariantBroken(f"C4: {_names(kept)} hold workers, but the policy does not keep them")

    def _go(self, node_id: str, *, is_loss: bool) -> bool:
        """Remove a node that left or was lost."""
        self._holding.pop(node_id, None)
        self._stopping_held.discard(node_id)
        del self._here[node_id], self._known[node_id]
        self._clear.discard(node_id)
        self._at_work.pop(node_id, None)
        is_drain = not is_loss or node_id in self._draining
        self._draining.discard(node_id)
        self._superseded.discard(node_id)
        last = self._last
        if last is not None and node_id in last.done:
            last.away.add(node_id)
        if last is None or not last.has(node_id) or node_id in last.done:
            return False
        last.gone.add(node_id)
        last.parts.pop(node_id, None)
        last.is_broken |= self._phase is run.Recovering
        if not last.is_counted:
            last.is_drained |= is_drain
            last.is_lost |= not is_drain
        return True

    def _join(self, joined: messages.NodeJoined, sends: list[Send]) -> bool:
        node_id = joined.node.node_id
        refused = {each for send in sends if isinstance(send.event, events.JoinRefused) for each in send.to}
        must_end = [self._supersede(each) for each in refused if each != node_id and each in self._here]
        if node_id in refused:
            if node_id not in self._here:
                if joined.is_running:
                    must_end.append(self._await_refused(joined, sends))
            elif node_id in self._superseded and joined.generation < self._known[node_id] and not joined.is_running:
                must_end.append(self._go(node_id, is_loss=True))  # it has not received its assignment
            return any(must_end)
        self._here[node_id] = joined.node
        is_unrecorded = self._is_unrecorded(joined)
        is_same = joined.store == self._store or not joined.store or not self._store
        if is_unrecorded or (joined.generation == self._latest and not is_same):
            if joined.is_running or joined.has_succeeded:
                self._check_notified_node(node_id, joined.generation, sends)
            if joined.is_running and node_id not in self._clear:
                self._at_work[node_id] = joined.generation
            self._known[node_id] = joined.generation if is_unrecorded else self._known.get(node_id, 0)
            joined = messages.NodeJoined(joined.node)
        self._known[node_id] = max(self._known.get(node_id, 0), joined.generation)
        if joined.generation > self._latest:
            must_end.append(self._follow_later_generation(joined.generation, sends))
            self._store = joined.store
        if self._phase is run.Recovering and self._last is not None and self._last.is_recorded:
            is_behind = joined.generation < self._last.number and node_id in self._last.ranks
            self._last.has_missed_assignment |= is_behind and node_id not in self._last.gone
        if self._phase is run.Recovering and joined.generation == self._latest > 0:
            self._adopt(joined)
        elif joined.is_running or joined.has_succeeded:
            self._follow_rejoin(joined, sends)
        elif node_id not in self._clear:
            self._check_behind(joined, sends)
        return any(must_end)

    def _is_unrecorded(self, joined: messages.NodeJoined) -> bool:
        """Whether the run was begun anew after the node's generation: its number is greater than the recorded one."""
        if self._known.get(joined.node.node_id, 0) >= joined.generation > self._latest:
            return True
        is_recorded = self._phase is run.Recovering and self._last is not None and self._last.is_recorded
        return is_recorded and joined.generation > self._latest

    def _await_refused(self, joined: messages.NodeJoined, sends: list[Send]) -> bool:
        """Follow a refused node, which is awaited until its workers have stopped."""
        node_id, is_unrecorded = joined.node.node_id, self._is_unrecorded(joined)
        self._here[node_id] = joined.node
        self._known[node_id] = self._at_work[node_id] = joined.generation
        self._superseded.add(node_id)
        if joined.generation <= self._latest or is_unrecorded:
            return False
        self._store = joined.store
        return self._follow_later_generation(joined.generation, sends)

    def _supersede(self, node_id: str) -> bool:
        """Follow the replacement of a node. If its workers run, they are awaited like those of other members."""
        last = self._last
        if node_id in self._at_work and (last is None or not last.has(node_id)):
            self._superseded.add(node_id)
            return False
        if last is None or not last.has(node_id) or node_id in self._clear or node_id in last.done:
            return self._go(node_id, is_loss=True)
        self._superseded.add(node_id)
        last.is_lost |= not last.is_counted
        return True

    def _follow_later_generation(self, generation: int, sends: list[Send]) -> bool:
        """Follow the discovery of a later generation of an earlier coordinator."""
        self._latest = generation
        last = self._last
        if last is None or last.is_ended:
            if last is not None and not last.is_counted:
                last.is_broken = True
            return False
        if self._phase is run.Recovering:
            self._check_notified(last, sends)
            last.is_ended = last.is_counted = True
            return False
        last.is_broken = True
        return True

    def _adopt(self, joined: messages.NodeJoined) -> None:
        if self._last is None or self._last.number != joined.generation:
            self._last = _Generation(joined.generation)
        last, node_id = self._last, joined.node.node_id
        self._store = self._store or joined.store
        last.ranks[node_id] = joined.group_rank
        last.gone.discard(node_id)
        last.expected = joined.group_world_size
        if joined.has_succeeded:
            last.done.add(node_id)
        elif joined.is_running and node_id not in self._clear:
            self._at_work[node_id] = joined.generation
        last.is_opened |= joined.is_uncharged

    def _is_broken_since_recovery(self) -> bool:
        last = self._last
        if last is None or last.is_ended:
            return False
        missing = last.ranks.keys() - self._here.keys() - last.gone - last.done if last.is_recorded else set()
        last.gone |= missing
        last.is_lost |= bool(missing)
        busy = last.done | {each for each, generation in self._at_work.items() if generation == last.number}
        idle = [each for each in last.ranks if each in self._clear or each not in busy]
        last.is_lost |= not last.is_complete
        last.is_broken |= bool(idle or last.is_lost)
        must_end = last.is_broken or bool(last.failed)
        last.is_broken &= not last.failed  # then the failure ended it
        return must_end

    def _inherit(self, record: RunRecord) -> None:
        self._ledger = (record.restarts_used, record.membership_changes, record.drains, record.requests)
        if record.is_at_work and record.members:
            self._last = _Generation(record.generation)
            self._last.ranks = {member.node_id: member.rank for member in record.members}
            self._last.expected, self._last.is_recorded = len(record.members), True

    def _follow_rejoin(self, joined: messages.NodeJoined, sends: list[Send]) -> None:
        """Follow a node that joins with workers that run or succeeded: unless current, it must be sent their end."""
        node_id, last = joined.node.node_id, self._last
        is_of_last = last is not None and last.number == joined.generation
        if last is not None and is_of_last and last.has(node_id) and not last.is_ended:
            if joined.has_succeeded:
                last.done.add(node_id)
                last.away.discard(node_id)
                self._at_work.pop(node_id, None)
            return
        is_other = last is not None and is_of_last and not last.is_ended  # another generation with the same number
        if joined.is_running and node_id not in self._clear:
            self._at_work[node_id] = max(self._at_work.get(node_id, 0), joined.generation)
            is_known = last is not None and is_of_last and last.has(node_id)
            if joined.generation == self._latest and not is_other and not is_known:
                self._await_latecomer(node_id, joined.group_rank)
        self._check_notified_node(node_id, joined.generation, sends)

    def _check_notified_node(self, node_id: str, generation: int, sends: list[Send]) -> None:
        if node_id not in _notified_of_end(sends, generation) and not _is_over(sends):
            raise InvariantBroken(f"C5: {node_id} runs workers of generation {generation}, but is not sent its end")

    def _await_latecomer(self, node_id: str, group_rank: int) -> None:
        """Wait for a member of the last generation that was unknown or counted as lost."""
        if self._last is None or (self._last.is_counted and self._last.number != self._latest):
            self._last = _Generation(self._latest)
            self._last.is_ended = self._last.is_counted = True  # by an earlier coordinator
        self._last.ranks[node_id] = group_rank
        self._last.gone.discard(node_id)

    def _check_behind(self, joined: messages.NodeJoined, sends: list[Send]) -> None:
        """Check that a member whose link broke before it received its assignment is sent it again."""
        node_id, last = joined.node.node_id, self._last
        if last is None or node_id not in last.parts or joined.generation >= last.number:
            return
        if not last.has(node_id) or self._at_work.get(node_id) != last.number or node_id in self._stopping_held:
            return
        if events.GenerationFormed(last.parts[node_id]) not in [send.event for send in sends if node_id in send.to]:
            raise InvariantBroken(
                f"C7: {node_id} has no assignment in generation {last.number}, but is not sent it again"
            )
        if last.is_ended and node_id not in _notified_of_end(sends, last.number):
            raise InvariantBroken(f"C5: {node_id} is sent generation {last.number} but not its end")

    # --- a generation ends --------------------------------------------------------------------------------------------

    def _check_ending(
        self, state: CoordinatorState, event: AnyCoordinatorEvent, sends: list[Send], must_end: bool
    ) -> None:
        for send in sends:
            if isinstance(send.event, events.GenerationEnded) and not send.event.why:
                raise InvariantBroken(f"C5: generation {send.event.generation} ended without a reason")
        last = self._last
        if last is None or last.is_ended or isinstance(state.phase, run.Over | run.Recovering):
            return
        has_ended = (
            not isinstance(state.phase, run.Running)
            or bool(_notified_of_end(sends, last.number) & last.ranks.keys())
            or bool(self._new_parts(event, sends))
        )
        if must_end and not has_ended:
            raise InvariantBroken(f"C5: generation {last.number} continues after {event}")
        if not has_ended:
            return
        if not must_end:
            self._check_opening(last, event)
        self._check_notified(last, sends)
        last.is_ended = True

    def _check_opening(self, last: _Generation, event: AnyCoordinatorEvent) -> None:
        """Check that a generation without a failure or loss ended only to admit a node."""
        candidates = self._clear if self._phase is run.Recovering else self._clear & {self._newly_clear}
        newcomers = {each for each in candidates if not last.has(each)}
        if not newcomers:
            raise InvariantBroken(f"C5: generation {last.number} ended without a cause, after {event}")
        if len(last.ranks) >= self._settings.max_nodes or last.done or not self._settings.scale_up:
            raise InvariantBroken(
                f"C5: generation {last.number} ended to admit {_names(newcomers)}, which cannot be admitted"
            )
        last.is_opened = True

    def _check_notified(self, last: _Generation, sends: list[Send]) -> None:
        members = {each for each in last.ranks if last.has(each) and each in self._here and each not in self._clear}
        members = {each for each in members if self._known[each] == last.number} - last.away
        unnotified = members - _notified_of_end(sends, last.number)
        if unnotified:
            raise InvariantBroken(f"C5: generation {last.number} ended, but {_names(unnotified)} were not notified")

    def _check_ledger(self, state: CoordinatorState, event: AnyCoordinatorEvent) -> None:
        """Check that each ended generation is counted once: as a restart, a membership change, a drain or a request."""
        restarts, changes, drains, requests = self._ledger
        if isinstance(event, run.Opened):
            restarts = max(restarts, event.restarts_used)
        elif isinstance(joined := getattr(event, "message", None), messages.NodeJoined):
            restarts = max(restarts, joined.restarts_used if joined.node.node_id in self._here else 0)
        before, now = (restarts, changes, drains, requests), _ledger(state)
        charged, changed, drained, wanted = grown = tuple(b - a for a, b in zip(before, now, strict=True))
        if min(grown) < 0 or sum(grown) > 1:
            raise InvariantBroken(f"C4: the ledger goes from {before} to {now} in one step")
        if sum(grown) == 0:
            return
        last = self._last
        if last is None or not last.is_ended or last.is_counted:
            raise InvariantBroken(f"C4: the ledger goes to {now}, but no generation ended")
        self._check_stopped()
        last.is_counted = True
        if charged and (last.is_uncharged or not last.failed) and not self._decides_changes:
            raise InvariantBroken(f"C4: a restart was charged for generation {last.number}, which is uncharged")
        if charged and not isinstance(last.decision, Restart | Wait):
            raise InvariantBroken(f"C4: a restart was charged for generation {last.number}: {last.decision}")
        if drained and (last.is_lost or not last.is_drained):
            raise InvariantBroken(f"C4: generation {last.number} was counted as a drain, but was not one")
        if wanted and (last.is_lost or last.is_drained or not last.is_requested):
            raise InvariantBroken(f"C9: generation {last.number} was counted as a request, but was not one")
        is_broken = last.is_broken or last.has_missed_assignment
        is_other = last.is_drained or last.is_requested
        is_change = last.is_lost or (not is_other and (last.is_opened or is_broken or not last.failed))
        if changed and not is_change:
            raise InvariantBroken(f"C4: generation {last.number} was counted as a membership change, but was not one")

    def _check_time(self, state: CoordinatorState, event: AnyCoordinatorEvent, now: float) -> None:
        """Check that the sums of the ledger add up to the time since the first node joined."""
        if isinstance(event, run.Opened):
            if event.verdict is not None:
                return
            self._inherited_s = event.record.cost.spent.total_s if event.record is not None else 0.0
        is_successor = isinstance(event, run.Opened) and event.generation > 0
        if self._came_at is None and (state.nodes or is_successor):
            self._came_at = now
        passed_s = self._inherited_s + (now - self._came_at if self._came_at is not None else 0.0)
        spent = state.ledger.spent(now)
        if abs(spent.total_s - passed_s) > _SAME_S + 1e-12 * abs(now):
            raise InvariantBroken(f"L1: {passed_s:.9g} s have passed, but the ledger has {spent}")
        if min(getattr(spent, name) for name in spent.__struct_fields__) < 0:
            raise InvariantBroken(f"L1: a sum is negative: {spent}")

    # --- a generation forms -------------------------------------------------------------------------------------------

    def _new_parts(self, event: AnyCoordinatorEvent, sends: list[Send]) -> _Parts:
        """Return the assignments in a new generation; a member that reconnects may be sent its current one again."""
        again = self._last.parts.get(_newcomer(event)) if self._last is not None else None
        parts: _Parts = {}
        for send in sends:
            if isinstance(send.event, events.GenerationFormed) and (again is None or send.event.assignment != again):
                for node_id in send.to:
                    if node_id in parts or len(send.to) != 1:
                        raise InvariantBroken(f"C1: {_names(set(send.to))} got more than one assignment, or share one")
                    parts[node_id] = send.event.assignment
        return parts

    def _check_forming(self, state: CoordinatorState, event: AnyCoordinatorEvent, sends: list[Send]) -> None:
        parts = self._new_parts(event, sends)
        if not parts:
            return
        numbers = {part.generation for part in parts.values()}
        number, greatest = max(numbers), max(self._latest, *(self._known[node_id] for node_id in parts))
        if len(numbers) > 1 or number <= greatest:
            raise InvariantBroken(f"C1: generations {sorted(numbers)} were formed after {greatest}")
        if not self._settings.min_nodes <= len(parts) <= self._settings.max_nodes:
            raise InvariantBroken(f"C1: generation {number} was formed of {len(parts)} nodes")
        if self._last is not None and not self._last.is_counted:
            raise InvariantBroken(
                f"C4: generation {number} was formed, but the end of generation {self._last.number} was not counted"
            )
        not_clear = set(parts) - (self._clear & self._here.keys())
        if not_clear:
            raise InvariantBroken(f"C2: generation {number} was formed with {_names(not_clear)}, which are not clear")
        self._check_stopped()
        self._check_numbers(parts, state)
        self._latest, self._store = number, next(iter(parts.values())).store
        last = self._last = _Generation(number)
        self._quiet, self._is_hang_reported = set(), False
        self._keeps_survivors = True
        last.parts = parts
        last.ranks = {node_id: part.group_rank for node_id, part in parts.items()}
        last.expected = len(parts)
        for node_id in parts:
            self._clear.discard(node_id)
            self._draining.discard(node_id)
            self._at_work[node_id] = self._known[node_id] = number

    def _check_stopped(self) -> None:
        """Check that no connected node runs workers of any generation."""
        if self._at_work:
            raise InvariantBroken(f"C2: the run continues, but {_names(set(self._at_work))} have not stopped")

    def _check_numbers(self, parts: _Parts, state: CoordinatorState) -> None:
        arranged = sorted(parts, key=lambda node_id: parts[node_id].group_rank)
        infos = [self._here[node_id] for node_id in arranged]
        world_size = sum(info.slots for info in infos)
        serving = parts.get(self._settings.serving_node)
        first, first_in_role = 0, dict.fromkeys((info.role for info in infos), 0)
        for group_rank, (node_id, info) in enumerate(zip(arranged, infos, strict=True)):
            part = parts[node_id]
            got = (part.group_rank, part.first_global_rank, part.first_role_rank, part.role_world_size)
            in_role = sum(each.slots for each in infos if each.role == info.role)
            if got != (group_rank, first, first_in_role[info.role], in_role):
                raise InvariantBroken(f"C3: {node_id} got {part}, expected node {group_rank} with ranks from {first}")
            first += info.slots
            first_in_role[info.role] += info.slots
            common = (part.group_world_size, part.world_size, part.restarts_used, part.coordinator_rank)
            if common != (len(parts), world_size, state.restarts_used, serving.group_rank if serving else -1):
                raise InvariantBroken(f"C3: {node_id} got {part} in a world of {world_size}")
        stores = {(part.master_addr, part.master_port, part.use_agent_store) for part in parts.values()}
        if len(stores) > 1 or len({part.why for part in parts.values()}) > 1:
            raise InvariantBroken(f"C3: the members were sent different stores: {stores}")

    # --- waiting, and the end of the run ------------------------------------------------------------------------------

    def _check_waiting(self, state: CoordinatorState, sends: list[Send]) -> None:
        """Check that a node that became clear is sent why it waits, except while a generation is ending."""
        node_id = self._newly_clear if not isinstance(state.phase, run.Ending) else ""
        notified = {each for send in sends if isinstance(send.event, events.Waiting) for each in send.to}
        if node_id in self._clear and node_id not in notified:
            raise InvariantBroken(f"C7: {node_id} waits, but was not sent a reason")

    def _check_deadlines(self, state: CoordinatorState) -> None:
        awaited = set(_DEADLINES.get(type(state.phase), set()))
        settings, count = self._settings, len(self._clear)
        if isinstance(state.phase, run.Gathering) and settings.min_nodes <= count < settings.max_nodes:
            awaited.add(RunDeadline.LAST_CALL)
        if isinstance(state.phase, run.Running) and settings.on_hang != "off":
            hang = state.hang
            if (hang is not None and bool(hang.awaited)) != (RunDeadline.STACKS in state.deadlines):
                raise InvariantBroken(
                    "H6: stacks are awaited without a deadline, or there is a deadline without a request"
                )
            if hang is not None and not hang.awaited and hang.report is None:
                awaited.add(RunDeadline.QUIET)
            awaited |= state.deadlines.keys() & _OF_HANGS
        if state.deadlines.keys() != awaited:
            has, needs = (sorted(deadline.value for deadline in each) for each in (state.deadlines, awaited))
            raise InvariantBroken(f"C7: {state.phase.name} needs deadlines for {needs}, but has {has}")

    def _check_progress(self, state: CoordinatorState) -> None:
        last, settings, count = self._last, self._settings, len(self._clear)
        if isinstance(state.phase, run.Gathering):
            is_first = self._latest == 0 or RunDeadline.LAST_CALL in state.deadlines
            if count >= settings.max_nodes or (count >= settings.min_nodes and not is_first):
                raise InvariantBroken(f"C7: {count} nodes are ready, but no generation is formed")
        elif isinstance(state.phase, run.Ending):
            members = {each for each in last.ranks if each in self._here} if last is not None else set()
            if not (members | self._at_work.keys()) - self._clear:
                raise InvariantBroken("C7: ending, but no node is awaited")
        elif isinstance(state.phase, run.Running):
            if last is None or last.is_ended:
                raise InvariantBroken("C5: running, but the generation has ended")
            if last.is_complete and last.done.issuperset(last.ranks):
                raise InvariantBroken("C7: all members are done, but the run continues")

    def _check_verdict(self, state: CoordinatorState, verdict: Verdict, event: AnyCoordinatorEvent, step: Step) -> None:
        ends = [(send.to, send.event) for send in step.sends if isinstance(send.event, events.RunEnded)]
        notified = [each for to, _ in ends for each in to]
        if sorted(notified) != sorted(self._here):
            raise InvariantBroken(f"C6: {sorted(self._here)} are connected, but {sorted(notified)} were sent the end")
        if any(end.verdict != verdict for _, end in ends):
            raise InvariantBroken("C6: not all nodes were sent the same verdict")
        self._check_outcome(state, verdict, event, step.decision)
        self._check_report(verdict)
        self._verdict = verdict

    def _check_outcome(
        self, state: CoordinatorState, verdict: Verdict, event: AnyCoordinatorEvent, decision: AnyDecision | None
    ) -> None:
        last = self._last
        counted = (verdict.restarts_used, verdict.membership_changes, verdict.drains, verdict.requests)
        if not verdict.why or counted != _ledger(state):
            raise InvariantBroken(f"C4: the verdict {verdict} contradicts the ledger: {_ledger(state)}")
        match verdict.outcome:
            case Outcome.BROKEN if self._decides_changes and isinstance(decision, GiveUp):
                self._check_stopped()
            case Outcome.SUCCEEDED:
                if last is None or last.is_ended or not last.is_complete or not last.done.issuperset(last.ranks):
                    raise InvariantBroken("C6: succeeded, but not every member has")
            case Outcome.FAILED:
                if last is None or not last.is_ended or last.is_uncharged or not isinstance(decision, GiveUp):
                    raise InvariantBroken(
                        "C4: failed, but the policy did not give up on a generation that failed by itself"
                    )
                self._check_stopped()
            case Outcome.CANCELLED:
                if not isinstance(event, run.CancelRequested):
                    raise InvariantBroken("C6: cancelled, but no operator requested it")
            case _:
                is_time = isinstance(event, run.Tick) and self._phase is run.Gathering
                if not is_time or len(self._clear) >= self._settings.min_nodes:
                    raise InvariantBroken(f"C7: {verdict.why!r}, while {len(self._clear)} nodes ready")

    def _check_report(self, verdict: Verdict) -> None:
        failed = {failure.global_rank for failure in verdict.failures}
        # The others waited for a worker that is not among these: no node reports it as failed.
        own = {each.global_rank for each in verdict.failures if each.evidence.cause not in AWAITED}
        stopped = [each.global_rank for each in verdict.stopped]
        if list(verdict.failures) != sorted(verdict.failures, key=by_cause):
            raise InvariantBroken("C5: the first cause does not come first")
        if failed & set(stopped) or len(set(stopped)) < len(stopped):
            raise InvariantBroken(f"C5: ranks {sorted(failed)} failed and {sorted(stopped)} were stopped")
        if verdict.outcome is Outcome.SUCCEEDED:
            is_right = not failed and not stopped
        elif verdict.outcome is Outcome.FAILED:
            reported = self._last.failed if self._last is not None else set()
            count = min(len(reported - (failed - own)), _MAX_REPORTED - len(failed - own))
            is_right = bool(own) and own <= reported and len(own) == count
        else:
            is_right = own <= self._failed
        if not is_right:
            raise InvariantBroken(f"C5: {verdict.outcome.value}, but the report has {sorted(failed)}")


def _newcomer(event: AnyCoordinatorEvent) -> str:
    """Return the node that joins with this event, or an empty string."""
    joined = event.message if isinstance(event, run.Received) else None
    return joined.node.node_id if isinstance(joined, messages.NodeJoined) else ""


def _notified_of_end(sends: list[Send], generation: int) -> set[str]:
    ended = [
        send for send in sends if isinstance(send.event, events.GenerationEnded) and send.event.generation == generation
    ]
    return {node_id for send in ended for node_id in send.to}


def _is_over(sends: list[Send]) -> bool:
    return any(isinstance(send.event, events.RunEnded) for send in sends)


def _ledger(state: CoordinatorState) -> tuple[int, int, int, int]:
    return state.restarts_used, state.membership_changes, state.drains, state.requests


def _names(node_ids: set[str]) -> str:
    return ", ".join(sorted(node_ids))
