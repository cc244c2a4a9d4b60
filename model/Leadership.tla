----------------------------- MODULE Leadership -----------------------------
(***************************************************************************)
(* Who leads a run, and when a generation may follow another: the protocol *)
(* of the etcd engine, as far as safety is concerned.  The actions have    *)
(* the names of the transitions of the machine (src/tenax/_core/leadership *)
(* and src/tenax/_core/link).                                              *)
(*                                                                         *)
(* Every step is optional, so a pause, a cut link and an etcd that cannot  *)
(* be reached are the same: a step that is not taken.  Pass is what time   *)
(* does by itself: ages grow, and a keeper kills workers whose fence has   *)
(* come.  No moment is stored, only ages, which stop growing where they do *)
(* not matter any more: so time has no end, and the number of states has.  *)
(*                                                                         *)
(* Mistakes is a set of names.  Each name changes one rule.  A model that  *)
(* finds no fault with a mistake in it would prove nothing.                *)
(*                                                                         *)
(* Parameters of actions that Next fixes (ages, what an answer counts, who *)
(* is sent a decision) are given by the histories of LeadershipTrace.tla.  *)
(***************************************************************************)
EXTENDS Naturals, Integers, Sequences, FiniteSets, TLC

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
    Resigns,        \* leaders may leave
    Vain,           \* what was sent may arrive after its sender has died or left, and a deposed leader goes on deciding
    Verdicts,       \* a leader may end the run
    Calm,           \* nobody is ever late: for what must not be lost
    EtcdIsGone,     \* from the beginning on
    Direct,         \* the last leader forms the last generation, and so on back; nobody leads twice: other
                    \* worlds have the rest
    Focus,          \* look at S1 only: leave out what cannot break it
    Exact,          \* keep every age, also where it does not matter: for histories
    Grain,          \* how precisely ages are known: 0, and in histories the error of rounding
    Mistakes

Wrong(name) == name \in Mistakes
Min(a, b) == IF a < b THEN a ELSE b
Max(a, b) == IF a > b THEN a ELSE b
Older(age, by, most) == IF age < 0 THEN age ELSE Min(age + by, most)     \* below zero: there is none

ProofMost == Max(Sure, IF RecordTtl > 0 THEN Max(Outage, RecordTtl) ELSE Outage) + 1 + Grain
ShownMost == Settle + Lease
ElectedMost == Max(Outage, Settle) + Lease
FenceMost == IF Wrong("fence later than the lease") THEN Lease + 1 ELSE Fence

VARIABLES
    key,        \* etcd: who leads, in which term, and for how long its lease was not kept alive
    terms,      \* how many terms there were
    record,     \* etcd: the term in which the run began, the last generation, its members, who wrote that, the leaders
                \* before that one that may still answer members, and whether the run is over
    recordAge,  \* for how long its lease was not kept alive
    last,       \* history: the greatest generation that was ever written
    ended,      \* history: a verdict was written
    stale,      \* history: the record before this one (for one of the mistakes)
    acks,       \* acknowledgements under way (for one of the mistakes: otherwise to be there at once is the worst)
    led,        \* who has led, in direct worlds
    alive,      \* the agent, with its keeper and its workers
    lead,       \* what each node knows as a leader; it may long have been deposed
    late,       \* late[n]: a decision that is on its way to etcd although n has died or left
    trip,       \* trip[l][n]: when l sent the last thing that n is known to have received
    office,     \* what the leader that has the key knows of others
    link,       \* with which leader each node is linked: one or none
    high,       \* the greatest term that each node was linked with
    told,       \* the generation that is on its way to the node
    got,        \* the last generation that the node has received, where it may be sent again
    answer,     \* the answers that are on their way to the node
    fence,      \* for how long the last beat with a counting answer was sent
    work        \* the generation whose workers live there; 0: none

vars == <<key, terms, record, recordAge, last, ended, stale, acks, led, alive, lead, late, trip, office, link, high,
          told, got, answer, fence, work>>
etcd == <<key, terms, record, recordAge, last, ended, stale>>
links == <<link, high, told, got, answer>>

NoKey == [term |-> 0, holder |-> Nobody, age |-> 0]
NoRecord == [since |-> 0, generation |-> 0, members |-> {}, writer |-> Nobody, before |-> {}, over |-> FALSE]
Follower == [term |-> 0, generation |-> 0, members |-> {}, wrote |-> FALSE, over |-> FALSE, proof |-> 0, kept |-> 0,
             sent |-> -1, writes |-> <<>>]
NotLate == [term |-> 0, record |-> NoRecord]
NoTrips == [n \in Nodes |-> Settle + 1 + Grain]
NoOffice == [elected |-> -1, shown |-> -1, proven |-> -1, heard |-> [n \in Nodes |-> -1], deaths |-> {},
             unconfirmed |-> {}]

IsLeading(l) == lead[l].term # 0
InOffice(l) == IsLeading(l) /\ key.term = lead[l].term

-----------------------------------------------------------------------------
(* Decisions that are not in etcd yet, or not known to be there: they are written one after the other. *)

Waiting(l, kinds) == \E i \in DOMAIN lead[l].writes: lead[l].writes[i].kind \in kinds
Forming(l) == Waiting(l, {"form"})
RECURSIVE LastMembers(_, _)
LastMembers(writes, members) ==
    IF writes = <<>> THEN members
    ELSE LastMembers(Tail(writes), IF Head(writes).kind \in {"form", "settle"} THEN Head(writes).members ELSE members)
\* Of the last generation that this leader has formed.
MembersOf(l) == LastMembers(lead[l].writes, lead[l].members)

(* The authority of a leader: whether its answer may prolong the life of workers. *)

