"""Leadership machines with bugs that the simulator must detect from the outside."""

from __future__ import annotations

import msgspec

from tenax._core.authority import Authority, AuthorityTerms
from tenax._core.etcd.operations import Compare
from tenax._core.leadership.candidacy import Candidacy
from tenax._core.leadership.decisions import Decisions
from tenax._core.leadership.keys import Keys
from tenax._core.leadership.machine import Leadership
from tenax._core.leadership.term import Term
from tenax._core.link import wire
from tenax._core.link.server import LinkServer
from tenax.testing.simulator import Fault, NodePlan, Setup
from tenax.testing.simulator.setup import WorkerBehaviour

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


class Overconfident(Authority):
    def is_sure(self, now):
        return True


class OverconfidentTerm(Term):
    make_authority = Overconfident


class SkipsTheLeaseCheck(Leadership):
    """Its answers keep workers alive although its lease in etcd may have ended."""

    make_term = OverconfidentTerm


class Partial(Authority):
    def counts(self, now, is_at_work, members):
        members = list(members)
        linked = [moment for moment in members if moment is not None]
        return super().counts(now, is_at_work, linked if len(linked) > 1 else members)


class PartialTerm(Term):
    make_authority = Partial


class CountsOnlyLinkedMembers(Leadership):
    """Takes the members that are linked to it for all members."""

    make_term = PartialTerm


class Lonely(Authority):
    def counts(self, now, is_at_work, members):
        members = list(members)
        return len(members) == 1 or super().counts(now, is_at_work, members)


class LonelyTerm(Term):
    make_authority = Lonely


class ContinuesAlone(Leadership):
    """Keeps a generation of one node alive without etcd, for as long as that lasts."""

    make_term = LonelyTerm


class KeepsTheOldLink(Leadership):
    """Stays linked to a leader that was replaced."""

    def _hand_over(self, leader, term):
        pass


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


class ShortMemory(Term):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._unconfirmed = self._unconfirmed[-1:]


class ForgetsEarlierLeaders(Leadership):
    """Knows only its predecessor, not the leaders before that one."""

    make_term = ShortMemory


# --- election ---------------------------------------------------------------------------------------------------------


class UnguardedElection(Keys):
    def has_no_leader(self):
        return Compare(self.leader, "version", -1, ">")

    def is_recorded_at(self, revision):
        return Compare(self.record, "version", -1, ">")


class Usurper(Candidacy):
    def __init__(self, client, keys, *arguments, **options):
        super().__init__(client, keys, *arguments, **options)
        self._keys = UnguardedElection("run")


class ReplacesTheLeaderWithoutAGuard(Leadership):
    """Writes itself as the leader although another node was elected since it has read the key."""

    make_candidacy = Usurper


class TakesLeavingForDeath(LinkServer):
    """Takes the end of a link over which a node has reported another leader for the death of the node."""

    def received(self, peer, frame, now):
        outputs = super().received(peer, frame, now)
        peer.has_joined |= isinstance(frame, wire.Replaced)
        return outputs


# The seed that finds it, and the property.
MISTAKES: dict[type, tuple[int, str]] = {
    WritesWithoutGuards: (52, "S10"),
    SendsBeforeItIsWritten: (1, "S1"),
    DropsDecisions: (54, "L3"),
    LeadsAfterItsTerm: (4, "L3"),
    RecoversAtOnce: (4, "S1"),
    TakesSilenceForDeath: (20, "S1"),
    SkipsTheLeaseCheck: (1443, "S1"),
    ReplacesTheLeaderWithoutAGuard: (34, "L3"),
}


def _isolated(plans: tuple[NodePlan, ...], nodes: tuple[int, int], *faults: Fault, seed: int = 1) -> Setup:
    return Setup(
        seed=seed,
        nodes=plans,
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        seconds=120.0,
        grace_s=40.0,
        has_etcd=True,
        scale_up=False,
        terms=AuthorityTerms().lease,
        behaviour=WorkerBehaviour(generation_s=1e6, fails=0.0, ignores_term=0.5),
        faults=faults,
    )


# Those that need several faults in a row: the faults that find it, and the property.
PLANNED: dict[type, tuple[Setup, str]] = {
    CountsOnlyLinkedMembers: (  # the leader ends the generation, and a worker does not stop
        _isolated(tuple(map(NodePlan, range(3))), (1, 3), Fault(20.0, "isolate", a=3, b=1, seconds=60.0), seed=14),
        "S1",
    ),
    ContinuesAlone: (_isolated((NodePlan(0), NodePlan(1, 3.0)), (1, 1), Fault(20.0, "isolate", seconds=80.0)), "S1"),
    ForgetsEarlierLeaders: (
        _isolated(
            (NodePlan(0), NodePlan(1), *(NodePlan(host, 3.0) for host in (2, 3, 4))),
            (2, 2),
            Fault(20.0, "isolate", a=3, b=1, seconds=90.0),  # both members
            Fault(35.0, "kill_coordinator"),  # their successor, which waits for them
        ),
        "S1",
    ),
}

# Those that break no property here, and why.
HARMLESS: dict[type, str] = {
    KeepsTheOldLink: "the old leader closes its links when it learns that it was replaced; until then its answers "
    "count only if all members have stayed, and then a successor waits for them. What is lost is the handover of a "
    "leader that is cut off from etcd alone, which has a test of its own",
    TakesLeavingForDeath: "a leader that is sent a later term stops serving at once. An earlier term can only be sent "
    "if an answer of etcd overtakes a watch, and in the simulation both use one connection",
}
