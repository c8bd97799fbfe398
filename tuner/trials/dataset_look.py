"""Inspection of a workload's data: its kind, length, size and speed, and whether samples are repeatable."""

from __future__ import annotations

import hashlib
import random
import time
from typing import Any

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.records import DatasetFacts
from steptune.tuner.workloads.batches import seed_generators
from steptune.tuner.workloads.workload import Workload, leaves

NUM_SAMPLES = 8


def look_at_dataset(workload: Workload, dataset: Any, seed: int) -> DatasetFacts:
    """Measure the kind, length, size and speed of a dataset, and whether its samples are repeatable.

    Raises:
        WorkloadRejectedError: The dataset is neither map-style nor iterable, or smaller than one batch.
    """
    if not hasattr(dataset, "__getitem__"):
        if not hasattr(dataset, "__iter__"):
            raise WorkloadRejectedError(
                f"{type(workload).__name__}.dataset() returned {type(dataset).__name__}, which has neither "
                "__getitem__ nor __iter__"
            )
        return _iterable_facts(dataset)
    if not hasattr(dataset, "__len__"):
        raise WorkloadRejectedError(
            f"{type(dataset).__name__} has __getitem__ but no __len__: a map-style dataset needs both"
        )
    length = len(dataset)
    if length < workload.global_batch:
        raise WorkloadRejectedError(
            f"the dataset has {length} samples, fewer than one batch of {workload.global_batch}: "
            "give more data or set a smaller global_batch"
        )
    splits = hasattr(dataset, "load") and hasattr(dataset, "augment")
    indices = random.Random(seed).sample(range(length), min(NUM_SAMPLES, length))
    first = _samples(dataset.__getitem__, indices, generator_seed=1)
    seed_generators(2)
    began = time.perf_counter_ns()
    second = [dataset[index] for index in indices]
    sample_ns = (time.perf_counter_ns() - began) // len(indices)
    repeated = _samples(dataset.__getitem__, indices, generator_seed=1)
    loads = [_samples(dataset.load, indices, generator_seed=s) for s in (1, 2)] if splits else []
    stored = loads[0] if splits else first
    return DatasetFacts(
        kind="map",
        length=length,
        sample_bytes=sum(size_of(sample) for sample in stored) // len(stored),
        sample_ns=sample_ns,
        deterministic=_digests(first) == _digests(second),
        seedable=_digests(first) == _digests(repeated),
        splits=splits,
        load_deterministic=bool(loads) and _digests(loads[0]) == _digests(loads[1]),
    )


def _iterable_facts(dataset: Any) -> DatasetFacts:
    iterator = iter(dataset)
    began = time.perf_counter_ns()
    samples = [sample for sample, _ in zip(iterator, range(NUM_SAMPLES), strict=False)]
    if not samples:
        raise WorkloadRejectedError("the iterable dataset yields no samples: check its __iter__")
    return DatasetFacts(
        kind="iterable",
        length=len(dataset) if hasattr(dataset, "__len__") else None,
        sample_bytes=sum(size_of(sample) for sample in samples) // len(samples),
        sample_ns=(time.perf_counter_ns() - began) // len(samples),
        deterministic=False,
        splits=False,
    )


def _samples(get: Any, indices: list[int], *, generator_seed: int) -> list[Any]:
    seed_generators(generator_seed)
    return [get(index) for index in indices]


def _digests(samples: list[Any]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        for leaf in leaves(sample):
            digest.update(_leaf_bytes(leaf))
    return digest.hexdigest()


def _leaf_bytes(leaf: Any) -> bytes:
    if hasattr(leaf, "detach"):
        import torch

        flat = leaf.detach().cpu().contiguous().reshape(-1)
        return bytes(memoryview(flat.view(torch.uint8).numpy())) if flat.numel() else b""
    if hasattr(leaf, "tobytes"):  # NumPy arrays and Pillow images
        return bytes(leaf.tobytes())
    return repr(leaf).encode()


def size_of(value: Any) -> int:
    """Return the bytes of a sample or batch."""
    total = 0
    for leaf in leaves(value):
        if hasattr(leaf, "element_size"):
            total += leaf.numel() * leaf.element_size()
        elif hasattr(leaf, "nbytes"):
            total += int(leaf.nbytes)
        elif hasattr(leaf, "tobytes") and hasattr(leaf, "size"):  # a Pillow image
            total += len(leaf.tobytes())
        elif isinstance(leaf, str | bytes):
            total += len(leaf)
        else:
            total += 8
    return total