\* A generation counts from the moment its record is sent to etcd: no node knows when it is there.
Asked(l) ==
    IF Wrong("together with the generation before while the next is written") THEN lead[l].members ELSE MembersOf(l)
\* A leader whose answers count without etcd must be in the record: a successor waits for no other leader's death.
HasWritten(l) == lead[l].wrote \/ Forming(l) \/ Wrong("together without having written the record")

RecordIsSafe(l) ==
    \/ RecordTtl = 0
    \/ lead[l].wrote /\ lead[l].kept <= RecordTtl - Lease - 1 + Grain
    \/ Wrong("together for longer than the record lives")

ByLease(l) == lead[l].proof <= Sure + Grain
Together(l) ==
    LET members == Asked(l)
        asked == IF Wrong("together with those who are linked") THEN {n \in members: link[n] = l} ELSE members
    IN /\ Cardinality(members) >= (IF Wrong("together with oneself") THEN 1 ELSE 2)
       /\ HasWritten(l)
       /\ RecordIsSafe(l)
       /\ \A n \in asked: trip[l][n] <= Settle + Grain \/ Wrong("together by old proofs")
Alone(l) ==
    /\ Cardinality(Asked(l)) = 1
    /\ HasWritten(l)
    /\ RecordIsSafe(l)
    /\ lead[l].proof <= Outage + Grain \/ Wrong("alone without limit")
Idle(l) ==
    \/ lead[l].over
    \/ MembersOf(l) = {}
    \/ /\ ~Waiting(l, {"verdict"}) \/ Wrong("idle while a decision is written")
       /\ (IF Forming(l) THEN lead[l].writes[Len(lead[l].writes)].kind = "settle" ELSE TRUE)
          \/ Wrong("idle while a decision is written")
       /\ \/ \A n \in MembersOf(l):
                \/ n \in office.deaths /\ InOffice(l)
                \/ link[n] = l /\ work[n] = 0 /\ told[n] = 0
                \/ link[n] # l /\ (work[n] = 0 \/ high[n] > lead[l].term)     \* lost: fenced, or with a later leader
          \/ Wrong("idle while a decision is written") /\ Waiting(l, {"verdict"})

Counts(l) ==
    \/ ByLease(l) \/ Idle(l)
    \/ (Together(l) \/ Alone(l)) /\ ~Wrong("nothing counts without etcd")
    \/ Wrong("every answer counts")

-----------------------------------------------------------------------------
(* When a member of the generation is surely without workers, as the leader that has the key sees it. *)

NotAwaited(l, n) == n \in office.deaths

DeadlineIsOver(l) ==
    LET size == Cardinality(lead[l].members)
        Passed(age, wait) == age >= 0 /\ age + Grain >= wait
    IN
    \/ Wrong("no wait before forming")
    \/ size >= 2 /\ Passed(office.shown, IF Wrong("wait of a lease only") THEN Lease ELSE Settle + Lease)
    \/ size >= 2 /\ Wrong("forming without having seen a member") /\ Passed(office.elected, Settle + Lease)
    \/ size = 1 /\ Passed(office.elected, IF Wrong("no outage in the wait for one") THEN Lease ELSE Outage + Lease)
    \/ Passed(office.proven, Lease)

\* A node without workers can do no harm. A leader often knows: the node reports it, or its host closed the connection.
\* It need not: to let it continue by luck only adds behaviours. Another leader may have formed a generation without
\* knowing yet that it is written.
IsHarmless(l, n) ==
    work[n] = 0 /\ told[n] = 0
    /\ \A other \in Nodes \ {l}: ~\E i \in DOMAIN lead[other].writes:
          /\ lead[other].writes[i].kind = "form" /\ n \in lead[other].writes[i].members
          /\ lead[other].writes[i].done \/ Mistakes # {}
          /\ lead[other].term >= high[n]

IsGone(l, n) ==
    \/ IsHarmless(l, n)
    \/ NotAwaited(l, n)
    \/ /\ office.heard[n] + Grain >= (IF Wrong("silent for a fence is lost") THEN Fence ELSE Lease)
       /\ office.heard[n] >= 0
    \/ office.heard[n] < 0 /\ DeadlineIsOver(l)
    \/ office.heard[n] >= 0 /\ link[n] # l
          /\ \/ Wrong("a link that broke is a death")
             \/ Wrong("missing at the deadline is lost, though it was here") /\ DeadlineIsOver(l)

-----------------------------------------------------------------------------
(* etcd, and the leases of the leader *)

KeepsTrackOfElection(members) ==
    Exact \/ Cardinality(members) = 1 \/ Wrong("forming without having seen a member")

\* A node takes part in one run: it neither leads a later one, nor begins one in the place of its own.
MayOpen(n) ==
    IF record # NoRecord THEN high[n] = 0 \/ high[n] >= record.since
    ELSE high[n] = 0 \/ last = 0 \/ Wrong("a run anew where the record is gone")

