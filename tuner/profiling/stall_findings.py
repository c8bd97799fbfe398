"""Finding of stalls: long intervals in which the host launches nothing, whatever the cause."""

from __future__ import annotations

from steptune.tuner.profiling.evidence import PLACES, RECURRING, SEVERITIES, Evidence
from steptune.tuner.profiling.gains import bound_of
from steptune.tuner.profiling.replay.answers import STALLS
from steptune.tuner.profiling.stalls import cause_of, listed
from steptune.tuner.records import Finding, Stall, StepFacts
from steptune.tuner.wording import milliseconds

STALL_RULE = "host_stall"
STALL_THRESHOLDS = (0.02, 0.05, 0.15)
"""Minimum share of the step that host time in stalls takes, for each severity; the values are our choice."""


def diagnose_stalls(evidence: Evidence) -> Finding | None:
    """Return the finding of stalls; None if there are none worth reporting."""
    stalls, share = evidence.breakdown.stalls, evidence.stalled_share
    gain = evidence.gain(STALLS, share)
    saved = gain.expected if gain is not None and gain.expected is not None else 0.0
    if stalls is None or not stalls.longest or max(share, saved) < STALL_THRESHOLDS[0]:
        return None
    num_steps = evidence.breakdown.num_steps
    once = len(stalls.steps) == 1 < num_steps
    level = 0 if once else sum(max(share, saved) >= threshold for threshold in STALL_THRESHOLDS) - 1
    longest = stalls.longest[0]
    does = "runs no operator" if evidence.device_kind == "cpu" else "launches no work"
    when = f"in {len(stalls.steps)} of {num_steps} steps" if num_steps > 1 else "in the only step"
    if once or len(stalls.steps) < RECURRING * num_steps:
        when = f"in step{'' if len(stalls.steps) == 1 else 's'} {listed(stalls.steps)} of {num_steps} only"
    recorded = f"during {longest.name}" if longest.name else "with no recorded activity"
    return Finding(
        rule=STALL_RULE,
        severity=SEVERITIES[level],
        message=f"for {share:.0%} of the step the host {does}: stalls of up to {milliseconds(longest.length_ns)} "
        f"{when}, {recorded}",
        advice=_stall_advice(longest, evidence.facts),
        strategies=(),
        bound=bound_of(gain, share, share),
        evidence={
            **({"cause": cause_of(longest.name)} if cause_of(longest.name) else {}),
            **(gain.evidence if gain is not None else {}),
            "stalled_ms": round(share * sum(evidence.breakdown.per_step_ns.values()) / 1e6, 4),
            "steps": listed(stalls.steps),
            **{f"at_{number}": _place_of(stall) for number, stall in enumerate(stalls.longest[:PLACES], 1)},
        },
    )


def _place_of(stall: Stall) -> str:
    return f"{milliseconds(stall.length_ns)} in step {stall.step}" + (f": {stall.name}" if stall.name else "")


STALL_ADVICE = {
    "profiler": "no action needed: the profiler was writing its buffers, and steps without it do not have this stall",
    "collection": "collect garbage outside the steps (gc.freeze() after building, gc.disable(), gc.collect() between "
    "epochs)",
    "compilation": "compile before the steps: warm up every shape, or compile with dynamic shapes",
    "checkpoint": "write checkpoints asynchronously (torch.distributed.checkpoint.async_save), or less often",
    "evaluation": "evaluate outside the profiled steps, or less often",
    "lock or sleep": "find the thread that holds the lock, or remove the sleep",
    "logging": "log less often, or from another thread",
}
"""Advice by the kind of a stall; the stall's name determines the kind."""


def _stall_advice(longest: Stall, facts: StepFacts) -> str:
    if cause := cause_of(longest.name):
        return STALL_ADVICE[cause]
    causes = (
        "a sleep, a lock, garbage collection, a checkpoint, logging, a data loader that the trace does not mark, or a "
        "Python loop"
    )
    if longest.name:
        return "move this work out of the step, or run it in parallel with the steps"
    if facts.own_capture:
        return f"look in the step's own code for {causes}"
    return f"record a few steps with with_stack=True to find the cause: {causes}"
