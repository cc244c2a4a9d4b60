--------------------------- MODULE LeadershipTrace ---------------------------
(***************************************************************************)
(* Whether recorded histories of the leadership machine are behaviours of  *)
(* the model.  A history is a sequence of transitions <<when, what, ...>>, *)
(* recorded in a simulation; each must be a step of the model, with the    *)
(* parameters that were recorded.  Histories.tla is generated.             *)
(*                                                                         *)
(* Some transitions of the machine change nothing in the model: what       *)
(* reaches a leader of an earlier term, or comes from a node that was      *)
(* deposed.  Each is listed here with its condition.                       *)
(***************************************************************************)
EXTENDS Leadership, Histories

CONSTANT Explain        \* print the first transition of a history that is no step of the model

VARIABLES history, position, now

all == <<vars, history, position, now>>

TraceInit ==
    /\ Empty
    /\ history \in DOMAIN Histories
    /\ position = 1 /\ now = 0

Nothing == UNCHANGED vars

\* A transition that is a step of the model if the condition holds, and changes nothing in the model otherwise.
When(condition, step) == IF condition THEN step ELSE Nothing

IsLedBy(l, term) == lead[l].term = term /\ term # 0

Do(e) ==
    CASE e[2] = "won" -> Won(e[3], e[4], e[5], e[6])
      [] e[2] = "keep-alive" -> When(key.holder = e[3], KeepAlive(e[3], {e[4]}, FALSE))
      [] e[2] = "prove" ->
            \* Else the request was executed before the election, and its answer proves no more than the election.
            When(e[4] = "record" \/ lead[e[3]].sent >= 0 \/ e[5] + Grain < lead[e[3]].proof,
                 IsLeading(e[3]) /\ Prove(e[3], {e[4]}, e[5]))
      [] e[2] = "expire" -> Expire
      [] e[2] = "depose" -> Depose
      [] e[2] = "revoke" -> Revoke
      [] e[2] = "prolong" -> Prolong
      [] e[2] = "expire record" -> When(record # NoRecord, ExpireRecord)
      [] e[2] = "form" -> SubmitGeneration(e[3], e[4])
      [] e[2] = "adopt" -> IF lead[e[3]].wrote \/ MembersOf(e[3]) = {} THEN Submit(e[3], "adopt", {}) /\ UNCHANGED <<told, fence, office>> ELSE ForgetEarlier(e[3])
      [] e[2] = "settle" -> SubmitSettled(e[3])
      [] e[2] = "verdict" -> SubmitVerdict(e[3])
      [] e[2] = "put" -> IF InOffice(e[3]) THEN Put(e[3], e[4]) ELSE PutLate(e[3], e[4])
      [] e[2] = "put back" -> PutBack(e[3], e[4])
      [] e[2] = "written" -> Written(e[3], {})
      [] e[2] = "deliver" -> Deliver(e[3], e[4])
      [] e[2] = "step down" -> StepDown(e[3])
      [] e[2] = "resign" -> When(IsLeading(e[3]) /\ ~IsOver(e[3]), Resign(e[3]))
      [] e[2] = "probed" -> When(InOffice(e[3]) /\ e[4] \in office.unconfirmed, Probed(e[3], e[4]))
      [] e[2] = "follow" -> When(alive[e[4]] /\ IsLedBy(e[4], e[5]), Follow(e[3], e[4]))
      [] e[2] = "link lost" -> When(link[e[3]] # Nobody, LinkLost(e[3]))
      [] e[2] = "receive" -> When(IsLeading(e[3]), Receive(e[3], e[4]))
      [] e[2] = "answer" -> link[e[4]] = e[3] /\ Answer(e[4], e[5], TRUE)
      [] e[2] = "answered" -> Answered(e[3], e[4])
      [] e[2] = "start" -> told[e[3]] = e[4] /\ Start(e[3]) /\ work'[e[3]] = e[4]
      [] e[2] = "works" -> work[e[3]] = e[4] /\ Nothing
      [] e[2] = "stop" -> When(work[e[3]] # 0, Stop(e[3]))
      [] e[2] = "die" -> When(alive[e[3]], Die(e[3]))

Step ==
    LET e == Histories[history][position] IN
    /\ position <= Len(Histories[history])
    /\ IF e[1] > now
       THEN Pass(e[1] - now) /\ now' = e[1] /\ UNCHANGED <<history, position>>
       ELSE /\ Do(e)
            /\ position' = position + 1
            /\ IF position = Len(Histories[history]) THEN PrintT(<<"accepted", history>>) ELSE TRUE
            /\ UNCHANGED <<history, now>>

Rejected ==
    /\ Explain
    /\ position <= Len(Histories[history])
    /\ ~ENABLED Step
    /\ PrintT(<<"rejected", history, position, Histories[history][position]>>)
    /\ PrintT(<<"state", [key |-> key, record |-> record, recordAge |-> recordAge, lead |-> lead, late |-> late,
                trip |-> trip, office |-> office, link |-> link, high |-> high, told |-> told, got |-> got,
                answer |-> answer, fence |-> fence, work |-> work, alive |-> alive]>>)
    /\ FALSE
    /\ UNCHANGED all

\* A history determines its states.
Place == <<history, position, now>>

TraceNext == Step \/ Rejected
TraceSpec == TraceInit /\ [][TraceNext]_all
=============================================================================
