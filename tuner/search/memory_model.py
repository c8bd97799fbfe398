"""Prediction of a candidate's peak memory from candidates that were run: peak = fixed + per sample · micro-batch.

With several ranks the fixed part depends on how the training is sharded across them, and is computed (`rank_memory`): a
peak measured with one layout predicts all others, and a layout that does not fit even without activations is not tried.

Candidates that differ in nothing but the number of micro-batches share a line. The fixed part is at least the memory
that is known to be held all the time: parameters and the optimizer's state. A candidate whose line does not fit, with a
margin, is not tried, once two sizes are measured: gradients, workspaces and what an update needs for a moment are fixed
too, and their size is unknown. After one ran out of memory, no larger micro-batch on its line fits, and the capacity is
less than the line predicted there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steptune.tuner.records import Candidate, FailureKind, StudySettings, TrialResult
from steptune.tuner.search.rank_memory import RankMemory
from steptune.tuner.search.space import Space
from steptune.tuner.strategies.cpu_threads.choice import CpuThreadsSetting
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.dataset_cache.choice import DatasetCacheSetting
from steptune.tuner.strategies.device_prefetch.choice import DevicePrefetchSetting
from steptune.tuner.strategies.micro_batch.choice import MicroBatchSetting
from steptune.tuner.trials.memory import CONTEXT_BYTES

MICRO_BATCH = MicroBatchSetting.strategy
MARGIN = 0.05
"""Share of the capacity kept free for fragmentation and for memory outside the allocator."""
LAYOUT_ERROR = 0.1
"""Maximum relative error assumed for a peak predicted from another layout."""
INPUT_STRATEGIES = frozenset(
    kind.strategy for kind in (DataLoadingSetting, DatasetCacheSetting, DevicePrefetchSetting, CpuThreadsSetting)
)
"""Strategies that do not change the memory of a step."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Peak memory in bytes as a linear function of the number of samples in a micro-batch."""

    fixed: float
    per_sample: float

    def at(self, samples: float) -> float:
        return self.fixed + self.per_sample * samples


def fitted(points: Sequence[tuple[float, float]], known_bytes: float) -> Line | None:
    """Fit a line to measured (samples, bytes) by least squares, with no negative slope and at least the known fixed
    bytes.

    A single size is of use only where the fixed part is known, and then gives an upper bound for larger sizes.
    """
    if not points:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0 and not known_bytes:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    fixed = mean_y - slope * mean_x
    if not spread or fixed < known_bytes:
        squares = sum(x * x for x, _ in points)
        slope = sum(x * (y - known_bytes) for x, y in points) / squares
        fixed = known_bytes
    if slope < 0:
        return Line(fixed=mean_y, per_sample=0.0)
    return Line(fixed=fixed, per_sample=slope)


