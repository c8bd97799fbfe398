"""Upper bounds on the time that a change could save, from the measured breakdown.

Figures are shares of the step time: 0.25 means that the step cannot become shorter than three
quarters of what it is. Categories are disjoint, so removing several saves the sum of their shares.
Several changes to one category save no more than the one with the largest saving (`jointly`).
Compute has a floor, the roofline: it cannot take less time than its floating-point operations at
the measured peak of the device, or its compulsory bytes at the measured bandwidth.

Bounds prune and order; only trials decide.
Sources: Williams et al., "Roofline" (CACM 2009); reference/profilers.md section 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from steptune.tuner.costs.categories import COMPUTE, Category
from steptune.tuner.network.exchange import Exchange
from steptune.tuner.records import Breakdown, Choice, Environment, InputActivity, StepFacts, WorkloadFacts

FLOAT32 = "float32"
PRODUCTS = (Category.MATMUL, Category.ATTENTION)
PEAK_TOLERANCE = 1.1
"""Maximum factor by which a device can be faster than its measured peak."""


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Dtypes of a step's matmuls, and the step's batch as a multiple of today's; the defaults are plain PyTorch's.

    Attributes:
        dtype: 16-bit dtype of matmuls, where there is one.
        tf32: Whether FP32 matmuls run in TF32.
        rest_in_tf32: Whether those matmuls run in TF32 that every choice of dtype leaves in FP32.
        factor: Global batch of a step, as a multiple of today's.
    """

    dtype: str | None = None
    tf32: bool = False
    rest_in_tf32: bool = False
    factor: int = 1

    @property
    def arithmetic(self) -> str:
        return self.dtype or ("tf32" if self.tf32 or self.rest_in_tf32 else FLOAT32)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The incumbent as measured, with the known facts about the workload and the machine."""

    breakdown: Breakdown
    workload: WorkloadFacts
    environment: Environment
    choices: dict[str, Choice]
    """All choices of the incumbent, neutral ones included."""
    input: InputActivity | None = None
    """Activity of the processes that make batches, in the incumbent's last clean window; None if not measured."""
    facts: StepFacts = field(default_factory=StepFacts)
    """Facts about the features that the choices enable."""
    computation: Computation = field(default_factory=Computation)
    """Dtypes of the matmuls, and the batch, under the incumbent's choices."""
    exchange: Exchange = field(default_factory=Exchange)
    """Communication settings between ranks under the incumbent's choices."""
    exchange_today: Exchange = field(default_factory=Exchange)
    """Communication settings between ranks under the user's own settings; the links were measured with these settings.
    """

    @property
    def step_ns(self) -> float:
        return max(1.0, sum(self.breakdown.per_step_ns.values()))

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of the step that each category takes."""
        return {name: value / self.step_ns for name, value in self.breakdown.per_step_ns.items()}

    def time_ns(self, categories: Iterable[str]) -> float:
        times = self.breakdown.per_step_ns
        return sum(times.get(category, 0.0) for category in categories)


Savings = Mapping[Category, float]
"""Largest savings of a change, by category, as shares of the step."""


def jointly(*changes: Savings) -> Savings:
    """Combine the savings of several changes: in each category the largest saving counts."""
    names = sorted({name for change in changes for name in change})
    return {name: max(change.get(name, 0.0) for change in changes) for name in names}


def total(savings: Savings) -> float:
    """Return the sum of the savings over all categories, at most 1."""
    return min(1.0, sum(savings.values()))


def part_of(savings: Savings, part: float) -> Savings:
    """Scale the savings in every category by a factor."""
    return {name: part * share for name, share in savings.items()}


def without(situation: Situation, *categories: Category) -> Savings:
    """Return the savings if the time of these categories vanishes."""
    return {category: removable(situation, category) for category in categories}


def at_roofline(situation: Situation, *categories: Category, dtype: str | None = None) -> Savings:
    """Return the savings if compute of these categories runs at the measured peak, as in `above_roofline`.

    The remaining floor time is assigned to the matmuls first; what exceeds their time is assigned to other compute.
    """
    chosen = categories or COMPUTE
    left = situation.time_ns(chosen) - situation.step_ns * above_roofline(situation, *categories, dtype=dtype)
    found: dict[Category, float] = {}
    for group in ([c for c in chosen if c in PRODUCTS], [c for c in chosen if c not in PRODUCTS]):
        time = situation.time_ns(group)
        kept = min(left, time)
        for category in group:
            found[category] = situation.time_ns([category]) * (1 - kept / max(1.0, time)) / situation.step_ns
        left -= kept
    return found


def removable(situation: Situation, *categories: Category) -> float:
    """Return the share of the step that is saved if the time of these categories vanishes."""
    return situation.breakdown.removable_share(*categories)


def above_roofline(situation: Situation, *categories: Category, dtype: str | None = None) -> float:
    """Return the share of the step that is saved if compute of these categories runs at the measured peak.

    Without categories, all compute counts. `dtype` is the arithmetic of matmuls after the change; None: the
    incumbent's.
    """
    chosen = categories or COMPUTE
    time = situation.time_ns(chosen)
    if not any(category in chosen for category in PRODUCTS):
        return time / situation.step_ns
    # The floor is that of all products: those of other categories may have taken the time that they took.
    elsewhere = situation.time_ns(category for category in PRODUCTS if category not in chosen)
    floor = compute_floor_ns(situation, dtype) - elsewhere
    return max(0.0, time - max(0.0, floor)) / situation.step_ns


def compute_floor_ns(situation: Situation, dtype: str | None = None) -> float:
    """Return the minimum time of a step's compute: that of its FLOP at the peak rate or of its compulsory memory
    traffic at the measured bandwidth, whichever is longer.

    An unknown figure gives a floor of 0, so that a bound is never too small. `dtype` as for `above_roofline`.
    """
    dtype = dtype or arithmetic(situation)
    calibration = situation.environment.calibration
    element_bytes = 2 if dtype in ("bfloat16", "float16") else 4
    parameters = situation.workload.model.num_parameters
    compulsory = 3 * parameters * element_bytes + situation.workload.batch_bytes
    bandwidth = calibration.copy_bytes_per_s
    by_bytes = compulsory / bandwidth * 1e9 / _num_ranks(situation) if bandwidth else 0.0
    return max(_products_ns(situation, dtype), by_bytes)


def _products_ns(situation: Situation, dtype: str) -> float:
    """Return the time of a step's FLOP at the peak rate of a dtype or of TF32; 0 if the FLOP or the rate is unknown."""
    peak = situation.environment.calibration.matmul_flops_per_s.get(dtype, 0.0)
    flops = situation.computation.factor * (situation.workload.model.flops_per_step or 0)
    return flops / peak * 1e9 / _num_ranks(situation) if peak else 0.0


def _num_ranks(situation: Situation) -> int:
    return max(1, situation.environment.num_ranks)


def arithmetic(situation: Situation, **changed: Any) -> str:
    """Return the calibration's name for the arithmetic of matmuls: their dtype, or TF32.

    Args:
        changed: Fields of the incumbent's `Computation` that a choice changes.

    Without changes, this is the fastest arithmetic that may have run: cuDNN uses TF32 for FP32 convolutions by
    default, and a model may cast to other dtypes itself.
    """
    named = replace(situation.computation, **changed).arithmetic
    if named != situation.computation.arithmetic:
        return named
    peaks = situation.environment.calibration.matmul_flops_per_s
    took_ns = PEAK_TOLERANCE * situation.time_ns(PRODUCTS)
    if named not in peaks or _products_ns(situation, named) <= took_ns:
        return named
    faster = sorted((name for name in peaks if peaks[name] > peaks[named]), key=lambda name: peaks[name])
    return next((name for name in faster if _products_ns(situation, name) <= took_ns), named)