\* The winner writes itself into the record. While a generation may be at work, it adds the leader before it to the
\* list of those that may still answer members. takes: it is alive, and has not withdrawn its candidacy.
Won(n, takes, age, ageOfRecordLease) ==
    /\ ~EtcdIsGone
    /\ takes \/ Vain
    /\ takes => alive[n] /\ ~IsLeading(n)
    /\ key.term = 0 /\ terms < MaxTerm
    /\ ~record.over
    /\ Direct => n \notin led
    /\ led' = IF Direct THEN led \cup {n} ELSE led
    /\ MayOpen(n) = TRUE
    /\ terms' = terms + 1
    /\ key' = [term |-> terms + 1, holder |-> n, age |-> age]
    /\ \E seen \in {record} \cup (IF Wrong("record read before the election was won") THEN {stale} ELSE {}):
        LET isAtWork == seen.members # {}
            before == IF ~isAtWork THEN {}
                      ELSE IF Wrong("only the predecessor is known") THEN {seen.writer} ELSE seen.before \cup {seen.writer}
        IN
        /\ record' = [seen EXCEPT !.writer = n, !.before = before, !.since = IF record = NoRecord THEN terms + 1 ELSE @]
        /\ lead' = IF ~takes THEN lead ELSE [lead EXCEPT ![n] = [Follower EXCEPT
                !.term = terms + 1, !.generation = seen.generation, !.members = seen.members, !.over = seen.over,
                !.wrote = ~isAtWork,        \* a record that names no members is kept by its own lease at once
                !.proof = age, !.kept = IF RecordTtl = 0 THEN 0 ELSE ageOfRecordLease]]
        /\ office' = [NoOffice EXCEPT
                !.elected = IF KeepsTrackOfElection(seen.members) THEN 0 ELSE -1,
                !.unconfirmed = before \ {n},
                !.proven = IF before = {n} THEN 0 ELSE -1]      \* its own earlier terms are over
        /\ recordAge' = IF isAtWork THEN recordAge ELSE ageOfRecordLease  \* it keeps its lease until the next write
    /\ trip' = IF takes THEN [trip EXCEPT ![n] = NoTrips] ELSE trip
    /\ LET old == {m \in Nodes: takes /\ link[m] = n} IN       \* links of its last term
       /\ link' = [m \in Nodes |-> IF m \in old THEN Nobody ELSE link[m]]
       /\ told' = [m \in Nodes |-> IF m \in old THEN 0 ELSE told[m]]
       /\ answer' = [m \in Nodes |-> IF m \in old THEN <<>> ELSE answer[m]]
    /\ UNCHANGED <<last, ended, stale, acks, alive, late, high, got, fence, work>>

\* etcd renews the leases. Its answer may take long, and proves the time at which the request was sent.
KeepAlive(l, which, isHeard) ==
    /\ ~EtcdIsGone
    /\ key.term # 0 /\ key.holder = l
    /\ key' = IF "key" \in which THEN [key EXCEPT !.age = 0] ELSE key
    /\ recordAge' = IF "record" \in which /\ (Exact \/ (InOffice(l) /\ lead[l].wrote)) THEN 0 ELSE recordAge
    /\ lead' = IF ~InOffice(l) \/ "key" \notin which THEN lead
               ELSE IF isHeard THEN [lead EXCEPT ![l].proof = 0, ![l].kept = 0, ![l].sent = -1]
               ELSE [lead EXCEPT ![l].sent = 0]
    /\ UNCHANGED <<terms, record, last, ended, stale, acks, led, alive, late, trip, office, links, fence, work>>

\* The leader reads that answer. age: since it has sent the request.
Prove(l, which, age) ==
    /\ alive[l]
    /\ "key" \in which => lead[l].sent >= 0 /\ lead[l].sent <= age + Grain
    /\ "record" \in which /\ Exact /\ lead[l].wrote /\ InOffice(l) /\ ~record.over => recordAge <= age + Grain
    /\ lead' = [lead EXCEPT
            ![l].proof = IF "key" \notin which THEN @
                         ELSE IF Wrong("a keep-alive counts from its answer") THEN 0 ELSE Min(@, age),
            ![l].kept = IF "record" \notin which THEN @ ELSE IF RecordTtl = 0 THEN 0 ELSE Min(@, age),
            ![l].sent = IF "key" \in which THEN -1 ELSE @]
    /\ UNCHANGED <<etcd, acks, led, alive, late, trip, office, links, fence, work>>

LoseKey ==
    /\ key.term # 0
    /\ key' = NoKey /\ office' = NoOffice
    /\ UNCHANGED <<terms, record, recordAge, last, ended, stale, acks, led, alive, lead, late, trip, links, fence, work>>

Expire == key.age + Grain >= Ttl /\ LoseKey

\* Connections are refused there: the agent is dead, its keeper too, and so every worker. Any node may delete the key.
LooksDead(n) ==
    \/ ~alive[n]
    \/ Wrong("a deposed leader closes its listener") /\ ~IsLeading(n)
    \/ Wrong("refused is dead, whoever lives")

Depose == ~EtcdIsGone /\ key.term # 0 /\ LooksDead(key.holder) /\ LoseKey

\* A leader that has resigned, a candidate that has withdrawn, and the leader of a run that is over delete their key.
Revoke == Resigns /\ ~EtcdIsGone /\ key.term # 0 /\ (~InOffice(key.holder) \/ lead[key.holder].over) /\ LoseKey

\* etcd has elected another leader of its own: every lease lasts for its full time again.
Prolong ==
    /\ Vain
    /\ key' = [key EXCEPT !.age = 0] /\ recordAge' = 0
    /\ UNCHANGED <<terms, record, last, ended, stale, acks, led, alive, lead, late, trip, office, links, fence, work>>

