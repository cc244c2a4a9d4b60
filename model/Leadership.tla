----------------------------- MODULE Leadership -----------------------------
(***************************************************************************)
(* Who leads a run, and when a generation may follow another: the protocol *)
(* of the etcd engine, as far as safety goes.                              *)
(*                                                                         *)
(* There are no messages that need not be there.  Every step is optional,  *)
(* so a pause, a cut link and an etcd out of reach are the same thing: a   *)
(* step that is not taken.  What time does by itself is in Tick: ages      *)
(* grow, and a keeper kills workers whose fence has come.  No moment is    *)
(* stored, only ages, which stop growing where nobody asks any more: so    *)
(* time is without end and the number of states is not.                    *)
(*                                                                         *)
(* Mistakes is a set of names.  Each name changes one rule.  A model that  *)
(* finds no fault with a mistake in it would prove nothing.                *)
(***************************************************************************)
EXTENDS Naturals, Integers, FiniteSets, TLC

CONSTANTS
    Nodes,          \* agents; a restarted agent is another node
    Nobody,
    Ttl,            \* etcd lets go of the leader's key this long after the last keep-alive arrived, or later
    Sure,           \* a keep-alive proves the key for this long after it was sent: less than Ttl
    Settle,         \* a round trip proves for this long that a node is linked to us
    Fence,          \* workers live this long after the last counting beat was sent
    Lease,          \* a leader gives up a node that was silent for so long: more than Fence
    Outage,         \* a generation of one goes on without etcd for so long
    RecordTtl,      \* etcd drops a record that was not kept alive for so long; 0: never
    Begin,          \* "empty": nothing has happened; "running": generation 1 of BeginMembers nodes is at work;
                    \* "resting": it was, and all of its workers have stopped
    BeginMembers,
    MaxGeneration, MaxTerm, MaxDeaths,          \* bounds of the exploration
    Slow,           \* answers and answers of etcd may be long under way
    Breaks,         \* links may break and be made again
    Stops,          \* workers may stop by themselves
    Verdicts,       \* a leader may end the run
    Calm,           \* nobody is ever late: for what must not be lost
    EtcdIsGone,     \* from the beginning on
    Direct,         \* the last leader forms the last generation, and so on back; nobody leads twice: other
                    \* worlds have the rest
    Focus,          \* look at S1 only: leave out what cannot break it
    Mistakes

Wrong(name) == name \in Mistakes
Min(a, b) == IF a < b THEN a ELSE b
Max(a, b) == IF a > b THEN a ELSE b
Older(age, most) == IF age < 0 THEN age ELSE Min(age + 1, most)     \* below zero: there is none

ProofMost == Max(Sure, IF RecordTtl > 0 THEN Max(Outage, RecordTtl) ELSE Outage) + 1
ShownMost == Settle + Lease
ElectedMost == Max(Outage, Settle) + Lease
FenceMost == IF Wrong("fence later than the lease") THEN Lease + 1 ELSE Fence

VARIABLES
    key,        \* etcd: who leads, in which term, and for how long its lease was not kept alive
    terms,      \* how many terms there were
    record,     \* etcd: the last generation, its members, who wrote that, and whether the run is over
    recordAge,  \* for how long its lease was not kept alive
    last,       \* history: the greatest generation that was ever written
    ended,      \* history: a verdict was written
    before,     \* history: the record before this one (for one of the mistakes)
    acks,       \* acknowledgements under way (for one of the mistakes: otherwise to be there at once is the worst)
    led,        \* who has led, in direct worlds
    alive,      \* the agent, with its keeper and its workers
    lead,       \* what each node knows as a leader; it may long have been deposed
    trip,       \* trip[l][n]: when l sent the last thing that n is known to have received
    office,     \* what the leader that has the key knows of others
    link,       \* with which leader each node is linked: one or none
    high,       \* the greatest term that each node was linked with
    told,       \* the generation that is on its way to the node
    answer,     \* the answer that is on its way to the node
    fence,      \* for how long the last beat with a counting answer was sent
    work        \* the generation whose workers live there; 0: none

vars == <<key, terms, record, recordAge, last, ended, before, acks, led, alive, lead, trip, office, link, high,
          told, answer, fence, work>>

NoKey == [term |-> 0, holder |-> Nobody, age |-> 0]
NoRecord == [generation |-> 0, members |-> {}, writer |-> Nobody, over |-> FALSE]
NoWrite == [kind |-> "none", members |-> {}, done |-> FALSE]
Follower == [term |-> 0, generation |-> 0, members |-> {}, wrote |-> FALSE, over |-> FALSE, proof |-> 0,
             sent |-> -1, write |-> NoWrite]
