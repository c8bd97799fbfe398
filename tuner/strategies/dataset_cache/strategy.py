"""dataset_cache: keep decoded samples in memory or on a local disk.

Mechanism: what `dataset.load(index)` (or a deterministic `dataset[index]`) returns is stored the
first time and reused. Random augmentation (`dataset.augment`) still runs every time, so the training
is bit for bit the same.

Helps: when decoding dominates, and the decoded data fit. Hurts: memory or disk, and the one pass that
fills the cache (reported as a cost).

Numerics: `exact`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, jointly, removable, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.data_loading.costs import without_crowding
from steptune.tuner.strategies.dataset_cache.choice import DatasetCacheSetting

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan
    from steptune.tuner.workloads.workload import Workload

CROWDING_PART = 0.1
MEMORY_SHARE = 0.5
"""Maximum share of the free memory or disk that a cache may fill."""


class DatasetCache(Strategy):
    setting = DatasetCacheSetting
    summary = "cache of decoded samples in memory or on a local disk"
    needs_workload = (
        "Steptune must wrap the dataset before its loader is created, which needs Workload.load and Workload.augment"
    )
    attacks = (Category.DATA_WAIT,)
    cures = (
        Cure.MAKE_BATCHES_SOONER,
        Cure.READ_LESS_OFTEN,
    )
    usual_realisation = 0.8
    trial_cost_s = 5.0

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return ({"where": "memory"}, {"where": "disk"})

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        data = workload.dataset
        if choice["where"] is None:
            return Supported()
        if data.kind != "map" or data.length is None:
            return Unsupported(
                "requires a map-style dataset: samples of an iterable dataset have no index to cache them by"
            )
        if not (data.load_deterministic or data.deterministic):
            return Unsupported(
                "dataset[i] draws random numbers, which a cache would freeze: split it into Workload.load(index) "
                "and Workload.augment(sample), so that Steptune can cache the result of load"
            )
        copies = environment.num_ranks if choice["where"] == "memory" else 1
        needed = copies * data.length * (data.sample_bytes or 0)
        free = environment.free_memory_bytes if choice["where"] == "memory" else environment.free_disk_bytes
        if needed > MEMORY_SHARE * free:
            return Unsupported(f"requires {needed / 1e9:.1f} GB for the decoded data; {free / 1e9:.1f} GB are free")
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.EXACT

    def contribute(self, plan: Plan, choice: Choice) -> None:
        if choice["where"] is not None:
            where = str(choice["where"])

            def cache_samples(dataset: Any, workload: Workload) -> CachedDataset:
                return CachedDataset(dataset, where, workload.directory / "sample_cache")

            plan.dataset.append(cache_samples)

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        return jointly(without(situation, Category.DATA_WAIT), without_crowding(situation))

    def expected(self, situation: Situation, choice: Choice) -> float | None:
        """Return the expected saving: most of the wait for data, and part of the time that cores freed from workers
        save. Return None if workers take no cores from the step.
        """
        if not without_crowding(situation):
            return None
        wait = removable(situation, Category.DATA_WAIT)
        return self.usual_realisation * wait + CROWDING_PART * (self.bound(situation, choice) - wait)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        dataset = job.loader.dataset
        return {"where": dataset.where} if isinstance(dataset, CachedDataset) else {"where": None}


class CachedDataset:
    """Map-style dataset that stores the results of its deterministic part.

    The memory cache is filled by the process that calls `fill` before workers are forked, so that all share it; samples
    that were not filled are loaded by the process that asks, and kept there. The disk cache is shared by all processes
    at any time: one tensor file per sample.
    """

    def __init__(self, dataset: Any, where: str, directory: Path) -> None:
        self.dataset = dataset
        self.where = where
        self.splits = hasattr(dataset, "load") and hasattr(dataset, "augment")
        self._memory: dict[int, Any] = {}
        self._directory = directory
        if where == "disk":
            self._directory.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self._stored(index)
        return self.dataset.augment(sample) if self.splits else sample

    def fill(self, indices: Any) -> None:
        """Load and store the given samples immediately."""
        for index in indices:
            self._stored(int(index))

    def _stored(self, index: int) -> Any:
        return self._from_disk(index) if self.where == "disk" else self._from_memory(index)

    def _load(self, index: int) -> Any:
        return self.dataset.load(index) if self.splits else self.dataset[index]

    def _from_memory(self, index: int) -> Any:
        if index not in self._memory:
            self._memory[index] = self._load(index)
        return _copied(self._memory[index])

    def _from_disk(self, index: int) -> Any:
        from steptune.tuner.training.structure import flatten, unflatten
        from steptune.tuner.training.tensor_file import map_tensors, save_tensors

        path = self._directory / f"{index}.tensors"
        if not path.exists():
            tensors, description = flatten(self._load(index))
            save_tensors(path, tensors, {"structure": description})
        tensors, metadata = map_tensors(path)
        return unflatten(tensors, metadata["structure"])


def _copied(sample: Any) -> Any:
    """Copy a sample so that in-place changes to its tensors and arrays do not reach the stored ones."""
    from steptune.tuner.training.structure import map_structure

    def copy(leaf: Any) -> Any:
        if hasattr(leaf, "clone"):
            return leaf.clone()
        return leaf.copy() if hasattr(leaf, "copy") else leaf

    return map_structure(copy, sample)
