"""Slowdown of compute by communication that runs at the same time.

Compute of a step takes longer, the more communication it hides. Trials of one study that differ in nothing but how they
communicate show by how much: the slope of compute over hidden communication is the share of its speed that compute
loses.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable

from steptune.tuner.costs.categories import COMPUTING, Category
from steptune.tuner.prediction.plans import COMMUNICATION
from steptune.tuner.records import Breakdown, Candidate, TrialResult
from steptune.tuner.strategies.situations import exchange_of

ON_CUDA = 0.5
"""Default contention for a study without a measurement. ViT-L had 0.7 and GPT-2 large 0.5 under DDP on one host with
four H200 (measured by hand). The default is a value between them, reduced by the share of gradient copies, which are
modelled separately.
"""
ELSEWHERE = 0.0
MOST = 0.95
MIN_SPREAD = 0.05
"""Minimum difference between trials in hidden communication, as a share of the step, that allows an estimate of
contention.
"""


def default_contention(device_kind: str) -> float:
    return ON_CUDA if device_kind == "cuda" else ELSEWHERE


def measured_contention(results: Iterable[TrialResult]) -> float | None:
    """Return the contention in a study's profiled trials; None if their hidden communication differs too little."""
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    steps: list[float] = []
    for result in results:
        if result.ok and result.breakdowns and _reduces(result.candidate):
            breakdown = result.breakdowns[0]
            points[_apart_from_communication(result.candidate)].append(_point(breakdown))
            steps.append(sum(breakdown.per_step_ns.values()))
    groups = [group for group in points.values() if _spread(group) >= MIN_SPREAD * min(steps)]
    covariance = variance = 0.0
    for group in groups:
        hidden_mean, compute_mean = (sum(values) / len(group) for values in zip(*group, strict=True))
        covariance += sum((hidden - hidden_mean) * (compute - compute_mean) for hidden, compute in group)
        variance += sum((hidden - hidden_mean) ** 2 for hidden, _ in group)
    return min(MOST, max(0.0, covariance / variance)) if variance else None


def _point(breakdown: Breakdown) -> tuple[float, float]:
    """Return the hidden communication and the compute of a breakdown, per step."""
    times = breakdown.per_step_ns
    hidden = breakdown.overlapped.get(Category.COMMUNICATION, 0) / breakdown.num_steps
    return hidden, sum(times.get(category, 0.0) for category in COMPUTING)


def _spread(group: list[tuple[float, float]]) -> float:
    return max((abs(a - b) for (a, _), (b, _) in itertools.combinations(group, 2)), default=0.0)


def _reduces(candidate: Candidate) -> bool:
    """Say whether a candidate computes like DDP without compression; FSDP and compression add compute of their own."""
    exchange = exchange_of(candidate.choices)
    return not exchange.is_sharded and exchange.compression is None


def _apart_from_communication(candidate: Candidate) -> str:
    return Candidate(choices={n: c for n, c in candidate.choices.items() if n not in COMMUNICATION}).key