\* The record expires soon after a verdict, or when no leader kept it alive. A leader that resigns as the last node deletes
\* it when all members have stopped.
ExpireRecord ==
    /\ record # NoRecord
    /\ \/ record.over
       \/ RecordTtl > 0 /\ recordAge + Grain >= RecordTtl
       \/ /\ Resigns /\ (key.term # 0 => ~InOffice(key.holder))
          /\ \A n \in record.members: work[n] = 0 /\ told[n] = 0
    /\ record' = NoRecord
    /\ UNCHANGED <<key, terms, recordAge, last, ended, stale, acks, led, alive, lead, late, trip, office, links, fence,
                   work>>

-----------------------------------------------------------------------------
(* Decisions: submitted, put into etcd under the guard, known to be written, delivered. *)

Submit(l, kind, members) ==
    /\ alive[l] /\ IsLeading(l) /\ (InOffice(l) \/ Vain)
    /\ lead[l].writes = <<>> \/ Exact
    /\ lead' = [lead EXCEPT ![l].writes = Append(@, [kind |-> kind, members |-> members, done |-> FALSE])]
    /\ UNCHANGED <<etcd, acks, led, alive, late, trip, link, high, got, answer, work>>

IsOver(l) == lead[l].over \/ Waiting(l, {"verdict"})

SubmitGeneration(l, chosen) ==
    /\ ~IsOver(l) \/ Wrong("a verdict is overwritten")
    /\ lead[l].generation < MaxGeneration
    /\ Direct => MaxTerm - lead[l].term = MaxGeneration - (lead[l].generation + 1)
    /\ (InOffice(l) => \A n \in MembersOf(l): IsGone(l, n)) = TRUE
    /\ chosen # {}
    /\ (\A n \in chosen:
            \/ ((alive[n] /\ link[n] = l) \/ Exact) /\ work[n] = 0 /\ told[n] = 0
            \/ Exact /\ ~InOffice(l)) = TRUE       \* a deposed leader may know nothing of where these nodes are now
    /\ Submit(l, "form", chosen)
    /\ told' = IF Wrong("said before it is written")
               THEN [n \in Nodes |-> IF n \in chosen THEN lead[l].generation + 1 ELSE told[n]] ELSE told
    /\ fence' = IF Exact THEN fence ELSE [n \in Nodes |-> IF n \in chosen THEN 0 ELSE fence[n]]
    /\ office' = IF Exact \/ ~InOffice(l) THEN office
                 ELSE [office EXCEPT !.heard = [n \in Nodes |-> IF n \in chosen THEN 0 ELSE @[n]]]

\* The recovery is over: all members are back, or have stopped. The record names only this leader from now on.
ForgetEarlier(l) ==
    /\ ~lead[l].wrote /\ ~IsOver(l) /\ lead[l].members # {}
    /\ (InOffice(l) =>
        \/ \A n \in MembersOf(l): (alive[n] /\ link[n] = l /\ work[n] = lead[l].generation) \/ IsGone(l, n)
        \/ Exact /\ \A n \in MembersOf(l): office.heard[n] >= 0 \/ IsGone(l, n)
        \/ Wrong("adopting before all are here")) = TRUE
    /\ Submit(l, "adopt", lead[l].members)
    /\ UNCHANGED <<told, fence, office>>

\* The generation has stopped on every node: a successor need not wait for any.
SubmitSettled(l) ==
    /\ Stops
    /\ ~IsOver(l) /\ (lead[l].members # {} \/ Exact)
    /\ (InOffice(l) => \A n \in MembersOf(l): IsGone(l, n)) = TRUE
    /\ Submit(l, "settle", {})
    /\ UNCHANGED <<told, fence, office>>

SubmitVerdict(l) ==
    /\ Verdicts
    /\ ~IsOver(l)
    /\ Submit(l, "verdict", lead[l].members)
    /\ UNCHANGED <<told, fence, office>>

\* What a decision makes of the record.
Value(l, write) ==
    CASE write.kind = "form" -> [since |-> record.since, generation |-> lead[l].generation + 1,
                                 members |-> write.members, writer |-> l, before |-> {}, over |-> FALSE]
      [] write.kind = "adopt" -> [record EXCEPT !.writer = l, !.before = {}]
      [] write.kind = "settle" -> [record EXCEPT !.members = {}, !.writer = l, !.before = {}]
      [] write.kind = "verdict" -> [record EXCEPT !.over = TRUE, !.writer = l]

Apply(value, age) ==
    /\ ~EtcdIsGone
    /\ record' = value
    /\ recordAge' = age
    /\ last' = Max(last, value.generation)
    /\ ended' = (ended \/ value.over)
    /\ stale' = IF Wrong("record read before the election was won") THEN record ELSE stale

\* However long a write takes, it is executed only while its sender has the key, in the same term.
Put(l, age) ==
    /\ lead[l].writes # <<>> /\ ~Head(lead[l].writes).done
    /\ InOffice(l) \/ Wrong("no guard on writes")
    /\ Apply(Value(l, Head(lead[l].writes)), age)
    /\ lead' = [lead EXCEPT ![l].writes[1].done = TRUE]
    /\ office' = IF InOffice(l) /\ Head(lead[l].writes).kind \in {"form", "settle"}
                 THEN [office EXCEPT !.elected = -1, !.shown = -1, !.proven = -1, !.deaths = {}, !.unconfirmed = {}]
                 ELSE office
    /\ UNCHANGED <<key, terms, acks, led, alive, late, trip, links, fence, work>>

PutLate(n, age) ==
    /\ late[n].term # 0 /\ late[n].term = key.term
    /\ Apply(late[n].record, age)
    /\ late' = [late EXCEPT ![n] = NotLate]
    /\ UNCHANGED <<key, terms, acks, led, alive, lead, trip, office, links, fence, work>>

\* A leader that leaves while no member was linked to it restores the record as it has found it.
PutBack(l, writer) ==
    /\ Resigns /\ ~EtcdIsGone
    /\ key.term # 0 /\ key.holder = l /\ ~InOffice(l)
    /\ record.writer = l /\ writer \in record.before
    /\ \A n \in record.members: office.heard[n] < 0
    /\ record' = [record EXCEPT !.writer = writer, !.before = @ \ {writer}]
    /\ UNCHANGED <<key, terms, recordAge, last, ended, stale, acks, led, alive, lead, late, trip, office, links, fence,
                   work>>

\* to: the members that are sent their assignment at once.
Written(l, to) ==
    LET write == Head(lead[l].writes) IN
    /\ alive[l]
    /\ lead[l].writes # <<>> /\ write.done
    /\ lead' = [lead EXCEPT
            ![l].writes = Tail(@),
            ![l].wrote = @ \/ write.kind \in {"form", "adopt"},
            ![l].over = @ \/ write.kind = "verdict",
            ![l].generation = IF write.kind = "form" THEN @ + 1 ELSE @,
            ![l].members = IF write.kind \in {"form", "settle"} THEN write.members ELSE @]
    /\ told' = IF write.kind = "form" /\ ~Wrong("said before it is written")
               THEN [n \in Nodes |-> IF n \in to THEN lead[l].generation + 1 ELSE told[n]] ELSE told
    /\ UNCHANGED <<etcd, acks, led, alive, late, trip, office, link, high, got, answer, fence, work>>
LinkedMembers(l) ==
    IF lead[l].writes = <<>> THEN {} ELSE {n \in Head(lead[l].writes).members: alive[n] /\ link[n] = l}

\* A member whose link broke before it received its assignment gets it over the next one.
Deliver(l, n) ==
    /\ alive[l] /\ IsLeading(l) /\ (lead[l].writes = <<>> \/ Exact)
    /\ n \in lead[l].members /\ link[n] = l /\ high[n] = lead[l].term
    /\ told[n] = 0 /\ work[n] = 0 /\ got[n] < lead[l].generation
    /\ told' = [told EXCEPT ![n] = lead[l].generation]
    /\ UNCHANGED <<etcd, acks, led, alive, lead, late, trip, office, link, high, got, answer, fence, work>>

\* The links that end with a leader. What it has sent may still arrive.
Cut(l) == IF Vain THEN {} ELSE {n \in Nodes: link[n] = l}

\* A term is over: the leader closes its links, and keeps its listener.
EndTerm(l) ==
    LET mine == Cut(l) IN
    /\ alive[l] /\ IsLeading(l)
    /\ lead' = [lead EXCEPT ![l] = Follower]
    /\ trip' = [trip EXCEPT ![l] = NoTrips]
    /\ link' = [n \in Nodes |-> IF n \in mine THEN Nobody ELSE link[n]]
    /\ told' = [n \in Nodes |-> IF n \in mine THEN 0 ELSE told[n]]
    /\ answer' = [n \in Nodes |-> IF n \in mine THEN <<>> ELSE answer[n]]
    /\ UNCHANGED <<etcd, acks, led, alive, office, high, got, fence, work>>

StepDown(l) == ~InOffice(l) /\ EndTerm(l) /\ UNCHANGED late

OnTheWay(l) ==
    IF Vain /\ lead[l].writes # <<>> /\ ~Head(lead[l].writes).done
    THEN [late EXCEPT ![l] = [term |-> lead[l].term, record |-> Value(l, Head(lead[l].writes))]] ELSE late

Resign(l) == Resigns /\ EndTerm(l) /\ late' = OnTheWay(l)

\* The leader tries to connect to an earlier one. It is refused, or that node is linked to this leader: a node ends its
\* own term before it links to another leader.
Probed(l, earlier) ==
    /\ InOffice(l) /\ lead[l].members # {} /\ ~lead[l].over
    /\ \/ /\ earlier \in office.unconfirmed
          /\ (LooksDead(earlier) \/ high[earlier] >= lead[l].term) = TRUE
          /\ LET left == office.unconfirmed \ {earlier} IN
             office' = [office EXCEPT
                !.unconfirmed = left,
                !.deaths = IF LooksDead(earlier) THEN @ \cup ({earlier} \cap lead[l].members) ELSE @,
                !.proven = IF left # {} THEN @
                           ELSE IF Wrong("a proof of death needs no wait") THEN Lease
                           ELSE IF Wrong("a proof of death counts from before the election") /\ ~alive[earlier]
                           THEN fence[earlier] ELSE 0]      \* of a dead node: for how long it has been dead
       \/ /\ Wrong("the death of any leader will do") /\ earlier # l /\ ~alive[earlier] /\ office.proven < 0
          /\ office' = [office EXCEPT !.deaths = @ \cup ({earlier} \cap lead[l].members), !.proven = 0]
    /\ UNCHANGED <<etcd, acks, led, alive, lead, late, trip, links, fence, work>>

