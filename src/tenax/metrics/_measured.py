"""The table of the agent's metrics: name, kind and meaning, for handlers and the guide. ``{…}`` is a placeholder."""

from __future__ import annotations

from typing import NamedTuple

from tenax.metrics._reading import COUNTER, DURATION, GAUGE


class Measured(NamedTuple):
    group: str
    name: str
    kind: str
    meaning: str


# TorchElastic's names are functions of its agent. These are the equivalent periods of time.
CALLS = {
    "SimpleElasticAgent.run": "The whole run of this node. A run whose workers failed is a success of the agent.",
    "SimpleElasticAgent._rendezvous": "From being ready until a generation was formed.",
    "SimpleElasticAgent._assign_worker_ranks": "Ranks come with the generation, so it takes 0 ms.",
    "SimpleElasticAgent._initialize_workers": "From being ready until all workers of the generation were started.",
    "SimpleElasticAgent._restart_workers": "From the stop command until all workers of the next one were started.",
    "LocalElasticAgent._start_workers": "From the start command until all workers were started.",
    "LocalElasticAgent._stop_workers": "From the stop command until no process of the workers was left.",
    "LocalElasticAgent._monitor_workers": "How long the workers of a generation were watched; once per generation.",
}

_OF_TORCHELASTIC = (
    ("workers.{role}.remaining_restarts", GAUGE, "Restarts that are left of the run's budget."),
    ("workers.{role}.{state}", GAUGE, "1 for the state that this node's workers are in, 0 for the one they left."),
    ("workers.{role}.flakiness", GAUGE, "At the end: the share of the budget that was used, in percent; failed: 100."),
    ("workers.{role}.run_total", COUNTER, "1 at the end of a run that succeeded or failed."),
    ("workers.{role}.run_success_with_retries", COUNTER, "1 if it succeeded after a restart, else 0."),
    ("workers.{role}.run_success_no_retries", COUNTER, "1 if it succeeded without a restart, else 0."),
    ("workers.{role}.run_failed_with_retries", COUNTER, "1 if it failed after a restart, else 0."),
    ("workers.{role}.run_failed_no_retries", COUNTER, "1 if it failed without a restart, else 0."),
)

_OF_TENAX = (
    ("generation", GAUGE, "The number of the generation."),
    ("world_size", GAUGE, "Workers of the generation on all nodes."),
    ("nodes", GAUGE, "Nodes of the generation."),
    ("restarts_used", GAUGE, "Restarts that the whole run has used."),
    ("running", GAUGE, "1 while this node's workers all run; 0 before that, and from the end of their generation on."),
    ("running_s", COUNTER, "Seconds that the workers of a generation ran, reported when it ends."),
    ("forming_ms", DURATION, "From being ready until a generation was formed."),
    ("recovery_ms", DURATION, "From the first failure until workers run again, over as many attempts as it took."),
    ("membership_change_ms", DURATION, "The same for a generation that ended because a node came or went."),
    ("worker_failures.{kind}", COUNTER, "Workers of this node that failed by themselves, by cause."),
    ("run_ended.{outcome}", COUNTER, "1 when the run is over for this node."),
)

STATES = ("healthy", "failed", "stopped", "succeeded", "unknown")

MEASURED = (
    *(
        Measured("torchelastic", f"{call}.{what}", kind, meaning)
        for call, meaning in CALLS.items()
        for what, kind in (("success", COUNTER), ("failure", COUNTER), ("duration.ms", DURATION))
    ),
    *(Measured("torchelastic", *row) for row in _OF_TORCHELASTIC),
    *(Measured("tenax", *row) for row in _OF_TENAX),
)