NoTrips == [n \in Nodes |-> Settle + 1]
NoAnswer == [age |-> -1, counts |-> FALSE]
NoOffice == [elected |-> -1, shown |-> -1, proven |-> -1, heard |-> [n \in Nodes |-> -1], deaths |-> {}]

IsLeading(l) == lead[l].term # 0
InOffice(l) == IsLeading(l) /\ key.term = lead[l].term

-----------------------------------------------------------------------------
(* The authority of a leader: whether its answer may prolong the life of workers. *)

Forming(l) == lead[l].write.kind = "form"
\* A generation counts from the moment its record is sent to etcd: nobody knows when it is there.
MembersOf(l) ==
    IF Forming(l) /\ ~Wrong("together with the generation before while the next is written")
    THEN lead[l].write.members ELSE lead[l].members
\* Who counts without etcd must be the one that the record names: a successor looks for nobody else's death.
HasWritten(l) == lead[l].wrote \/ Forming(l) \/ Wrong("together without having written the record")

RecordIsSafe(l) ==
    \/ RecordTtl = 0
    \/ lead[l].wrote /\ lead[l].proof <= RecordTtl - Lease - 1
    \/ Wrong("together for longer than the record lives")

ByLease(l) == lead[l].proof <= Sure
Together(l) ==
    LET members == MembersOf(l)
        asked == IF Wrong("together with those who are linked") THEN {n \in members: link[n] = l} ELSE members
    IN /\ Cardinality(members) >= (IF Wrong("together with oneself") THEN 1 ELSE 2)
       /\ HasWritten(l)
       /\ RecordIsSafe(l)
       /\ \A n \in asked: trip[l][n] <= Settle \/ Wrong("together by old proofs")
Alone(l) ==
    /\ Cardinality(MembersOf(l)) = 1
    /\ HasWritten(l)
    /\ RecordIsSafe(l)
    /\ lead[l].proof <= Outage \/ Wrong("alone without limit")
Idle(l) ==
    \/ lead[l].over
    \/ /\ \/ lead[l].write.kind \in {"none", "settle"}
          \/ Wrong("idle while a decision is written")
       /\ \/ \A n \in lead[l].members:
                \/ n \in office.deaths /\ InOffice(l)
                \/ link[n] = l /\ work[n] = 0 /\ told[n] = 0
                \/ link[n] # l /\ (work[n] = 0 \/ high[n] > lead[l].term)     \* lost: fenced, or with a later leader
          \/ Wrong("idle while a decision is written") /\ lead[l].write.kind = "verdict"

Counts(l) ==
    \/ ByLease(l) \/ Idle(l)
    \/ (Together(l) \/ Alone(l)) /\ ~Wrong("nothing counts without etcd")
    \/ Wrong("every answer counts")

-----------------------------------------------------------------------------
(* When a member of the generation is surely without workers, as the leader that has the key sees it. *)

NotAwaited(l, n) == n \in office.deaths

DeadlineIsOver(l) ==
    LET size == Cardinality(lead[l].members) IN
    \/ Wrong("no wait before forming")
    \/ size >= 2 /\ office.shown >= (IF Wrong("wait of a lease only") THEN Lease ELSE Settle + Lease)
    \/ size >= 2 /\ Wrong("forming without having seen a member") /\ office.elected >= Settle + Lease
    \/ size = 1 /\ office.elected >= (IF Wrong("no outage in the wait for one") THEN Lease ELSE Outage + Lease)
    \/ office.proven >= Lease

AllAwaitedAreLinked(l) ==
    \A n \in lead[l].members: NotAwaited(l, n) \/ office.heard[n] >= 0

\* A node without workers can do no harm. A leader often knows: the node says so, or its host closed the connection. It
\* need not: to let it go on by luck only adds behaviours.
IsHarmless(l, n) ==
    work[n] = 0 /\ told[n] = 0 /\ \A other \in Nodes \ {l}: ~(Forming(other) /\ n \in lead[other].write.members)

IsGone(l, n) ==
    \/ IsHarmless(l, n)
    \/ NotAwaited(l, n)
    \/ /\ office.heard[n] >= (IF Wrong("silent for a fence is lost") THEN Fence ELSE Lease)
       /\ office.heard[n] >= 0
    \/ office.heard[n] < 0 /\ DeadlineIsOver(l)
    \/ office.heard[n] >= 0 /\ link[n] # l
          /\ \/ Wrong("a link that broke is a death")
             \/ Wrong("missing at the deadline is lost, though it was here") /\ DeadlineIsOver(l)