-----------------------------------------------------------------------------
(* Links, beats and answers *)

\* Ages are kept only where they matter. A node that has no workers and is not about to have some needs no fence: when
\* it is chosen, the youngest it could have is assumed. The same holds for when it was heard, and for round trips.
IsConcerned(n) ==
    \/ Exact
    \/ work[n] # 0 \/ told[n] # 0
    \/ link[n] # Nobody /\ \E i \in DOMAIN lead[link[n]].writes:
          lead[link[n]].writes[i].kind = "form" /\ n \in lead[link[n]].writes[i].members
Matters(l, n) == Exact \/ n \in lead[l].members \/ n \in MembersOf(l)

HeardBy(l, n) ==
    IF InOffice(l) /\ Matters(l, n)
    THEN [office EXCEPT !.heard[n] = IF work[n] # 0 \/ IsConcerned(n) THEN 0 ELSE @,
                        !.shown = IF @ < 0 /\ n \in lead[l].members /\ ~lead[l].wrote /\ office.heard[n] < 0
                                  THEN 0 ELSE @]
    ELSE office

\* The node proves the secret to this leader. It has closed every other link, and never goes back to an earlier term.
Follow(n, l) ==
    /\ alive[n] /\ alive[l] /\ IsLeading(l)
    /\ n = l \/ ~IsLeading(n)
    /\ link[n] # l
    /\ \/ lead[l].term > high[n]
       \/ lead[l].term = high[n] /\ link[n] = Nobody
       \/ Wrong("a node goes back to an earlier leader")
    /\ link' = [link EXCEPT ![n] = l]
    /\ high' = [high EXCEPT ![n] = lead[l].term]
    /\ told' = [told EXCEPT ![n] = 0]
    /\ answer' = [answer EXCEPT ![n] = <<>>]
    /\ office' = IF Exact THEN office ELSE HeardBy(l, n)
    /\ trip' = IF Exact THEN [trip EXCEPT ![l][n] = 0] ELSE trip
    /\ UNCHANGED <<etcd, acks, led, alive, lead, late, got, fence, work>>

