"""Rules for communication between ranks and between pipeline stages."""

from __future__ import annotations

from steptune.tuner.costs.categories import Category
from steptune.tuner.profiling.evidence import Evidence
from steptune.tuner.profiling.rank_findings import SKEW_THRESHOLDS
from steptune.tuner.profiling.rules.rule import Cause, Remedy, Rule
from steptune.tuner.strategies.cures import Cure

HIDDEN = 0.2
"""Minimum share of communication hidden behind compute for communication to count as already overlapped."""
COMMUNICATE_LESS = Remedy(
    advice="communicate less often or in smaller dtypes",
    cures=(Cure.COMMUNICATE_LESS,),
)


def _communication_cause(evidence: Evidence) -> Cause | None:
    """Return the cause of exposed communication: `network` if waits for late ranks are reported separately,
    `overlapped` if enough communication already overlaps with compute; None otherwise.
    """
    breakdown = evidence.breakdown
    hidden = breakdown.overlapped.get(Category.COMMUNICATION.value, 0)
    overlaps = hidden >= HIDDEN * max(1, hidden + breakdown.categories.get(Category.COMMUNICATION.value, 0))
    overlap = Remedy(
        advice="overlap communication with the backward pass",
        cures=COMMUNICATE_LESS.cures,
        useful=lambda facts: not overlaps,
    )
    remedies = (overlap, COMMUNICATE_LESS)
    if evidence.late_share >= SKEW_THRESHOLDS[0]:
        message = f"waiting for a late rank takes another {evidence.late_share:.0%}, which is not included"
        return Cause(name="network", message=message, remedies=remedies)
    message = f"{hidden / breakdown.num_steps / 1e6:.3g} ms a step overlap with compute already"
    return Cause(name="overlapped", message=message, remedies=remedies) if overlaps else None


COMMUNICATION_RULES: tuple[Rule, ...] = (
    Rule(
        name="exposed_communication",
        categories=(Category.COMMUNICATION,),
        thresholds=(0.05, 0.10, 0.30),
        message="{share} of the step is spent communicating while no compute runs",
        remedies=(
            Remedy(advice="overlap communication with the backward pass", cures=COMMUNICATE_LESS.cures),
            COMMUNICATE_LESS,
        ),
        cause=_communication_cause,
    ),
    Rule(
        name="pipeline_bubble",
        categories=(Category.PIPELINE_BUBBLE,),
        thresholds=(0.05, 0.10, 0.30),
        message="for {share} of the step a pipeline stage sends to or waits for its neighbour",
        remedies=(
            Remedy(
                advice="use more and smaller micro-batches, an interleaved schedule, or stages of equal duration",
                cures=(Cure.SHRINK_PIECES,),
            ),
        ),
    ),
)