-----------------------------------------------------------------------------
(* etcd *)

KeepsTrackOfElection(members) ==
    Cardinality(members) = 1 \/ Wrong("forming without having seen a member")

MayOpen(n) == record.generation > 0 \/ high[n] = 0 \/ last = 0 \/ Wrong("a run anew where the record is gone")

Win(n) ==
    /\ ~EtcdIsGone
    /\ alive[n] /\ ~IsLeading(n)
    /\ key.term = 0 /\ terms < MaxTerm
    /\ Direct => n \notin led
    /\ led' = IF Direct THEN led \cup {n} ELSE led
    /\ MayOpen(n)
    /\ terms' = terms + 1
    /\ key' = [term |-> terms + 1, holder |-> n, age |-> 0]
    /\ \E seen \in {record} \cup (IF Wrong("record read before the election was won") THEN {before} ELSE {}):
        /\ lead' = [lead EXCEPT ![n] = [Follower EXCEPT
                !.term = terms + 1, !.generation = seen.generation, !.members = seen.members, !.over = seen.over]]
        /\ office' = [NoOffice EXCEPT !.elected = IF KeepsTrackOfElection(seen.members) THEN 0 ELSE -1]
    /\ trip' = [trip EXCEPT ![n] = NoTrips]
    /\ recordAge' = IF record.generation > 0 THEN recordAge ELSE 0  \* it keeps its lease until the next write
    /\ UNCHANGED <<record, last, ended, before, acks, alive, link, high, told, answer, fence, work>>

\* Etcd takes it; its answer may be long under way, and is worth the time since it was sent.
KeepAlive(l) ==
    /\ ~EtcdIsGone
    /\ InOffice(l)
    /\ key' = [key EXCEPT !.age = 0]
    /\ recordAge' = IF lead[l].wrote THEN 0 ELSE recordAge
    /\ \/ Slow /\ lead' = [lead EXCEPT ![l].sent = 0]
       \/ lead' = [lead EXCEPT ![l].proof = 0, ![l].sent = -1]
    /\ UNCHANGED <<terms, record, last, ended, before, acks, led, alive, trip, office, link, high, told, answer,
                   fence, work>>

HearKeepAlive(l) ==
    /\ lead[l].sent >= 0
    /\ lead' = [lead EXCEPT
            ![l].proof = IF Wrong("a keep-alive counts from its answer") THEN 0 ELSE Min(@, lead[l].sent),
            ![l].sent = -1]
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, alive, trip, office, link,
                   high, told, answer, fence, work>>

Expire ==
    /\ key.term # 0 /\ key.age >= Ttl
    /\ key' = NoKey /\ office' = NoOffice
    /\ UNCHANGED <<terms, record, recordAge, last, ended, before, acks, led, alive, lead, trip, link, high,
                   told, answer, fence, work>>

\* Nobody listens there any more: the agent is dead, its keeper too, and so every worker. Anybody may delete the key.
LooksDead(n) ==
    \/ ~alive[n]
    \/ Wrong("a deposed leader closes its listener") /\ ~IsLeading(n)
    \/ Wrong("refused is dead, whoever lives")

DeleteKey ==
    /\ ~EtcdIsGone
    /\ key.term # 0 /\ LooksDead(key.holder)
    /\ key' = NoKey /\ office' = NoOffice
    /\ UNCHANGED <<terms, record, recordAge, last, ended, before, acks, led, alive, lead, trip, link, high,
                   told, answer, fence, work>>

\* The record goes: soon after a verdict, or when nobody kept it alive.
DropRecord ==
    /\ record # NoRecord
    /\ record.over \/ (RecordTtl > 0 /\ recordAge >= RecordTtl)
    /\ record' = NoRecord
    /\ UNCHANGED <<key, terms, recordAge, last, ended, before, acks, led, alive, lead, trip, office, link, high,
                   told, answer, fence, work>>

-----------------------------------------------------------------------------
(* Decisions: sent to etcd, taken there under the guard, heard of, said. *)

Send(l, write) == lead' = [lead EXCEPT ![l].write = write]