LinkLost(n) ==
    /\ alive[n] /\ link[n] # Nobody
    /\ Breaks \/ ~IsLeading(link[n])
    /\ link' = [link EXCEPT ![n] = Nobody]
    /\ told' = [told EXCEPT ![n] = 0]
    /\ answer' = [answer EXCEPT ![n] = <<>>]
    /\ UNCHANGED <<etcd, acks, led, alive, lead, late, trip, office, high, got, fence, work>>

\* A frame of a node arrives, perhaps after the node has closed that link.
Receive(l, n) ==
    /\ Exact
    /\ alive[l] /\ IsLeading(l) /\ high[n] >= lead[l].term
    /\ office' = HeardBy(l, n)
    /\ UNCHANGED <<etcd, acks, led, alive, lead, late, trip, links, fence, work>>

\* A beat arrives at the leader, which decides whether its answer counts. The answer is on its way: or there already.
Answer(n, counts, isSlow) ==
    LET l == link[n] IN
    /\ alive[n] /\ l # Nobody /\ IsLeading(l)
    /\ IF counts THEN Counts(l) = TRUE ELSE TRUE      \* a value: TLC takes a disjunction in an action for several steps
    /\ office' = HeardBy(l, n)
    /\ \/ /\ isSlow
          /\ answer' = [answer EXCEPT ![n] = Append(IF Exact THEN @ ELSE <<>>, [age |-> 0, counts |-> counts])]
          /\ UNCHANGED <<fence, trip>>
       \/ /\ ~isSlow
          /\ told[n] = 0
          /\ answer' = [answer EXCEPT ![n] = <<>>]
          /\ fence' = [fence EXCEPT ![n] = IF IsConcerned(n) /\ counts THEN 0 ELSE @]
          /\ trip' = [trip EXCEPT ![l][n] = IF HasWritten(l) /\ n \in Asked(l) THEN 0 ELSE @]
    /\ UNCHANGED <<etcd, acks, led, alive, lead, late, link, high, told, got, work>>

\* The node reads the answer. age: since it has sent the beat. A link keeps the order, so an assignment that was sent
\* before has been read. The acknowledgement is at the leader at once.
Answered(n, age) ==
    LET l == link[n] IN
    /\ answer[n] # <<>> /\ (told[n] = 0 \/ Exact)
    /\ Head(answer[n]).age <= age + Grain
    /\ fence' = [fence EXCEPT ![n] =
            IF ~Head(answer[n]).counts \/ ~IsConcerned(n) THEN @
            ELSE IF Wrong("the fence counts from the answer") THEN 0 ELSE Min(@, age)]
    /\ trip' = [trip EXCEPT ![l][n] =
            IF ~Exact /\ (~HasWritten(l) \/ n \notin Asked(l)) THEN @ ELSE Min(@, Head(answer[n]).age)]
    /\ answer' = [answer EXCEPT ![n] = Tail(@)]
    /\ UNCHANGED <<etcd, acks, led, alive, lead, late, office, link, high, told, got, work>>

\* Only with the mistake: an acknowledgement takes long, and then counts from its arrival.
AcknowledgeLate(n) ==
    /\ Wrong("a round trip counts from its end")
    /\ \/ /\ alive[n] /\ link[n] # Nobody
          /\ acks' = acks \cup {<<link[n], n>>}
          /\ UNCHANGED trip
       \/ \E l \in Nodes:
          /\ <<l, n>> \in acks /\ IsLeading(l)
          /\ acks' = acks \ {<<l, n>>}
          /\ trip' = [trip EXCEPT ![l][n] = 0]
    /\ UNCHANGED <<etcd, led, alive, lead, late, office, links, fence, work>>

\* Only with the mistake: a node that is linked to another leader still acknowledges what the old one sends.
AcknowledgeTwice(n, l) ==
    /\ Wrong("a node keeps two links")
    /\ alive[n] /\ IsLeading(l) /\ link[n] # Nobody /\ lead[l].term < high[n]
    /\ trip' = [trip EXCEPT ![l][n] = 0]
    /\ UNCHANGED <<etcd, acks, led, alive, lead, late, office, links, fence, work>>

\* The node receives its assignment, and starts workers if the lease has not expired.
Start(n) ==
    /\ told[n] # 0
    /\ told' = [told EXCEPT ![n] = 0]
    /\ got' = IF Breaks THEN [got EXCEPT ![n] = told[n]] ELSE got
    /\ work' = [work EXCEPT ![n] =
            IF fence[n] <= FenceMost \/ Wrong("workers start with an old fence") THEN told[n] ELSE @]
    /\ fence' = [fence EXCEPT ![n] = IF Wrong("workers start with an old fence") THEN Min(@, Fence) ELSE @]
    /\ UNCHANGED <<etcd, acks, led, alive, lead, late, trip, office, link, high, answer>>

Stop(n) ==
    /\ Stops
    /\ work[n] # 0
    /\ work' = [work EXCEPT ![n] = 0]
    /\ fence' = IF Exact THEN fence ELSE [fence EXCEPT ![n] = FenceMost + 1]
    /\ UNCHANGED <<etcd, acks, led, alive, lead, late, trip, office, links>>

