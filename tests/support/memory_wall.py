"""Training steps on several GPUs of which not every configuration fits into memory, as a model.

Not a measurement. What a rank holds beside activations is what the memory model counts, which was compared with
measured peaks (`benchmarks/results/memory.jsonl`); activations are of the right order. What is tested with it is what
a search makes of a training that does not run as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_model import C, Choices, GpuModel, studied
from msgspec.structs import replace
from ranks_model import RanksStep

from steptune.tuner.costs.categories import Category
from steptune.tuner.errors import BaselineError
from steptune.tuner.records import (
    Candidate,
    Choice,
    Failure,
    FailureKind,
    MeasureSettings,
    MemoryPeak,
    Phase,
    Purpose,
    Recommendation,
    StudySettings,
    TrialResult,
    TrialSpec,
    UnitFacts,
    WorkloadFacts,
)
from steptune.tuner.search.driver import StudyDriver
from steptune.tuner.search.rank_memory import held
from steptune.tuner.search.space import Space
from steptune.tuner.strategies import STRATEGIES

GB = 10**9
KEPT = {None: 0.15, "attention": 0.25, "products": 0.55}
"""Share of a block's activations that is kept, by what recomputing saves."""
RECOMPUTED = {None: 0.33, "attention": 0.28, "products": 0.06}
"""Share of a step's compute that is done again, by what recomputing saves."""
ATTEMPT_S = 12.0
"""Until a reference runs out of memory."""
REFERENCE_STEPS = 36


@dataclass(frozen=True, kw_only=True)
class WalledStep(RanksStep):
    """One sample for each rank.

    Attributes:
        activations_gb: Of a sample, by precision level.
        units: Of FSDP, by how they are wrapped.
    """

    activations_gb: Mapping[str, float]
    units: Mapping[str, UnitFacts]

    def facts(self) -> WorkloadFacts:
        facts = super().facts()
        model = replace(facts.model, shard_units=dict(self.units), num_unused_parameters=0, has_batch_statistics=False)
        return replace(
            facts,
            model=model,
            global_batch=self.num_ranks,
            optimizer=replace(facts.optimizer, implementation="foreach"),
            look_peak_bytes=0,
        )

    def times_ms(self, choices: Choices) -> dict[Category, float]:
        times = super().times_ms(choices)
        recomputed = choices["activation_checkpointing"]
        if not recomputed["every"]:
            return times
        more = 1 + RECOMPUTED[recomputed["save"]] / int(recomputed["every"])
        return {**times, C.MATMUL: more * times[C.MATMUL], C.ELEMENTWISE: more * times[C.ELEMENTWISE]}

    def activation_bytes(self, choices: Choices) -> float:
        level = str(choices["precision"]["level"])
        found = self.activations_gb.get(level, self.activations_gb["fp32"])
        recomputed = choices["activation_checkpointing"]
        if recomputed["every"]:
            found *= 1 - (1 - KEPT[recomputed["save"]]) / int(recomputed["every"])
        return GB * found + (2 * self.parameters.num_parameters if level == "O1" else 0)


class WalledModel(GpuModel):
    """
    Args:
        capacity_bytes: Of each rank.
    """

    step: WalledStep

    def __init__(self, step: WalledStep, capacity_bytes: float, start_s: float) -> None:
        super().__init__(step, start_s=start_s)
        self._capacity = capacity_bytes
        self._space = Space(self.describe(), step.facts(), StudySettings(num_ranks=step.num_ranks))
        self.num_out_of_memory = 0

    def peak_bytes(self, choices: Choices) -> float:
        """Peak bytes of complete choices; infinity for what nobody can count."""
        changed = {s.name: choices[s.name] for s in STRATEGIES if choices[s.name] != s.defaults}
        found = held(self._space, Candidate(choices=changed))
        return float("inf") if found is None else found.peak(self.step.activation_bytes(choices))

    def fits(self, choices: Choices) -> bool:
        return self.peak_bytes(choices) <= self._capacity

    def begin_reference(self, request: Any, longest_s: float) -> None:
        pass

    def make_reference(self, request: Any, longest_s: float | None = None) -> None:
        self.now_s += ATTEMPT_S
        if not self.fits(request.choices):
            self.num_out_of_memory += 1
            raise BaselineError("out of memory", out_of_memory=True)
        self.now_s += REFERENCE_STEPS * self.step.step_ms(request.choices) / 1e3

    def _trial(self, spec: TrialSpec, purpose: Purpose, settings: MeasureSettings, group: str) -> TrialResult:
        if not self.fits(spec.choices):
            self.now_s += ATTEMPT_S
            self.num_out_of_memory += 1
            return TrialResult(
                trial_id=spec.trial_id,
                candidate=spec.candidate,
                purpose=purpose,
                group=group,
                failure=Failure(kind=FailureKind.OUT_OF_MEMORY, phase=Phase.GUARD, message="out of memory"),
                phases_ns={Phase.GUARD.value: int(ATTEMPT_S * 1e9)},
            )
        result = super()._trial(spec, purpose, settings, group)
        size = int(self.peak_bytes(spec.choices))
        peaks = [
            MemoryPeak(rank=rank, resident_bytes=1, allocated_bytes=size, device_bytes=size)
            for rank in range(self.step.num_ranks)
        ]
        return replace(result, memory=tuple(peaks))


def searched_under(
    step: WalledStep, capacity_bytes: int, *, budget_s: float, start_s: float
) -> tuple[Recommendation, WalledModel, StudyDriver]:
    """A finished study with so much memory for each rank."""
    runner = WalledModel(step, capacity_bytes, start_s)
    settings = StudySettings(budget_s=budget_s, num_ranks=step.num_ranks, memory_limit_bytes=capacity_bytes)
    answer, driver = studied(runner, settings)
    return answer, runner, driver


def complete(driver: StudyDriver, **choices: Choice) -> dict[str, Choice]:
    assert driver.prepared is not None
    return driver.prepared.space.complete(Candidate(choices=choices))
