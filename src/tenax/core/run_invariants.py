"""The coordinator machine's promises, as a check that runs after every step in tests, replays and the simulator.

The checker watches from the outside. Who is here, who is clear, who is at work in which generation and what it was told
it learns from what the coordinator hears and says, not from the machine's memory: a machine that deludes itself is
caught. From the state it reads only what cannot be heard: the phase, the deadlines, the ledger and the verdict. Each
message names the promise by its number (see ``coordinator.py``).

One checker watches one coordinator, from its first event on.
"""

from __future__ import annotations

import msgspec

from tenax.core import coordinator as run
from tenax.core import events as fact
from tenax.core import messages as word
from tenax.core.coordinator import AnyCoordinatorEvent, CoordinatorState, RunDeadline, RunPhase, RunSettings, Say
from tenax.core.invariants import InvariantBroken
from tenax.core.model import Assignment, Outcome, Verdict, when_it_began
from tenax.core.policy import GiveUp

# Sets have no order, and the order of a dictionary is no difference either.
_encode = msgspec.json.Encoder(order="deterministic").encode
# Words that are about the generation whose number they carry.
_OF_A_GENERATION = (
    word.FailureSeen,
    word.NodeStopped,
    word.NodeSucceeded,
    word.NodeDraining,
    word.NodeWillLeave,
)
# What must stand while the run is in a phase. LAST_CALL is checked apart.
_DEADLINES = {
    RunPhase.GATHERING: {RunDeadline.JOIN, RunDeadline.TELL},
    RunPhase.RECOVERING: {RunDeadline.RECOVER},
    RunPhase.PAUSED: {RunDeadline.PAUSE},
}