Form(l) ==
    /\ InOffice(l) /\ lead[l].write = NoWrite
    /\ ~lead[l].over \/ Wrong("a verdict is overwritten")
    /\ lead[l].generation < MaxGeneration
    /\ Direct => MaxTerm - lead[l].term = MaxGeneration - (lead[l].generation + 1)
    /\ \A n \in lead[l].members: IsGone(l, n)
    /\ \E chosen \in SUBSET {n \in Nodes: alive[n] /\ link[n] = l /\ work[n] = 0 /\ told[n] = 0}:
        /\ chosen # {}
        /\ Send(l, [kind |-> "form", members |-> chosen, done |-> FALSE])
        /\ told' = IF Wrong("said before it is written")
                   THEN [n \in Nodes |-> IF n \in chosen THEN lead[l].generation + 1 ELSE told[n]] ELSE told
        /\ fence' = [n \in Nodes |-> IF n \in chosen THEN 0 ELSE fence[n]]
        /\ office' = [office EXCEPT !.heard = [n \in Nodes |-> IF n \in chosen THEN 0 ELSE @[n]]]
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, alive, trip, link, high,
                   answer, work>>

\* Everybody is here and at work: it goes on. The record shall say with whom.
Adopt(l) ==
    /\ InOffice(l) /\ lead[l].write = NoWrite
    /\ ~lead[l].wrote /\ ~lead[l].over /\ lead[l].members # {}
    /\ \/ \A n \in lead[l].members: alive[n] /\ link[n] = l /\ work[n] = lead[l].generation
       \/ Wrong("adopting before all are here")
    /\ Send(l, [kind |-> "adopt", members |-> lead[l].members, done |-> FALSE])
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, alive, trip, office, link,
                   high, told, answer, fence, work>>

\* The generation has ended everywhere: a successor need not wait for anybody.
SettleGeneration(l) ==
    /\ InOffice(l) /\ lead[l].write = NoWrite
    /\ ~lead[l].over /\ lead[l].members # {}
    /\ Stops
    /\ \A n \in lead[l].members: IsGone(l, n)
    /\ Send(l, [kind |-> "settle", members |-> {}, done |-> FALSE])
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, alive, trip, office, link,
                   high, told, answer, fence, work>>

EndTheRun(l) ==
    /\ Verdicts
    /\ InOffice(l) /\ lead[l].write = NoWrite /\ ~lead[l].over /\ record # NoRecord
    /\ Send(l, [kind |-> "verdict", members |-> lead[l].members, done |-> FALSE])
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, alive, trip, office, link,
                   high, told, answer, fence, work>>

Written(l) ==
    LET write == lead[l].write IN
    CASE write.kind = "form" ->
            [generation |-> lead[l].generation + 1, members |-> write.members, writer |-> l, over |-> FALSE]
      [] write.kind = "adopt" -> [record EXCEPT !.writer = l]
      [] write.kind = "settle" -> [record EXCEPT !.members = {}, !.writer = l]
      [] write.kind = "verdict" -> [record EXCEPT !.over = TRUE, !.writer = l]

\* A write that is long under way is applied, if at all, under the guard: while the sender has the key in its term.
Apply(l) ==
    /\ ~EtcdIsGone
    /\ lead[l].write.kind # "none" /\ ~lead[l].write.done
    /\ InOffice(l) \/ Wrong("no guard on writes")
    /\ record' = Written(l)
    /\ recordAge' = 0
    /\ last' = Max(last, record'.generation)
    /\ ended' = (ended \/ record'.over)
    /\ before' = IF Wrong("record read before the election was won") THEN record ELSE before
    /\ lead' = [lead EXCEPT ![l].write.done = TRUE]
    /\ office' = IF InOffice(l) /\ lead[l].write.kind \in {"form", "settle"}
                 THEN [office EXCEPT !.elected = -1, !.shown = -1, !.proven = -1, !.deaths = {}] ELSE office
    /\ UNCHANGED <<key, terms, acks, led, alive, trip, link, high, told, answer, fence, work>>

HearWritten(l) ==
    LET write == lead[l].write IN
    /\ write.done
    /\ lead' = [lead EXCEPT
            ![l].write = NoWrite,
            ![l].wrote = @ \/ write.kind \in {"form", "adopt"},
            ![l].over = @ \/ write.kind = "verdict",
            ![l].generation = IF write.kind = "form" THEN @ + 1 ELSE @,
            ![l].members = IF write.kind \in {"form", "settle"} THEN write.members ELSE @]
    /\ told' = IF write.kind = "form" /\ ~Wrong("said before it is written")
               THEN [n \in Nodes |-> IF n \in write.members /\ alive[n] /\ link[n] = l
                                     THEN lead[l].generation + 1 ELSE told[n]] ELSE told
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, alive, trip, office, link,
                   high, answer, fence, work>>

