"""Leadership machines with bugs that the simulator must detect from the outside."""

from __future__ import annotations

import msgspec

from tenax._core.etcd.operations import Compare
from tenax._core.leadership.decisions import Decisions
from tenax._core.leadership.keys import Keys
from tenax._core.leadership.machine import Leadership
from tenax._core.leadership.term import Term

# --- decisions --------------------------------------------------------------------------------------------------------


class UnguardedKeys(Keys):
    def is_led_by(self, leader, term):
        return ()

    def is_recorded_at(self, revision):
        return Compare(self.record, "version", -1, ">")


class WritesWithoutGuards(Leadership):
    """Replaces the record although another node leads."""

    def __init__(self, client, run_id, *arguments, **options):
        super().__init__(client, run_id, *arguments, **options)
        self._keys = UnguardedKeys(run_id)


class Hasty(Decisions):
    def submit(self, send, state, wall_ahead_s=0.0):
        super().submit(send, state, wall_ahead_s)
        if self._waiting:
            self._deliver(send)


class HastyTerm(Term):
    make_decisions = Hasty


class SendsBeforeItIsWritten(Leadership):
    """Sends a decision at once, and again when it is in etcd."""

    make_term = HastyTerm


class Forgetful(Decisions):
    def _not_written(self, error):
        self._waiting.popleft()


class ForgetfulTerm(Term):
    make_decisions = Forgetful


class DropsDecisions(Leadership):
    """Forgets a decision if etcd does not answer."""

    make_term = ForgetfulTerm


# --- authority --------------------------------------------------------------------------------------------------------


class LeadsAfterItsTerm(Leadership):
    """Ignores that its key is gone."""

    def _on_leader(self, kv, revision):
        if self.leading is None:
            super()._on_leader(kv, revision)

    def _on_lease_lost(self, why):
        if self.leading is None:
            super()._on_lease_lost(why)


# --- recovery ---------------------------------------------------------------------------------------------------------


class RecoversAtOnce(Leadership):
    """Does not wait for the members of the last generation."""

    def opened(self, elected, wall_ahead_s):
        opened = super().opened(elected, wall_ahead_s)
        return msgspec.structs.replace(opened, recover_s=0.0, return_s=0.0, alone_s=0.0)


class Credulous(Term):
    def probed(self, *, is_dead):
        super().probed(is_dead=True)


class TakesSilenceForDeath(Leadership):
    """An earlier leader that does not answer is taken for dead."""

    make_term = Credulous


# The seed that finds it, and the property.
MISTAKES: dict[type, tuple[int, str]] = {
    WritesWithoutGuards: (52, "S10"),
    SendsBeforeItIsWritten: (1, "S1"),
    DropsDecisions: (54, "L3"),
    LeadsAfterItsTerm: (4, "L3"),
    RecoversAtOnce: (4, "S1"),
    TakesSilenceForDeath: (20, "S1"),
}
