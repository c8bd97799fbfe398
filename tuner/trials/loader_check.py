"""The guard's check of the input: the same indices over an epoch, the same tensors for an index.

Loader settings cannot change the arithmetic of a step, but they can change what it is fed. The
order is checked over a whole epoch with a dataset that returns only its index; the content on a few
batches with every generator seeded by the index, so that random augmentation can be compared too.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Any

from tuner.records import GuardCheck
from tuner.training.loader import build_loader
from tuner.trials.study_files import StudyFiles
from tuner.workloads.workload import leaves

if TYPE_CHECKING:
    from tuner.training.job import TrainingJob
    from tuner.workloads.workload import Workload

NUM_CONTENT_BATCHES = 2
MAX_ORDER_BATCHES = 2000


class _Indices:
    """A dataset whose samples are their own indices."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


class SeededByIndex:
    """Seeds torch's, NumPy's and Python's generators with the index before each sample."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        import numpy as np
        import torch

        torch.manual_seed(index)
        np.random.seed(index % 2**32)
        random.seed(index)
        return self.dataset[index]


class _PlainWorkload:
    """What `build_loader` needs of a workload, with another way to collate."""

    def __init__(self, workload: Workload, collate: Any) -> None:
        self._workload = workload
        self.collate = collate
        self.global_batch = workload.global_batch
        self.drop_last = workload.drop_last

    def worker_init(self, worker_id: int) -> None:
        self._workload.worker_init(worker_id)

    def batch_sampler(self, dataset: Any) -> None:
        return None

    def sampler(self, dataset: Any) -> None:
        return None


def check_loader(job: TrainingJob, files: StudyFiles, seed: int) -> list[GuardCheck]:
    """Both checks for a map-style dataset; an iterable one decides its own order and has none."""
    order = files.order(0, 1)
    if order is None:
        return []
    dataset = job.loader.dataset
    epoch = max(1, len(dataset) // job.workload.global_batch)
    batches = [batch for batch, _ in zip(order, range(min(epoch, len(order), MAX_ORDER_BATCHES)), strict=False)]
    state = _random_state()
    checks = [_check_order(job, len(dataset), batches), _check_content(job, dataset, batches[:NUM_CONTENT_BATCHES])]
    _restore(state)
    return checks


def _check_order(job: TrainingJob, length: int, batches: list[list[int]]) -> GuardCheck:
    workload: Any = _PlainWorkload(job.workload, list)
    loader = build_loader(workload, _Indices(length), job.plan.loader, batch_sampler=batches)
    given = list(loader)
    wrong = sum(1 for got, wanted in zip(given, batches, strict=False) if got != wanted) + abs(
        len(given) - len(batches)
    )
    return GuardCheck(
        name="order of samples",
        kind="loader",
        passed=wrong == 0,
        observed=float(wrong),
        tolerance=0.0,
        detail=f"{wrong} of {len(batches)} batches hold other samples",
    )


def _check_content(job: TrainingJob, dataset: Any, batches: list[list[int]]) -> GuardCheck:
    seeded = SeededByIndex(dataset)
    original = SeededByIndex(job.workload.dataset())
    collate = job.workload.collate or _default_collate()
    expected = [_digest(collate([original[index] for index in batch])) for batch in batches]
    repeated = [_digest(collate([original[index] for index in batch])) for batch in batches]
    workload: Any = _PlainWorkload(job.workload, collate)
    loader = build_loader(workload, seeded, job.plan.loader, batch_sampler=batches)
    found = [_digest(batch) for batch in loader]
    if expected != repeated:
        return GuardCheck(
            name="content of samples",
            kind="loader",
            passed=True,
            observed=0.0,
            tolerance=0.0,
            detail="the dataset draws from generators of its own; only the order could be checked",
        )
    wrong = sum(1 for got, wanted in zip(found, expected, strict=True) if got != wanted)
    return GuardCheck(
        name="content of samples",
        kind="loader",
        passed=wrong == 0,
        observed=float(wrong),
        tolerance=0.0,
        detail=f"{wrong} of {len(batches)} batches differ for the same indices and seeds",
    )


def _default_collate() -> Any:
    from torch.utils.data import default_collate

    return default_collate


def _digest(batch: Any) -> str:
    digest = hashlib.sha256()
    for leaf in leaves(batch):
        if hasattr(leaf, "detach"):
            leaf = leaf.detach().cpu().contiguous()
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            import torch

            digest.update(memoryview(leaf.reshape(-1).view(torch.uint8).numpy()) if leaf.numel() else b"")
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _random_state() -> Any:
    import numpy as np
    import torch

    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _restore(state: Any) -> None:
    import numpy as np
    import torch

    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])