\* A leader learns, sooner or later, that it is deposed. It closes its links, and keeps its listener.
StepDown(l) ==
    LET mine == {n \in Nodes: link[n] = l} IN
    /\ IsLeading(l) /\ ~InOffice(l)
    /\ lead' = [lead EXCEPT ![l] = Follower]
    /\ trip' = [trip EXCEPT ![l] = NoTrips]
    /\ link' = [n \in Nodes |-> IF n \in mine THEN Nobody ELSE link[n]]
    /\ told' = [n \in Nodes |-> IF n \in mine THEN 0 ELSE told[n]]
    /\ answer' = [n \in Nodes |-> IF n \in mine THEN NoAnswer ELSE answer[n]]
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, alive, office, high, fence,
                   work>>

\* Who leads asks at the address of who wrote the record, and nobody listens there.
FindTheWriterDead(l) ==
    LET dead == record.writer IN
    /\ InOffice(l) /\ lead[l].write = NoWrite /\ ~lead[l].over /\ lead[l].members # {}
    /\ office.proven < 0
    /\ \/ /\ dead # Nobody /\ dead # l /\ LooksDead(dead)
          /\ office' = [office EXCEPT !.deaths = {dead} \cap lead[l].members,
                        !.proven = IF Wrong("a proof of death needs no wait") THEN Lease
                                   ELSE IF Wrong("a proof of death counts from before the election") /\ ~alive[dead]
                                   THEN fence[dead] ELSE 0]      \* of a dead node: since when it is
       \/ \E other \in Nodes:
          /\ Wrong("the death of any leader will do") /\ other # l /\ ~alive[other]
          /\ office' = [office EXCEPT !.deaths = {other} \cap lead[l].members, !.proven = 0]
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, alive, lead, trip, link, high,
                   told, answer, fence, work>>

-----------------------------------------------------------------------------
(* Links, beats and answers *)

\* Ages are kept only where they matter. A node that has no workers and is not about to have some needs no fence: when
\* it is chosen, the youngest it could have is assumed (Form). The same goes for when it was heard, and for round trips.
IsConcerned(n) ==
    \/ work[n] # 0 \/ told[n] # 0
    \/ link[n] # Nobody /\ Forming(link[n]) /\ n \in lead[link[n]].write.members
Matters(l, n) == n \in lead[l].members \/ n \in lead[l].write.members

HeardBy(l, n) ==
    IF InOffice(l) /\ Matters(l, n)
    THEN [office EXCEPT !.heard[n] = IF work[n] # 0 \/ IsConcerned(n) THEN 0 ELSE @,
                        !.shown = IF @ < 0 /\ n \in lead[l].members /\ ~lead[l].wrote /\ office.heard[n] < 0
                                  THEN 0 ELSE @]
    ELSE office

Link(n, l) ==
    /\ alive[n] /\ alive[l] /\ IsLeading(l)
    /\ n = l \/ ~IsLeading(n)
    /\ link[n] # l
    /\ \/ lead[l].term > high[n]
       \/ lead[l].term = high[n] /\ link[n] = Nobody
       \/ Wrong("a node goes back to an earlier leader")
    /\ link' = [link EXCEPT ![n] = l]
    /\ high' = [high EXCEPT ![n] = lead[l].term]
    /\ told' = [told EXCEPT ![n] = 0]
    /\ answer' = [answer EXCEPT ![n] = NoAnswer]
    /\ office' = HeardBy(l, n)
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, alive, lead, trip, fence,
                   work>>

Break(n) ==
    /\ Breaks
    /\ alive[n] /\ link[n] # Nobody
    /\ link' = [link EXCEPT ![n] = Nobody]
    /\ told' = [told EXCEPT ![n] = 0]
    /\ answer' = [answer EXCEPT ![n] = NoAnswer]
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, alive, lead, trip, office,
                   high, fence, work>>

\* A beat arrives at the leader, which decides what its answer is worth. The answer is on its way: or there already.
Answer(n) ==
    LET l == link[n] IN
    /\ alive[n] /\ l # Nobody
    /\ office' = HeardBy(l, n)
    /\ \/ /\ Slow
          /\ answer' = [answer EXCEPT ![n] = [age |-> 0, counts |-> Counts(l)]]
          /\ UNCHANGED <<fence, trip>>
       \/ /\ told[n] = 0
          /\ answer' = [answer EXCEPT ![n] = NoAnswer]
          /\ fence' = [fence EXCEPT ![n] = IF IsConcerned(n) /\ Counts(l) THEN 0 ELSE @]
          /\ trip' = [trip EXCEPT ![l][n] = IF HasWritten(l) /\ n \in MembersOf(l) THEN 0 ELSE @]
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, alive, lead, link, high, told,
                   work>>

