"""Runner for tests of searches: its trials cost nothing, and the best candidate is known.

`FakeRunner` implements `TrialRunner` over a `Surface`: a step time by category for every candidate, with multiplicative
noise per process start, drift over time, and candidates that run out of memory. It reports the true breakdown with a
profile's noise, so bounds work as on a machine.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from steptune.tuner.costs.bounds import Savings, Situation, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.errors import BaselineError
from steptune.tuner.protocols import ProgressListener
from steptune.tuner.records import (
    Breakdown,
    Candidate,
    CaptureQuality,
    Choice,
    DatasetFacts,
    Device,
    Environment,
    Failure,
    FailureKind,
    GuardVerdict,
    HardwareProfile,
    MeasureSettings,
    MemoryPeak,
    ModelFacts,
    Numerics,
    OptimizerFacts,
    Phase,
    Purpose,
    SampleUnit,
    Startup,
    Topology,
    TrialResult,
    TrialSpec,
    Window,
    WorkloadFacts,
)
from steptune.tuner.strategies.api import Strategy
from steptune.tuner.training.plan import Plan

BATCH = 32
TRIAL_S = 5.0
"""Reported duration of a trial in seconds; if the time limit of its windows is lower, that limit is reported."""
NUM_WINDOWS = 5
PROFILE_NOISE_SD = 0.05


class FakeStrategy(Strategy):
    """Strategy with numbered levels that changes the time of one category of the step."""

    summary: ClassVar[str] = "levels of a known effect"
    defaults: ClassVar[Choice] = {"level": 0}
    attacks: ClassVar[tuple[Category, ...]] = ()
    has_order: ClassVar[bool] = False

    def __init__(self, name: str, category: Category, levels: int, *, memory: bool = False) -> None:
        self.name = name  # type: ignore[misc]
        self.category = category
        self.attacks = (category,)  # type: ignore[misc]
        self.touches = (category,)  # type: ignore[misc]
        self.levels = levels
        self.values = {"level": (range(levels + 1),)}  # type: ignore[misc]
        self.values = {"level": (range(levels + 1),)}  # type: ignore[misc]
        self.memory = memory  # type: ignore[misc]

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return tuple({"level": level} for level in range(1, self.levels + 1))

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        return None

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        return without(situation, self.category)


Levels = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Known step time of every candidate.

    Attributes:
        base_ms: Step time by category with every strategy at level 0.
        factors: Factor on the strategy's category, by level.
        joint: Further factors of combinations: (needed levels, category, factor).
        memory_gb: Memory by strategy and level, negative for levels that save memory; beyond `cap_gb` a trial runs out
            of memory.
        drift: Factor on the rate of the n-th trial.
    """

    name: str
    base_ms: Mapping[Category, float]
    factors: Mapping[str, tuple[Category, tuple[float, ...]]]
    joint: tuple[tuple[Levels, Category, float], ...] = ()
    memory_gb: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    base_gb: float = 10.0
    cap_gb: float = math.inf
    drift: Callable[[int], float] = lambda order: 1.0

    @property
    def strategies(self) -> tuple[FakeStrategy, ...]:
        return tuple(
            FakeStrategy(name, category, len(levels), memory=min(self.memory_gb.get(name, (0.0,))) < 0)
            for name, (category, levels) in self.factors.items()
        )

    def levels(self, candidate: Candidate) -> dict[str, int]:
        return {name: int(candidate.choices.get(name, {}).get("level", 0) or 0) for name in self.factors}

    def step_ms(self, levels: Levels) -> dict[Category, float]:
        """Return the true step time by category."""
        times = dict(self.base_ms)
        for name, (category, effects) in self.factors.items():
            if levels[name]:
                times[category] *= effects[levels[name] - 1]
        for needed, category, factor in self.joint:
            if all(levels[name] == level for name, level in needed.items()):
                times[category] *= factor
        return times

    def needed_gb(self, levels: Levels) -> float:
        return self.base_gb + sum(
            self.memory_gb[name][level - 1] for name, level in levels.items() if level and name in self.memory_gb
        )

    def fits(self, levels: Levels) -> bool:
        return self.needed_gb(levels) <= self.cap_gb

    def total_ms(self, candidate: Candidate) -> float:
        return sum(self.step_ms(self.levels(candidate)).values())

    def best_ms(self) -> float:
        """Return the shortest true step time among all candidates that fit into memory."""
        options = [range(len(effects) + 1) for _, effects in self.factors.values()]
        every = (dict(zip(self.factors, levels, strict=True)) for levels in itertools.product(*options))
        return min(sum(self.step_ms(levels).values()) for levels in every if self.fits(levels))