\* An agent dies, and with it all that it started. Its host may close its links; nothing listens there any more.
Die(n) ==
    LET mine == Cut(n) IN
    /\ Cardinality({m \in Nodes: ~alive[m]}) < MaxDeaths
    /\ alive[n]
    /\ alive' = [alive EXCEPT ![n] = FALSE]
    /\ work' = [work EXCEPT ![n] = 0]
    /\ lead' = [lead EXCEPT ![n] = Follower]
    /\ late' = OnTheWay(n)
    /\ trip' = [trip EXCEPT ![n] = NoTrips]
    /\ link' = [m \in Nodes |-> IF m \in mine \/ (m = n /\ Exact) THEN Nobody ELSE link[m]]
    /\ told' = [m \in Nodes |-> IF m \in mine \/ m = n THEN 0 ELSE told[m]]
    /\ answer' = [m \in Nodes |-> IF m \in mine \/ m = n THEN <<>> ELSE answer[m]]
    /\ fence' = [fence EXCEPT ![n] = IF Wrong("a proof of death counts from before the election") THEN 0 ELSE FenceMost + 1]
    /\ UNCHANGED <<etcd, acks, led, office, high, got>>

-----------------------------------------------------------------------------
(* Time *)

\* In a calm world time passes only when every node has done what there was to do.
NobodyIsLate ==
    \A n \in Nodes:
        /\ alive[n] => link[n] # Nobody /\ trip[link[n]][n] = 0 /\ told[n] = 0
        /\ alive[n] /\ InOffice(n) /\ ~EtcdIsGone =>
              lead[n].writes = <<>> /\ (lead[n].wrote \/ ~(\A m \in lead[n].members: link[m] = n))

\* One of the members has left for a later leader, for good, and its last round trip is old.
IsNeverTogether(l) ==
    /\ ~Exact
    /\ \E n \in Asked(l): trip[l][n] >= Settle /\ (high[n] > lead[l].term \/ ~alive[n])
    /\ Mistakes \cap {"a node goes back to an earlier leader", "a node keeps two links", "together by old proofs",
                      "a round trip counts from its end", "together with those who are linked"} = {}

Aged(answers, by) ==
    IF answers = <<>> THEN answers
    ELSE IF Exact THEN [i \in DOMAIN answers |-> [answers[i] EXCEPT !.age = @ + by]]
    ELSE IF Head(answers).age >= Max(Fence, Settle) /\ ~Wrong("the fence counts from the answer") THEN <<>>
    ELSE <<[Head(answers) EXCEPT !.age = Min(@ + by, Max(Fence, Settle))]>>