\* What was said before it has been heard: a link keeps the order. The acknowledgement is at the leader at once.
HearAnswer(n) ==
    LET l == link[n] IN
    /\ answer[n].age >= 0 /\ told[n] = 0
    /\ fence' = [fence EXCEPT ![n] =
            IF ~answer[n].counts \/ ~IsConcerned(n) THEN @
            ELSE IF Wrong("the fence counts from the answer") THEN 0 ELSE Min(@, answer[n].age)]
    /\ trip' = [trip EXCEPT ![l][n] =
            IF ~HasWritten(l) \/ n \notin MembersOf(l) THEN @ ELSE Min(@, answer[n].age)]
    /\ answer' = [answer EXCEPT ![n] = NoAnswer]
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, alive, lead, office, link,
                   high, told, work>>

\* Only with the mistake: an acknowledgement is long under way, and then taken for news.
AcknowledgeLate(n) ==
    /\ Wrong("a round trip counts from its end")
    /\ \/ /\ alive[n] /\ link[n] # Nobody
          /\ acks' = acks \cup {<<link[n], n>>}
          /\ UNCHANGED trip
       \/ \E l \in Nodes:
          /\ <<l, n>> \in acks /\ IsLeading(l)
          /\ acks' = acks \ {<<l, n>>}
          /\ trip' = [trip EXCEPT ![l][n] = 0]
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, led, alive, lead, office, link, high,
                   told, answer, fence, work>>

\* Only with the mistake: a node that is with another leader still acknowledges what the old one sends.
AcknowledgeTwice(n, l) ==
    /\ Wrong("a node keeps two links")
    /\ alive[n] /\ IsLeading(l) /\ link[n] # Nobody /\ lead[l].term < high[n]
    /\ trip' = [trip EXCEPT ![l][n] = 0]
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, alive, lead, office, link,
                   high, told, answer, fence, work>>

\* The node hears of its generation, and starts workers if it has not been silent for too long itself.
Hear(n) ==
    /\ told[n] # 0
    /\ told' = [told EXCEPT ![n] = 0]
    /\ work' = [work EXCEPT ![n] =
            IF fence[n] <= FenceMost \/ Wrong("workers start with an old fence") THEN told[n] ELSE @]
    /\ fence' = [fence EXCEPT ![n] = IF Wrong("workers start with an old fence") THEN Min(@, Fence) ELSE @]
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, alive, lead, trip, office,
                   link, high, answer>>

Stop(n) ==
    /\ Stops
    /\ work[n] # 0
    /\ work' = [work EXCEPT ![n] = 0]
    /\ fence' = [fence EXCEPT ![n] = FenceMost + 1]
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, alive, lead, trip, office,
                   link, high, told, answer>>

\* An agent dies, and with it all that it started. Its host may close its links; nothing listens there any more.
Die(n) ==
    LET mine == {m \in Nodes: link[m] = n} IN
    /\ Cardinality({m \in Nodes: ~alive[m]}) < MaxDeaths
    /\ alive[n]
    /\ alive' = [alive EXCEPT ![n] = FALSE]
    /\ work' = [work EXCEPT ![n] = 0]
    /\ lead' = [lead EXCEPT ![n] = Follower]
    /\ trip' = [trip EXCEPT ![n] = NoTrips]
    /\ link' = [m \in Nodes |-> IF m \in mine THEN Nobody ELSE link[m]]
    /\ told' = [m \in Nodes |-> IF m \in mine \/ m = n THEN 0 ELSE told[m]]
    /\ answer' = [m \in Nodes |-> IF m \in mine \/ m = n THEN NoAnswer ELSE answer[m]]
    /\ fence' = [fence EXCEPT ![n] = IF Wrong("a proof of death counts from before the election") THEN 0 ELSE FenceMost + 1]
    /\ UNCHANGED <<key, terms, record, recordAge, last, ended, before, acks, led, office, high>>

-----------------------------------------------------------------------------
(* Time *)

\* In a calm world a moment passes only when everybody has done what there was to do.
NobodyIsLate ==
    \A n \in Nodes:
        /\ alive[n] => link[n] # Nobody /\ trip[link[n]][n] = 0 /\ told[n] = 0
        /\ alive[n] /\ InOffice(n) /\ ~EtcdIsGone =>
              lead[n].write = NoWrite /\ (lead[n].wrote \/ ~(\A m \in lead[n].members: link[m] = n))