class _Generation:
    """What was heard and said about one generation: that which is at work, or was last."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.parts: dict[str, Assignment] = {}  # empty if an earlier coordinator formed it
        self.ranks: dict[str, int] = {}  # of all members, also of those that are gone
        self.gone: set[str] = set()
        self.done: set[str] = set()
        self.expected = 0
        self.failed: set[int] = set()  # global ranks
        self.is_ended = False
        self.is_counted = False  # in the ledger, or by the verdict
        self.is_lost = False  # it lost a node
        self.is_drained = False  # a node was asked to leave it
        self.is_opened = False  # it ended to let nodes in

    @property
    def is_free(self) -> bool:
        return self.is_lost or self.is_drained or self.is_opened

    def has(self, node_id: str) -> bool:
        return node_id in self.ranks and node_id not in self.gone


class RunChecker:
    """Watches one run. ``check`` is called after every step.

    A thorough checker writes the whole state down at every step, to see that a word which must change nothing changes
    nothing; without that it also keeps up with thousands of nodes.
    """

    def __init__(self, settings: RunSettings, *, is_thorough: bool = True) -> None:
        self._settings = settings
        self._is_thorough = is_thorough
        self._here: dict[str, word.NodeInfo] = {}
        self._clear: set[str] = set()  # said so, and were not given work since
        self._at_work: dict[str, int] = {}  # nodes that have not said that they stopped, and in which generation
        self._known: dict[str, int] = {}  # the last generation that a node knew of or was told of
        self._latest = 0  # the greatest number that was formed or heard of
        self._last: _Generation | None = None
        self._ledger = (0, 0, 0)  # restarts, membership changes, drains
        self._phase = RunPhase.GATHERING
        self._verdict: Verdict | None = None
        self._written = b""

    def check(self, state: CoordinatorState, event: AnyCoordinatorEvent, says: list[Say]) -> None:
        """Raise ``InvariantBroken`` unless the step that took ``event`` and said ``says`` kept every promise."""
        if self._verdict is not None:
            self._check_after_the_end(state, event, says)
            return
        if self._is_nothing(event):
            self._check_silence(state, event, says)
            return
        must_end = self._hear(state, event, says)
        self._check_ending(state, event, says, must_end)
        self._check_ledger(state, event)
        self._check_forming(state, event, says)
        self._check_newcomer(state, event, says)
        if state.phase is RunPhase.OVER or state.verdict is not None:
            self._check_verdict(state, event, says)
        elif any(isinstance(say.event, fact.RunEnded) for say in says):
            raise InvariantBroken(f"C6: the end was told while {state.phase.value}")
        self._check_deadlines(state)
        self._check_progress(state)
        self._remember(state)

    def _remember(self, state: CoordinatorState) -> None:
        self._phase = state.phase
        self._ledger = _ledger(state)
        if self._is_thorough:
            self._written = _encode(state)

    # --- what must change nothing -------------------------------------------------------------------------------------

    def _is_nothing(self, event: AnyCoordinatorEvent) -> bool:
        """A word of a stranger, or about a generation that is not the speaker's last."""
        if isinstance(event, run.NodeLost):
            return event.node_id not in self._here
        if not isinstance(event, run.Heard) or isinstance(event.message, word.NodeJoined):
            return False
        node_id, message = event.node_id, event.message
        if node_id not in self._here:
            return True
        if isinstance(message, word.NodeReady):
            return not self._known[node_id] <= message.generation <= self._latest
        if isinstance(message, _OF_A_GENERATION):
            last = self._last
            return (
                last is None
                or message.generation != self._latest
                or last.number != self._latest
                or not last.has(node_id)
            )
        return False

    def _check_silence(self, state: CoordinatorState, event: AnyCoordinatorEvent, says: list[Say]) -> None:
        changed = self._is_thorough and self._written != b"" and _encode(state) != self._written
        if says or changed or state.phase is not self._phase:
            raise InvariantBroken(f"C8: {event} had consequences after generation {self._latest}: {says}")

    def _check_after_the_end(self, state: CoordinatorState, event: AnyCoordinatorEvent, says: list[Say]) -> None:
        if state.phase is not RunPhase.OVER or state.verdict != self._verdict:
            raise InvariantBroken(f"C6: the run goes on after its end: {state.phase.value}, {state.verdict}")
        joined = event.message if isinstance(event, run.Heard) else None
        for say in says:
            told = say.event
            is_answer = isinstance(joined, word.NodeJoined) and say.to == (joined.node.node_id,)
            is_same = isinstance(told, fact.RunEnded) and told.verdict == self._verdict
            if not is_answer or not (is_same or isinstance(told, fact.JoinRefused)):
                raise InvariantBroken(f"C6: {told} was said after the end")
        if isinstance(joined, word.NodeJoined) and not says:
            raise InvariantBroken(f"C6: {joined.node.node_id} came after the end and was not told of it")

    # --- what was heard -----------------------------------------------------------------------------------------------

    def _hear(self, state: CoordinatorState, event: AnyCoordinatorEvent, says: list[Say]) -> bool:
        """Keep what the event tells. Says whether the generation that is at work must end because of it."""
        match event:
            case run.Opened(generation=generation):
                self._latest = max(self._latest, generation)
                return False
            case run.NodeLost(node_id):
                return self._go(node_id, is_loss=True)
            case run.TimeWentBy() if self._phase is RunPhase.RECOVERING and state.phase is not RunPhase.RECOVERING:
                return self._miss()
            case run.Heard(message=word.NodeJoined() as joined):
                return self._join(state, joined, says)
            case run.Heard(node_id, message):
                return self._hear_member(node_id, message)
        return False

    def _hear_member(self, node_id: str, message: word.FromNode) -> bool:
        last = self._last
        match message:
            case word.NodeReady():
                is_new = node_id not in self._clear
                self._clear.add(node_id)
                was_at_work = self._at_work.pop(node_id, 0)
                if last is None or not is_new or not last.has(node_id) or last.is_ended:
                    return False
                if self._phase is not RunPhase.RUNNING:
                    return False
                last.gone.add(node_id)
                last.is_lost = True
                return bool(was_at_work)
            case word.FailureSeen(failure=failure):
                assert last is not None
                last.failed.add(failure.global_rank)
                return True
            case word.NodeStopped(failures=failures):
                assert last is not None
                last.failed |= {failure.global_rank for failure in failures}
                return bool(failures)
            case word.NodeSucceeded():
                assert last is not None
                if not last.is_ended:
                    last.done.add(node_id)
            case word.NodeDraining():
                assert last is not None
                last.is_drained |= not last.is_counted
            case word.NodeLeft(is_clear=is_clear):
                return self._go(node_id, is_loss=not is_clear)
        return False

    def _go(self, node_id: str, *, is_loss: bool) -> bool:
        """The node is not here any more."""
        del self._here[node_id]
        self._clear.discard(node_id)
        self._at_work.pop(node_id, None)
        last = self._last
        if last is None or not last.has(node_id) or node_id in last.done:
            return False
        last.gone.add(node_id)
        if not last.is_counted:
            # One that was asked to leave before is no loss, however it goes.
            was_asked = last.is_drained and node_id in self._asked(last)
            last.is_lost |= is_loss and not was_asked
            last.is_drained |= not is_loss or was_asked
        return True

    def _asked(self, last: _Generation) -> set[str]:
        return self._draining if last.is_drained else set()