class MemoryModel:
    """Linear models of peak memory (`Line`), one for each set of choices other than micro-batches.

    Args:
        capacity_bytes: Memory that a rank may use.
        known_bytes: Memory that every rank holds all the time; 0 on a CPU, where measured peaks include other memory,
            and with several ranks, where it depends on the layout.
        per_rank: Samples of a step on one rank.
        layouts: Memory of layouts over several ranks; None with one rank, and where peaks are not of tensors.
    """

    def __init__(
        self, *, capacity_bytes: float, known_bytes: float, per_rank: int, layouts: RankMemory | None = None
    ) -> None:
        self._capacity = capacity_bytes
        self._known = known_bytes
        self._per_rank = per_rank
        self._layouts = layouts
        self._peaks: dict[str, list[tuple[float, float]]] = {}
        self._failed: dict[str, float] = {}
        """Smallest micro-batch that ran out of memory, in samples, for each set of other choices."""

    def learn(self, rest: str, samples: float, peak_bytes: float) -> None:
        """Learn from a measured peak."""
        self._peaks.setdefault(rest, []).append((samples, peak_bytes))

    def ran_out(self, rest: str, samples: float) -> None:
        self._failed[rest] = min(samples, self._failed.get(rest, samples))

    def predict(self, rest: str, samples: float) -> float | None:
        """Return the predicted peak in bytes, or None while too little is known."""
        line = fitted(self._peaks.get(rest, ()), self._known)
        return None if line is None else line.at(samples)

    @property
    def capacity_bytes(self) -> float:
        """Capacity as given, or less if a micro-batch that was predicted to fit ran out of memory."""
        seen = [self.predict(rest, samples) for rest, samples in self._failed.items()]
        return min([self._capacity, *(peak for peak in seen if peak is not None)])

    def refusal(self, rest: str, samples: float) -> str | None:
        """Return the reason why a micro-batch of `samples` samples will not fit, or None where it may."""
        failed = self._failed.get(rest)
        if failed is not None and samples >= failed:
            return f"micro-batches of {failed:g} samples ran out of memory"
        if any(size >= samples for size, _ in self._peaks.get(rest, ())):
            return None
        peak, allowed = self._least(rest, samples), (1 - MARGIN) * self.capacity_bytes
        if peak is None or peak <= allowed:
            return None
        return (
            f"would need about {peak / 1e9:.3g} GB for micro-batches of {samples:g} samples: "
            f"{allowed / 1e9:.3g} GB can be used"
        )

    def is_unlikely(self, rest: str, samples: float) -> bool:
        """Say whether a micro-batch of `samples` samples will not fit, or is predicted not to."""
        if any(size >= samples for size, _ in self._peaks.get(rest, ())):
            return False
        peak = self.predict(rest, samples)
        expected = peak is not None and peak > (1 - MARGIN) * self.capacity_bytes
        return expected or self.refusal(rest, samples) is not None

    def _least(self, rest: str, samples: float) -> float | None:
        """Return the minimum bytes that a micro-batch of `samples` samples needs. If only one micro-batch size was
        measured, return its whole peak, because all of it may be fixed.
        """
        points = self._peaks.get(rest, ())
        if len({size for size, _ in points}) == 1:
            return max(peak for _, peak in points)
        return self.predict(rest, samples)

    # --- candidates -----------------------------------------------------------------------------

    def take_in(self, result: TrialResult, pieces: int) -> None:
        """Learn from the result of a trial with `pieces` micro-batches."""
        rest, samples = self._place(result.candidate, pieces)
        if result.failure is not None and result.failure.kind is FailureKind.OUT_OF_MEMORY:
            self.ran_out_with(result.candidate, pieces)
        elif result.failure is None and result.memory:
            peak = max(peak.allocated_bytes or peak.resident_bytes for peak in result.memory)
            self.learn(rest, samples, peak)
            if self._layouts is not None:
                self._layouts.learn(result.candidate, pieces, samples, peak)

    def ran_out_with(self, candidate: Candidate, pieces: int) -> None:
        """Record that a candidate with `pieces` micro-batches ran out of memory."""
        rest, samples = self._place(candidate, pieces)
        self.ran_out(rest, samples)
        if self._layouts is not None:
            self._layouts.ran_out(candidate, pieces, samples, self._capacity)

    def why_not(self, candidate: Candidate, pieces: int) -> str | None:
        """Return the reason why a candidate with `pieces` micro-batches will not fit, or None where it may."""
        reason = self.refusal(*self._place(candidate, pieces))
        if reason is not None or self._layouts is None or self._fitted(candidate, pieces):
            return reason
        least = self._layouts.without_activations(candidate, pieces)
        peak = self._layouts.predict(candidate, pieces, self._per_rank / pieces)
        if least is not None and least > self._capacity:
            return (
                f"would need about {least / 1e9:.3g} GB on every rank even without activations, but only "
                f"{self._capacity / 1e9:.3g} GB can be used"
            )
        if peak is not None and peak > (1 + LAYOUT_ERROR) * self._capacity:
            return (
                f"would need about {peak / 1e9:.3g} GB on every rank, estimated from other layouts, but only "
                f"{self._capacity / 1e9:.3g} GB can be used"
            )
        return None

    def expected_bytes(self, candidate: Candidate, pieces: int) -> float | None:
        """Return the expected peak on one rank of a candidate with `pieces` micro-batches, or None while too little is
        known.
        """
        if self._layouts is not None:
            found = self._layouts.predict(candidate, pieces, self._per_rank / pieces)
            if found is not None:
                return found
        return self.predict(*self._place(candidate, pieces))

    def may_not_fit(self, candidate: Candidate, pieces: int) -> bool:
        """Say whether a candidate with `pieces` micro-batches may not fit, so that it should be tried after others."""
        if self._layouts is not None and not self._fitted(candidate, pieces):
            peak = self._layouts.predict(candidate, pieces, self._per_rank / pieces)
            peak = peak or self._layouts.least(candidate, pieces, self._per_rank / pieces) or 0.0
            if peak > (1 - MARGIN) * self._capacity:
                return True
        return self.is_unlikely(*self._place(candidate, pieces))

    def _fitted(self, candidate: Candidate, pieces: int) -> bool:
        """Say whether a micro-batch of at least this size was measured with the same other choices."""
        rest, samples = self._place(candidate, pieces)
        return any(size >= samples for size, _ in self._peaks.get(rest, ()))

    def _place(self, candidate: Candidate, pieces: int) -> tuple[str, float]:
        return candidate.with_choice(MICRO_BATCH, {}).key, self._per_rank / pieces


def memory_model(space: Space, settings: StudySettings) -> MemoryModel:
    """Return the memory model of a study, with the peak from the inspection of the workload."""
    facts, environment = space.workload, space.environment
    on_device = environment.hardware.device_kind == "cuda"
    free = environment.hardware.devices[0].memory_bytes - CONTEXT_BYTES if on_device else environment.free_memory_bytes
    limits = [limit for limit in (free, settings.memory_limit_bytes) if limit]
    held = facts.model.parameter_bytes + facts.optimizer.state_bytes
    per_rank = max(1, facts.global_batch // environment.num_ranks)
    layouts = RankMemory(space) if on_device and environment.num_ranks > 1 else None
    model = MemoryModel(
        capacity_bytes=min(limits, default=float("inf")),
        known_bytes=held if on_device and layouts is None else 0,
        per_rank=per_rank,
        layouts=layouts,
    )
    if not facts.look_peak_bytes or facts.current.keys() - INPUT_STRATEGIES:
        return model
    if layouts is not None:
        layouts.look(facts.look_samples, facts.look_peak_bytes)
    else:
        # The look had gradients at its end, but no state of an optimizer; a step has both, not all at its peak.
        peak = facts.look_peak_bytes - facts.model.parameter_bytes + facts.optimizer.state_bytes
        model.learn(Candidate().key, facts.look_samples, max(held, peak))
    return model


def pieces_of(space: Space, candidate: Candidate) -> int:
    """Return the number of micro-batches of a step."""
    return int(space.complete(candidate).get(MICRO_BATCH, {}).get("num_micro_batches") or 1)