Pass(by) ==
    /\ Calm => NobodyIsLate
    /\ key' = IF key.term = 0 THEN key ELSE [key EXCEPT !.age = Min(@ + by, Ttl)]
    /\ recordAge' = IF RecordTtl = 0 THEN 0 ELSE Min(recordAge + by, RecordTtl)
    /\ lead' = [l \in Nodes |->
            IF ~IsLeading(l) THEN lead[l]
            ELSE [lead[l] EXCEPT
                !.proof = Min(@ + by, ProofMost),
                !.kept = IF RecordTtl = 0 THEN 0 ELSE Min(@ + by, ProofMost),
                !.sent = IF ~Exact /\ @ + 1 >= lead[l].proof + 1 /\ ~Wrong("a keep-alive counts from its answer") THEN -1
                         ELSE Older(@, by, ProofMost)]]
    /\ trip' = [l \in Nodes |->
            IF ~IsLeading(l) THEN trip[l]
            ELSE IF IsNeverTogether(l) THEN NoTrips
            ELSE [n \in Nodes |-> Min(trip[l][n] + by, Settle + 1 + Grain)]]
    /\ answer' = [n \in Nodes |-> Aged(answer[n], by)]
    /\ fence' = [n \in Nodes |->
            IF IsConcerned(n) \/ ~alive[n] THEN Min(fence[n] + by, FenceMost + 1) ELSE FenceMost + 1]
    /\ work' = [n \in Nodes |-> IF fence[n] + by > FenceMost THEN 0 ELSE work[n]]
    /\ office' = [office EXCEPT
            !.elected = Older(@, by, ElectedMost), !.shown = Older(@, by, ShownMost), !.proven = Older(@, by, Lease),
            !.heard = [n \in Nodes |-> IF work'[n] = 0 /\ ~IsConcerned(n) THEN -1 ELSE Older(@[n], by, Lease)]]
    /\ UNCHANGED <<terms, record, last, ended, stale, acks, led, alive, late, link, high, told, got>>

-----------------------------------------------------------------------------

Common ==
    /\ recordAge = 0 /\ ended = FALSE
    /\ alive = [n \in Nodes |-> TRUE]
    /\ late = [n \in Nodes |-> NotLate]
    /\ told = [n \in Nodes |-> 0]
    /\ got = [n \in Nodes |-> IF Breaks THEN work[n] ELSE 0]
    /\ answer = [n \in Nodes |-> <<>>]
    /\ stale = NoRecord /\ acks = {} /\ led = {n \in Nodes: Direct /\ key.holder = n}

Empty ==
    /\ key = NoKey /\ terms = 0 /\ record = NoRecord /\ last = 0
    /\ lead = [n \in Nodes |-> Follower] /\ trip = [n \in Nodes |-> NoTrips] /\ office = NoOffice
    /\ link = [n \in Nodes |-> Nobody] /\ high = [n \in Nodes |-> 0]
    /\ fence = [n \in Nodes |-> FenceMost + 1] /\ work = [n \in Nodes |-> 0]
    /\ Common

\* Generation 1 is at work, and its leader was seen by every node a moment ago.
\* (Where records expire, the others are newcomers, who know nothing of the run.)
Running ==
    \E first \in Nodes: \E members \in SUBSET Nodes:
    LET IsThere(n) == n = first \/ n \in members \/ RecordTtl = 0 IN
    /\ Cardinality(members) = BeginMembers
    /\ key = [term |-> 1, holder |-> first, age |-> 0] /\ terms = 1
    /\ record = [since |-> 1, generation |-> 1, members |-> members, writer |-> first, before |-> {}, over |-> FALSE] /\ last = 1
    /\ lead = [n \in Nodes |-> IF n # first THEN Follower ELSE
            [Follower EXCEPT !.term = 1, !.generation = 1, !.members = members, !.wrote = TRUE]]
    /\ trip = [n \in Nodes |-> IF n = first THEN [m \in Nodes |-> IF m \in members THEN 0 ELSE Settle + 1] ELSE NoTrips]
    /\ office = [NoOffice EXCEPT !.heard = [n \in Nodes |-> IF n \in members /\ Begin = "running" THEN 0 ELSE -1]]
    /\ link = [n \in Nodes |-> IF IsThere(n) THEN first ELSE Nobody]
    /\ high = [n \in Nodes |-> IF IsThere(n) THEN 1 ELSE 0]
    /\ fence = [n \in Nodes |-> IF n \in members /\ Begin = "running" THEN 0 ELSE FenceMost + 1]
    /\ work = [n \in Nodes |-> IF n \in members /\ Begin = "running" THEN 1 ELSE 0]
    /\ Common

Init == IF Begin = "empty" THEN Empty ELSE Running

Both == {"key", "record"}

Next ==
    \/ Pass(1) \/ Expire \/ Depose \/ Revoke \/ Prolong \/ ExpireRecord
    \/ \E n \in Nodes:
        \/ \E age \in 0..(Ttl - 1): Won(n, TRUE, age, 0)
        \/ ~alive[n] /\ Won(n, FALSE, 0, 0)
        \/ KeepAlive(n, Both, TRUE) \/ (Slow /\ KeepAlive(n, Both, FALSE)) \/ Prove(n, Both, lead[n].sent)
        \/ StepDown(n) \/ Resign(n)
        \/ \E chosen \in SUBSET {m \in Nodes: alive[m] /\ link[m] = n}: SubmitGeneration(n, chosen)
        \/ (lead[n].writes = <<>> /\ (ForgetEarlier(n) \/ SubmitSettled(n) \/ SubmitVerdict(n)))
        \/ Put(n, 0) \/ PutLate(n, 0) \/ Written(n, LinkedMembers(n))
        \/ LinkLost(n) \/ Start(n) \/ Stop(n) \/ Die(n)
        \/ (Slow /\ link[n] # Nobody /\ Answer(n, Counts(link[n]), TRUE))
        \/ (link[n] # Nobody /\ Answer(n, Counts(link[n]), FALSE))
        \/ (answer[n] # <<>> /\ Answered(n, Head(answer[n]).age))
        \/ AcknowledgeLate(n)
        \/ \E l \in Nodes:
            \/ Follow(n, l) \/ AcknowledgeTwice(n, l) \/ Probed(n, l) \/ PutBack(n, l)
            \/ (Breaks /\ Deliver(l, n))

\* Where nothing can be formed any more, and only one generation is at work or to be told, nothing can go wrong. With
\* Focus also where no worker lives nor will but by a generation to be formed, which is the last: S1 cannot fail.
MayForm == last < MaxGeneration /\ (key.term # 0 \/ terms < MaxTerm)
Interesting ==
    \/ \E n \in Nodes: work[n] \notin {0, last} \/ told[n] \notin {0, last}
    \/ \E l \in Nodes: lead[l].writes # <<>> /\ ~Head(lead[l].writes).done /\ (InOffice(l) \/ Mistakes # {}) /\ ~Focus
    \/ MayForm /\ \/ ~Focus
                  \/ \E n \in Nodes: \/ work[n] # 0 \/ told[n] # 0
                                     \/ lead[n].writes # <<>> /\ Head(lead[n].writes).done
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

\* S3: nothing is sent before it is written; after a verdict nothing is formed.
WrittenFirst == \A n \in Nodes: work[n] <= last /\ told[n] <= last
NothingAfterTheVerdict == [][ended => last' = last /\ record'.generation \in {record.generation, 0}
                                      /\ (record' # record => record'.over \/ record' = NoRecord)]_vars

\* S4: a node that does not have the key changes nothing, and the winner of an election only who leads.
OnlyTheLeaderWrites ==
    [][record' # record /\ record' # NoRecord =>
        \/ \E l \in Nodes: lead'[l].writes # lead[l].writes /\ lead[l].term = key.term /\ key.term # 0
        \/ \E n \in Nodes: late'[n] # late[n] /\ late[n].term = key.term /\ key.term # 0
        \/ [record' EXCEPT !.since = 0, !.writer = Nobody, !.before = {}]
            = [record EXCEPT !.since = 0, !.writer = Nobody, !.before = {}]]_vars

\* In a calm world no worker is restarted.
NobodyIsRestarted == \A n \in record.members: alive[n] => work[n] = 1

-----------------------------------------------------------------------------
(* What must be possible: each is given to TLC as if it never held, and must be found. *)

NeverNextGeneration == ~\E n \in Nodes: work[n] = 2
NeverNextUnderAnother == ~\E n \in Nodes: work[n] = 2 /\ key.term >= 2 /\ lead[key.holder].wrote
NeverAdopted == ~\E l \in Nodes: lead[l].term >= 2 /\ lead[l].wrote /\ lead[l].generation = 1
NeverTogether == ~\E l \in Nodes: lead[l].term # 0 /\ ~ByLease(l) /\ Together(l) /\ key.term > lead[l].term
                                  /\ \E n \in Nodes: work[n] # 0 /\ link[n] = l
NeverAloneAfterAll == ~\E l \in Nodes: Alone(l) /\ ~ByLease(l) /\ key.term > lead[l].term
NeverTwoBefore == Cardinality(record.before) < 2
=============================================================================
