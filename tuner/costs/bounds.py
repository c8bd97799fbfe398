"""Upper bounds of the time that a change could save, from the measured breakdown.

Figures are shares of the step time: 0.25 means that the step cannot become shorter than three
quarters of what it is. Categories are disjoint, so removing several saves the sum of their shares.
Of one category several changes save no more than the one that leaves least of it (`jointly`).
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
"""A measured peak may be this much below what the device can do."""


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Arithmetic of a step's matmuls; the defaults are plain PyTorch's.

    Attributes:
        dtype: 16-bit dtype of matmuls, where there is one.
        tf32: Matmuls of FP32 run in TF32.
        rest_in_tf32: The same of those that another choice of dtype leaves in FP32.
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
    """The incumbent as measured, and what is known about the workload and the machine."""

    breakdown: Breakdown
    workload: WorkloadFacts
    environment: Environment
    choices: dict[str, Choice]
    """The complete choices of the incumbent."""
    input: InputActivity | None = None
    """Input activity in its last clean window, where it was measured."""
    facts: StepFacts = field(default_factory=StepFacts)
    """Facts about what the choices switch on."""
    computation: Computation = field(default_factory=Computation)
    """Computation of a step with the incumbent's choices."""
    exchange: Exchange = field(default_factory=Exchange)
    """Exchange between ranks with the incumbent's choices."""
    exchange_today: Exchange = field(default_factory=Exchange)
    """Exchange between ranks with the user's own settings, with which the links were measured."""

    @property
    def step_ns(self) -> float:
        return max(1.0, sum(self.breakdown.per_step_ns.values()))

    @property
    def shares(self) -> dict[str, float]:
        """Part of the step that each category takes."""
        return {name: value / self.step_ns for name, value in self.breakdown.per_step_ns.items()}

    def time_ns(self, categories: Iterable[str]) -> float:
        times = self.breakdown.per_step_ns
        return sum(times.get(category, 0.0) for category in categories)


Savings = Mapping[Category, float]
"""The most that a change can save, by category, as shares of the step."""


def jointly(*changes: Savings) -> Savings:
    """Savings of several changes together: for each category those of the change that leaves least of it."""
    names = sorted({name for change in changes for name in change})
    return {name: max(change.get(name, 0.0) for change in changes) for name in names}


def total(savings: Savings) -> float:
    """Add the savings of several changes: in each category the change that leaves the least counts."""
    return min(1.0, sum(savings.values()))


def part_of(savings: Savings, part: float) -> Savings:
    """Return this part of the savings in every category."""
    return {name: part * share for name, share in savings.items()}


def without(situation: Situation, *categories: Category) -> Savings:
    """Savings where these categories vanish."""
    return {category: removable(situation, category) for category in categories}


def at_roofline(situation: Situation, *categories: Category, dtype: str | None = None) -> Savings:
    """Savings where compute of these categories runs at the measured peak; as for `above_roofline`.

    The floor is left in the matrix products; where it is more than they take, in the other compute as well.
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
    """Share that is saved when these categories vanish."""
    return situation.breakdown.removable_share(*categories)


def above_roofline(situation: Situation, *categories: Category, dtype: str | None = None) -> float:
    """Share that is saved when compute of these categories runs at the measured peak.

    Without categories, all compute. `dtype` is the arithmetic of the matrix products afterwards; None: the incumbent's.
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
    """Least time of a step's compute: the larger of FLOP over peak and compulsory bytes over bandwidth.

    Unknown figures count as no floor, so that a bound is never too small. `dtype` as for `above_roofline`.
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
    """Time of a step's floating-point operations at the peak of an arithmetic; 0 where either is unknown."""
    peak = situation.environment.calibration.matmul_flops_per_s.get(dtype, 0.0)
    flops = situation.computation.factor * (situation.workload.model.flops_per_step or 0)
    return flops / peak * 1e9 / _num_ranks(situation) if peak else 0.0


def _num_ranks(situation: Situation) -> int:
    return max(1, situation.environment.num_ranks)


def arithmetic(situation: Situation, **changed: Any) -> str:
    """Arithmetic of matmuls, by the name that the calibration has for it.

    Args:
        changed: Fields of the incumbent's `Computation` that a choice changes.

    The incumbent's own is one that its products can have been computed in: cuDNN takes TF32 for convolutions of FP32 by
    default, and a model may cast by itself.
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