\* One of the members has left for a later leader, for good, and its last round trip is old.
IsNeverTogether(l) ==
    /\ \E n \in MembersOf(l): trip[l][n] >= Settle /\ (high[n] > lead[l].term \/ ~alive[n])
    /\ Mistakes \cap {"a node goes back to an earlier leader", "a node keeps two links", "together by old proofs",
                      "a round trip counts from its end", "together with those who are linked"} = {}

Tick ==
    /\ Calm => NobodyIsLate
    /\ key' = IF key.term = 0 THEN key ELSE [key EXCEPT !.age = Min(@ + 1, Ttl)]
    /\ recordAge' = IF RecordTtl = 0 THEN 0 ELSE Min(recordAge + 1, RecordTtl)
    /\ lead' = [l \in Nodes |->
            IF ~IsLeading(l) THEN lead[l]
            ELSE [lead[l] EXCEPT
                !.proof = Min(@ + 1, ProofMost),
                !.sent = IF @ + 1 >= lead[l].proof + 1 /\ ~Wrong("a keep-alive counts from its answer") THEN -1
                         ELSE Older(@, ProofMost)]]
    /\ trip' = [l \in Nodes |->
            IF ~IsLeading(l) THEN trip[l]
            ELSE IF IsNeverTogether(l) THEN NoTrips
            ELSE [n \in Nodes |-> Min(trip[l][n] + 1, Settle + 1)]]
    /\ answer' = [n \in Nodes |->
            IF answer[n].age < 0 THEN NoAnswer
            ELSE IF answer[n].age >= Max(Fence, Settle) /\ ~Wrong("the fence counts from the answer") THEN NoAnswer
            ELSE [answer[n] EXCEPT !.age = Min(@ + 1, Max(Fence, Settle))]]
    /\ fence' = [n \in Nodes |-> IF IsConcerned(n) \/ ~alive[n] THEN Min(fence[n] + 1, FenceMost + 1) ELSE FenceMost + 1]
    /\ work' = [n \in Nodes |-> IF fence[n] >= FenceMost THEN 0 ELSE work[n]]
    /\ office' = [office EXCEPT
            !.elected = Older(@, ElectedMost), !.shown = Older(@, ShownMost), !.proven = Older(@, Lease),
            !.heard = [n \in Nodes |-> IF work'[n] = 0 /\ ~IsConcerned(n) THEN -1 ELSE Older(@[n], Lease)]]
    /\ UNCHANGED <<terms, record, last, ended, before, acks, led, alive, link, high, told>>

-----------------------------------------------------------------------------

Common ==
    /\ recordAge = 0 /\ ended = FALSE
    /\ alive = [n \in Nodes |-> TRUE]
    /\ told = [n \in Nodes |-> 0]
    /\ answer = [n \in Nodes |-> NoAnswer]
    /\ before = NoRecord /\ acks = {} /\ led = {n \in Nodes: Direct /\ key.holder = n}

Empty ==
    /\ key = NoKey /\ terms = 0 /\ record = NoRecord /\ last = 0
    /\ Common
    /\ lead = [n \in Nodes |-> Follower] /\ trip = [n \in Nodes |-> NoTrips] /\ office = NoOffice
    /\ link = [n \in Nodes |-> Nobody] /\ high = [n \in Nodes |-> 0]
    /\ fence = [n \in Nodes |-> FenceMost + 1] /\ work = [n \in Nodes |-> 0]

\* Generation 1 is at work, and its leader was seen by every node a moment ago.
\* (Where records go, the others are newcomers, who know nothing of the run.)
Running ==
    \E first \in Nodes: \E members \in SUBSET Nodes:
    LET IsThere(n) == n = first \/ n \in members \/ RecordTtl = 0 IN
    /\ Cardinality(members) = BeginMembers
    /\ key = [term |-> 1, holder |-> first, age |-> 0] /\ terms = 1
    /\ Common
    /\ record = [generation |-> 1, members |-> members, writer |-> first, over |-> FALSE] /\ last = 1
    /\ lead = [n \in Nodes |-> IF n # first THEN Follower ELSE
            [Follower EXCEPT !.term = 1, !.generation = 1, !.members = members, !.wrote = TRUE]]
    /\ trip = [n \in Nodes |-> IF n = first THEN [m \in Nodes |-> IF m \in members THEN 0 ELSE Settle + 1] ELSE NoTrips]
    /\ office = [NoOffice EXCEPT !.heard = [n \in Nodes |-> IF n \in members /\ Begin = "running" THEN 0 ELSE -1]]
    /\ link = [n \in Nodes |-> IF IsThere(n) THEN first ELSE Nobody]
    /\ high = [n \in Nodes |-> IF IsThere(n) THEN 1 ELSE 0]
    /\ fence = [n \in Nodes |-> IF n \in members /\ Begin = "running" THEN 0 ELSE FenceMost + 1]
    /\ work = [n \in Nodes |-> IF n \in members /\ Begin = "running" THEN 1 ELSE 0]

Init == IF Begin = "empty" THEN Empty ELSE Running

Next ==
    \/ Tick \/ Expire \/ DeleteKey \/ DropRecord
    \/ \E n \in Nodes:
        \/ Win(n) \/ KeepAlive(n) \/ HearKeepAlive(n) \/ StepDown(n) \/ FindTheWriterDead(n)
        \/ Form(n) \/ Adopt(n) \/ SettleGeneration(n) \/ EndTheRun(n) \/ Apply(n) \/ HearWritten(n)
        \/ Break(n) \/ Answer(n) \/ HearAnswer(n) \/ AcknowledgeLate(n) \/ Hear(n) \/ Stop(n) \/ Die(n)
        \/ \E l \in Nodes: Link(n, l) \/ AcknowledgeTwice(n, l)

\* Where nothing can be formed any more, and only one generation is at work or to be told, nothing can go wrong. With
\* Focus also where nobody is at work nor will be but by a generation to be formed, which is the last: S1 cannot fail.
MayForm == last < MaxGeneration /\ (key.term # 0 \/ terms < MaxTerm)
Interesting ==
    \/ \E n \in Nodes: work[n] \notin {0, last} \/ told[n] \notin {0, last}
    \/ \E l \in Nodes: lead[l].write.kind # "none" /\ ~lead[l].write.done /\ (InOffice(l) \/ Mistakes # {}) /\ ~Focus
    \/ MayForm /\ \/ ~Focus
                  \/ \E n \in Nodes: work[n] # 0 \/ told[n] # 0 \/ lead[n].write.done
                  \/ MaxGeneration - last >= 2

Spec == Init /\ [][Next]_vars
Symmetry == Permutations(Nodes)

-----------------------------------------------------------------------------
(* What must always hold *)

\* S1: no two generations have workers at the same time.
OneGenerationAtWork ==
    \A m, n \in Nodes: work[m] # 0 /\ work[n] # 0 => work[m] = work[n]

\* S2: a number is formed once, with one list of members, and whoever works by it is in that list.
NumbersGrow == [][record'.generation \in {record.generation, 0} \/ record'.generation = last + 1]_vars
MembersStay ==
    [][record'.generation = record.generation => record'.members \in {record.members, {}}]_vars
WorkersAreMembers ==
    \A n \in Nodes: work[n] # 0 /\ work[n] = record.generation /\ record.members # {} => n \in record.members

\* S3: nothing is heard before it is written; after a verdict nothing is formed.
WrittenFirst == \A n \in Nodes: work[n] <= last /\ told[n] <= last
NothingAfterTheVerdict == [][ended => last' = last /\ record'.generation \in {record.generation, 0}
                                      /\ (record' # record => record'.over \/ record' = NoRecord)]_vars

\* S4: who has not the key changes nothing.
OnlyTheLeaderWrites ==
    [][record' # record /\ record' # NoRecord =>
        \E l \in Nodes: lead'[l].write # lead[l].write /\ lead[l].term = key.term /\ key.term # 0]_vars

\* In a calm world nobody is restarted.
NobodyIsRestarted == \A n \in record.members: alive[n] => work[n] = 1

-----------------------------------------------------------------------------
(* What must be possible: each is given to TLC as if it were to hold never, and must be found. *)

NeverNextGeneration == ~\E n \in Nodes: work[n] = 2
NeverNextUnderAnother == ~\E n \in Nodes: work[n] = 2 /\ key.term >= 2 /\ lead[key.holder].wrote
NeverAdopted == ~\E l \in Nodes: lead[l].term >= 2 /\ lead[l].wrote /\ lead[l].generation = 1
NeverTogether == ~\E l \in Nodes: lead[l].term # 0 /\ ~ByLease(l) /\ Together(l) /\ key.term > lead[l].term
                                  /\ \E n \in Nodes: work[n] # 0 /\ link[n] = l
NeverAloneAfterAll == ~\E l \in Nodes: Alone(l) /\ ~ByLease(l) /\ key.term > lead[l].term
=============================================================================
