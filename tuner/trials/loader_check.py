"""The guard's check of the input: the same indices over an epoch, and the same tensors for each index.

Loader settings cannot change the arithmetic of a step, but they can change what it is fed. The
order is checked over a whole epoch with a dataset that returns only its index; the content on a few
batches with every generator seeded by the index, so that random augmentation can be compared too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from steptune.tuner.records import GuardCheck, Scalar
from steptune.tuner.training.epochs_ahead import EpochsAhead
from steptune.tuner.training.generators import generator_states, set_generators
from steptune.tuner.training.loader import build_loader
from steptune.tuner.training.structure import moved
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.workloads.batches import seed_generators
from steptune.tuner.workloads.knobs import set_knobs
from steptune.tuner.workloads.workload import leaves

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.workloads.workload import Workload

NUM_CONTENT_BATCHES = 2
MAX_ORDER_BATCHES = 2000
CONVERSION_ROUNDOFFS = 64.0
"""Maximum deviation of a conversion, in machine epsilons of the dtype. A conversion takes a few operations, one of
which may subtract a mean about as large as the value.
"""


class _Indices:
    """Dataset that returns each index as its sample."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


class SeededByIndex:
    """Dataset that seeds torch's, NumPy's and Python's generators with the index before each sample."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        seed_generators(index)
        return self.dataset[index]


class _PlainWorkload:
    """Part of a workload that `build_loader` needs, with another collate function."""

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


def check_loader(
    job: TrainingJob, files: StudyFiles, seed: int, reference: Mapping[str, Scalar] | None = None
) -> list[GuardCheck]:
    """Check the order and the content of a map-style dataset's batches; return no check for an iterable one.

    Args:
        reference: The reference's values of knobs that must not change the batches.
    """
    order = files.order(0, 1)
    if order is None:
        return []
    dataset = job.loader.dataset
    epoch = max(1, len(dataset) // job.workload.global_batch)
    batches = [batch for batch, _ in zip(order, range(min(epoch, len(order), MAX_ORDER_BATCHES)), strict=False)]
    state = generator_states()
    few = batches[:NUM_CONTENT_BATCHES]
    checks = [_check_order(job, len(dataset), batches), _check_content(job, dataset, few, reference or {})]
    if job.plan.loader.as_bytes:
        checks.append(_check_bytes(job, few))
    set_generators(state)
    return checks


def _check_order(job: TrainingJob, length: int, batches: list[list[int]]) -> GuardCheck:
    workload: Any = _PlainWorkload(job.workload, list)
    loader = build_loader(workload, _Indices(length), job.plan.loader, batch_sampler=batches)
    ahead = isinstance(loader, EpochsAhead)
    given = [batch for _ in range(1 + ahead) for batch in loader]
    batches = batches * (1 + ahead)
    wrong = sum(1 for got, wanted in zip(given, batches, strict=False) if got != wanted) + abs(
        len(given) - len(batches)
    )
    return GuardCheck(
        name="order of samples",
        kind="loader",
        passed=wrong == 0,
        observed=float(wrong),
        tolerance=0.0,
        detail=f"{wrong} of {len(batches)} batches contain different samples",
    )


def _check_content(
    job: TrainingJob, dataset: Any, batches: list[list[int]], reference: Mapping[str, Scalar]
) -> GuardCheck:
    seeded = SeededByIndex(dataset)
    collate = job.workload.collate or _default_collate()
    with _knobs_at(job.workload, reference):
        original = SeededByIndex(_undisturbed(job))
        plain = [collate([original[index] for index in batch]) for batch in batches]
        expected = [_digest(batch) for batch in plain]
        units = [job.workload.num_units(batch) for batch in plain] if reference else []
        repeated = [_digest(collate([original[index] for index in batch])) for batch in batches]
    workload: Any = _PlainWorkload(job.workload, collate)
    loader = build_loader(workload, seeded, job.plan.loader, batch_sampler=batches)
    found = [_digest(batch) for batch in loader]
    if expected != repeated:
        return _content(0, "the dataset uses its own random generators, so only the order of samples could be checked")
    wrong = sum(1 for got, wanted in zip(found, expected, strict=True) if got != wanted)
    if not wrong and units and units != [job.workload.num_units(batch) for batch in plain]:
        return _content(math.inf, "num_units returns different counts for the same batches")
    return _content(wrong, f"{wrong} of {len(batches)} batches differ for the same indices and seeds")


def _content(wrong: float, detail: str) -> GuardCheck:
    return GuardCheck(
        name="content of samples",
        kind="loader",
        passed=wrong == 0,
        observed=float(wrong),
        tolerance=0.0,
        detail=detail,
    )


@contextmanager
def _knobs_at(workload: Workload, values: Mapping[str, Scalar]) -> Iterator[None]:
    now = {name: getattr(workload, name) for name in values}
    set_knobs(workload, values)
    try:
        yield
    finally:
        set_knobs(workload, now)


def _undisturbed(job: TrainingJob) -> Any:
    """Return the dataset that the job loads, without the wrappers of strategies."""
    dataset = job.workload.dataset()
    return job.workload.byte_dataset(dataset) if job.plan.loader.as_bytes else dataset


def _check_bytes(job: TrainingJob, batches: list[list[int]]) -> GuardCheck:
    """Check that batches converted on the device equal batches converted by the dataset, to within rounding."""
    collate = job.workload.collate or _default_collate()
    converted, whole = SeededByIndex(_undisturbed(job)), SeededByIndex(job.workload.dataset())
    furthest = 0.0
    for batch in batches:
        found = job.workload.from_bytes(moved(collate([converted[i] for i in batch]), job.device, non_blocking=False))
        furthest = max(furthest, _distance(found, collate([whole[i] for i in batch])))
    return GuardCheck(
        name="conversion from bytes",
        kind="loader",
        passed=furthest <= CONVERSION_ROUNDOFFS,
        observed=furthest,
        tolerance=CONVERSION_ROUNDOFFS,
        detail=""
        if furthest <= CONVERSION_ROUNDOFFS
        else "from_bytes returns values, shapes or types that differ from the dataset's",
    )


def _distance(found: Any, expected: Any) -> float:
    """Return the largest difference between two batches, in machine epsilons relative to each tensor's largest value;
    infinite if types differ.
    """
    import torch

    ours, theirs = list(leaves(found)), list(leaves(expected))
    if len(ours) != len(theirs):
        return math.inf
    furthest = 0.0
    for one, other in zip(ours, theirs, strict=True):
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            furthest = max(furthest, 0.0 if one == other else math.inf)
        elif one.dtype != other.dtype or one.shape != other.shape:
            return math.inf
        elif not other.is_floating_point():
            furthest = max(furthest, 0.0 if torch.equal(one.cpu(), other) else math.inf)
        elif other.numel():
            scale = float(other.abs().max()) * torch.finfo(other.dtype).eps
            apart = float((one.cpu().double() - other.double()).abs().max())
            furthest = max(furthest, apart / scale if scale else math.inf if apart else 0.0)
    return furthest


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
