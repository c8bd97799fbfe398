"""Rules for steps that differ: work that only some of them run, and times that vary."""

from __future__ import annotations

from steptune.tuner.costs.categories import COMPUTE
from steptune.tuner.profiling.evidence import Evidence
from steptune.tuner.profiling.replay.answers import EXTRA
from steptune.tuner.profiling.rules.rule import Cause, Remedy, Rule
from steptune.tuner.profiling.stall_findings import STALL_ADVICE
from steptune.tuner.profiling.stalls import cause_of, listed

EXTRA_ADVICE = (
    "run the additional work of these steps (an evaluation, samples, statistics) less often, or in parallel with "
    "training"
)


def _extra_share(evidence: Evidence) -> float | None:
    """Return the share of the step spent on compute that only some of the steps do."""
    extra = evidence.analysis.extra_work if evidence.analysis is not None else None
    if extra is None:
        return None
    return min(extra.time_ns / max(1, evidence.breakdown.step_time_ns), evidence.share(*COMPUTE))


def _extra_cause(evidence: Evidence) -> Cause | None:
    """Return the cause that names the steps with extra work, and the kind of work if recorded."""
    extra = evidence.analysis.extra_work if evidence.analysis is not None else None
    if extra is None:
        return None
    kind = cause_of(extra.name)
    where = f"step{'' if len(extra.steps) == 1 else 's'} {listed(extra.steps)} of {evidence.breakdown.num_steps}"
    advice = STALL_ADVICE.get(kind, EXTRA_ADVICE)
    message = f"{where}, during {extra.name}" if extra.name else f"{where}, in operations that other steps do not run"
    return Cause(name=kind or "unknown", message=message, remedies=(Remedy(advice=advice),))


def _step_variation(evidence: Evidence) -> float | None:
    """Return the variation of step times; None for Steptune's own captures, because trials are judged by their timing
    windows.
    """
    if evidence.facts.own_capture or evidence.analysis is None:
        return None
    return evidence.analysis.step_time_cv


UNEVEN_STEP_RULES: tuple[Rule, ...] = (
    Rule(
        name="extra_work",
        categories=COMPUTE,
        thresholds=(0.05, 0.15, 0.30),
        message="{share} of the steps' time is compute that only some steps run",
        remedies=(Remedy(advice=EXTRA_ADVICE),),
        measure=_extra_share,
        cause=_extra_cause,
        replayed=EXTRA,
        replayed_message="without the work that only some steps run, steps would be {share} shorter on average",
    ),
    Rule(
        name="unsteady_steps",
        categories=(),
        thresholds=(0.10, 0.20, 0.50),
        message="step times vary by {share} around their mean: conclusions from a few steps are uncertain",
        remedies=(Remedy(advice="profile more steps, after a longer warm-up, on a machine that is otherwise idle"),),
        measure=_step_variation,
    ),
)