class FakeRunner:
    """`TrialRunner` with known step times, which starts no processes and takes no time.

    Args:
        paired: Whether trials may run at the same time.
        device_gb: Memory shared by all trials that run at the same time.
        reference_gb: Memory that the guard's reference takes beside that of its candidate.
    """

    def __init__(
        self,
        surface: Surface,
        *,
        noise_sd: float = 0.03,
        seed: int = 0,
        paired: bool = False,
        device_gb: float = math.inf,
        reference_gb: float = 0.0,
    ) -> None:
        self.surface = surface
        self._reference_gb = reference_gb
        self._device_gb = device_gb
        self.num_trials = 0
        self._noise_sd = noise_sd
        self._random = random.Random(seed)
        self._paired = paired

    def describe(self) -> Environment:
        return fake_environment()

    def measure_topology(self, hardware: HardwareProfile, known: Topology | None, seconds: float) -> Topology | None:
        return None

    def inspect(self, longest_s: float | None = None) -> WorkloadFacts:
        return fake_workload()

    def begin_reference(self, request: Any, longest_s: float) -> None:
        """Do nothing: the reference cannot be made in the background, because trials take no time here."""

    def make_reference(self, request: Any, longest_s: float | None = None) -> None:
        levels = {name: int(request.choices[name]["level"]) for name in self.surface.factors}
        needed_gb = self.surface.needed_gb(levels) + self._reference_gb
        if needed_gb > self.surface.cap_gb:
            raise BaselineError(
                f"{needed_gb:g} GB are needed and {self.surface.cap_gb:g} GB are there",
                out_of_memory=True,
            )

    def task(self, entry: str, request: Any) -> bytes:
        raise NotImplementedError(f"the simulated surface cannot run the {entry} task")

    def run(
        self,
        specs: Sequence[TrialSpec],
        purposes: Sequence[Purpose],
        settings: MeasureSettings,
        group: str,
        listener: ProgressListener,
    ) -> list[TrialResult]:
        drift = self.surface.drift(self.num_trials)
        self.num_trials += 1
        taken_s = min(TRIAL_S, settings.cap_s / len(specs))
        results = [self._result(s, purpose, group, drift, taken_s) for s, purpose in zip(specs, purposes, strict=True)]
        return self._beside_each_other(results)

    def _beside_each_other(self, results: list[TrialResult]) -> list[TrialResult]:
        """Mark a trial of a group as out of memory if it does not fit into memory together with the earlier ones. If
        fewer than two trials of the group remain, remove the windows of all.
        """
        used_gb, left = 0.0, []
        for result in results:
            needed_gb = self.surface.needed_gb(self.surface.levels(result.candidate))
            fits = needed_gb <= self.surface.cap_gb and used_gb + needed_gb <= self._device_gb
            used_gb += needed_gb if fits else 0.0
            left.append(result if fits else self._out_of_memory(result))
        if len(left) > 1 and sum(result.failure is None for result in left) < 2:
            left = [msgspec.structs.replace(result, windows=(), breakdowns=()) for result in left]
        return left

    def _out_of_memory(self, result: TrialResult) -> TrialResult:
        failure = Failure(
            kind=FailureKind.OUT_OF_MEMORY,
            phase=Phase.WARM_UP,
            message=("the candidate needs more memory than the simulated device has"),
        )
        return TrialResult(
            trial_id=result.trial_id,
            candidate=result.candidate,
            purpose=result.purpose,
            group=result.group,
            failure=failure,
            phases_ns=result.phases_ns,
        )

    def fits_together(self, peaks_bytes: Sequence[int]) -> bool:
        return self._paired and sum(peaks_bytes) / 1e9 <= min(self.surface.cap_gb, self._device_gb)

    def close(self) -> None:
        return None

    def _result(self, spec: TrialSpec, purpose: Purpose, group: str, drift: float, taken_s: float) -> TrialResult:
        levels = self.surface.levels(spec.candidate)
        phases = {Phase.MEASURE.value: int(taken_s * 1e9)}
        times = self.surface.step_ms(levels)
        noise = math.exp(self._random.gauss(0, self._noise_sd))
        step_ns = sum(times.values()) * 1e6 * noise / drift
        return TrialResult(
            trial_id=spec.trial_id,
            candidate=spec.candidate,
            purpose=purpose,
            group=group,
            windows=tuple(known_window(number, step_ns) for number in range(NUM_WINDOWS)),
            startup=Startup(build_ns=0, user_code_ns=0, first_step_ns=0, warm_up_ns=0, warm_up_steps=1, steady=True),
            memory=(MemoryPeak(rank=0, resident_bytes=int(self.surface.needed_gb(levels) * 1e9)),),
            breakdowns=(self._breakdown(times, noise / drift),),
            guard=GuardVerdict(passed=True, num_steps=4),
            phases_ns=phases,
        )

    def _breakdown(self, times_ms: Mapping[Category, float], factor: float) -> Breakdown:
        """Return the true breakdown, with the noise of a profile added to every category."""
        categories = dict.fromkeys((category.value for category in Category), 0)
        for category, value in times_ms.items():
            noise = math.exp(self._random.gauss(0, PROFILE_NOISE_SD))
            categories[category.value] = int(value * factor * noise * 1e6)
        return known_breakdown(categories)


def known_breakdown(categories: dict[str, int], device: str = "cpu") -> Breakdown:
    """Return the breakdown of one step, given its nanoseconds by category."""
    total = sum(categories.values())
    return Breakdown(
        rank=0,
        device=device,
        num_steps=1,
        step_time_ns=total,
        categories=categories,
        quality=CaptureQuality(num_events=len(categories), num_steps=1),
        unprofiled_step_time_ns=total,
        rescaled=categories,
    )


def known_window(number: int, step_ns: float) -> Window:
    """Return a window of ten steps of this length."""
    return Window(
        round=number,
        position=number,
        num_steps=10,
        num_samples=10 * BATCH,
        num_units=10 * BATCH,
        duration_ns=int(10 * step_ns),
        step_p20_ns=int(step_ns),
        step_p50_ns=int(step_ns),
        step_p80_ns=int(step_ns),
        queue_depth_start=0,
        queue_depth_end=0,
        foreign_cpu_share=0.0,
    )


def fake_environment() -> Environment:
    """Return the environment of a machine with two cores."""
    device = Device(kind="cpu", name="fake", memory_bytes=16 << 30)
    return Environment(hardware=HardwareProfile(devices=(device,), num_cores=2, cpu_name="fake", memory_bytes=16 << 30))


def fake_workload() -> WorkloadFacts:
    """Return the facts of a minimal workload."""
    return WorkloadFacts(
        reference="fake:surface",
        name="surface",
        signature="0" * 16,
        global_batch=BATCH,
        sample_unit=SampleUnit.SAMPLE,
        dataset=DatasetFacts(kind="map", length=1024, sample_bytes=1, sample_ns=1, deterministic=True, splits=False),
        model=ModelFacts(num_parameters=1, parameter_bytes=4, num_parameter_tensors=1),
        optimizer=OptimizerFacts(name="AdamW", module="torch.optim.adamw", implementation="for_loop"),
    )


# --- known surfaces ---------------------------------------------------------------------------

_BASE = {
    Category.MATMUL: 40.0,
    Category.ELEMENTWISE: 22.0,
    Category.DATA_WAIT: 22.0,
    Category.OPTIMIZER: 10.0,
    Category.HOST: 6.0,
}
_SEPARABLE: dict[str, tuple[Category, tuple[float, ...]]] = {
    "loader": (Category.DATA_WAIT, (0.35, 0.15, 0.6)),
    "cache": (Category.DATA_WAIT, (1.1,)),
    "fusion": (Category.ELEMENTWISE, (0.45,)),
    "products": (Category.MATMUL, (1.3, 0.7)),
    "layout": (Category.MATMUL, (1.0,)),
    "backend": (Category.MATMUL, (1.05, 1.0)),
    "update": (Category.OPTIMIZER, (0.3, 1.0)),
    "threads": (Category.HOST, (1.0, 1.2)),
}
_NEUTRAL = {name: (category, tuple(1.0 for _ in levels)) for name, (category, levels) in _SEPARABLE.items()}

SEPARABLE = Surface(name="separable", base_ms=_BASE, factors=_SEPARABLE)
PAIR = Surface(
    name="pair",
    base_ms=_BASE,
    factors={**_NEUTRAL, "loader": _SEPARABLE["loader"]},
    joint=(({"layout": 1, "backend": 2}, Category.MATMUL, 0.55),),
)
WALL = Surface(
    name="memory wall",
    base_ms=_BASE,
    factors=_SEPARABLE,
    memory_gb={
        "loader": (1.0, 6.0, 0.5),
        "fusion": (3.0,),
        "products": (0.0, 2.0),
        "update": (2.0, 0.0),
        "cache": (5.0,),
    },
    cap_gb=19.0,
)
DRIFT = Surface(
    name="drift",
    base_ms=_BASE,
    factors=_SEPARABLE,
    drift=lambda order: math.exp(-0.006 * order + 0.03 * math.sin(order / 6)),
)
NOISE = Surface(name="pure noise", base_ms=_BASE, factors=_NEUTRAL)
SURFACES: tuple[Surface, ...] = (SEPARABLE, PAIR, WALL, DRIFT, NOISE)
