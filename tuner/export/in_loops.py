"""Functions that exported code calls in another library's training loop, because PyTorch has no equivalent."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from steptune.tuner.errors import ChoiceError
from steptune.tuner.training.epochs_ahead import EpochsAhead

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader, Dataset

    from steptune.tuner.strategies.dataset_cache.strategy import CachedDataset

_LOADER_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
"""Arguments of a DataLoader other than dataset and sampling."""


def cached(
    dataset: Dataset[Any],
    where: Literal["memory", "disk"] = "memory",
    *,
    directory: str | Path = "sample_cache",
    fill: bool = False,
) -> CachedDataset:
    """Return a map-style dataset that keeps decoded samples.

    What `dataset.load(index)` returns is stored, and `dataset.augment(sample)` is called every time. Of a dataset
    without them, what `dataset[index]` returns is stored, which must then be the same every time.

    Args:
        dataset: Dataset as the loader takes it.
        where: "memory", or "disk" for one file per sample.
        directory: Folder of the files. Each dataset has a subfolder, named by its number of samples and its first
            sample: a dataset that is read differently finds none of the old files.
        fill: Read all samples now, so that loader workers, which start later, share those in memory.

    Raises:
        ChoiceError: `where` has another value, or the dataset is not map-style.
    """
    from torch.utils.data import IterableDataset

    from steptune.tuner.strategies.dataset_cache.strategy import CachedDataset

    if where not in ("memory", "disk"):
        raise ChoiceError(f'`where` must be "memory" or "disk", got {where!r}')
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ChoiceError(
            f"a cache requires a map-style dataset with __getitem__ and __len__, got {type(dataset).__name__}: add "
            "both methods, or store decoded samples in the dataset's own files"
        )
    folder = Path(directory) / _fingerprint(dataset) if where == "disk" else Path(directory)
    made = CachedDataset(dataset, where, folder)
    if fill:
        made.fill(range(len(made)))
    return made


def epochs_ahead(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Change a loader in place so that its workers begin to load the next epoch before the current one ends.

    Samples and their order stay the same. Random augmentation in a worker may differ, as it does with another number of
    workers, where an epoch's batches are no multiple of the workers.

    Args:
        loader: DataLoader with persistent workers over a map-style dataset. With Accelerate, the loader that
            `prepare` returns.

    Returns:
        The loader.

    Raises:
        ChoiceError: The loader has no persistent workers, no batch sampler, another kind of dataset, or a class of
            its own.
    """
    from torch.utils.data import DataLoader, IterableDataset

    inner = getattr(loader, "base_dataloader", None)  # of a loader that Accelerate has prepared
    if inner is not None:
        epochs_ahead(inner)
        return loader
    if type(loader) is _ahead_class():
        return loader
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise ChoiceError(
            f"epochs_ahead requires a torch.utils.data.DataLoader with batches of a map-style dataset, got "
            f"{type(loader).__name__}: iterate the loader itself"
        )
    if not (loader.num_workers and loader.persistent_workers):
        raise ChoiceError(
            f"epochs_ahead requires workers that are kept, got num_workers={loader.num_workers}, persistent_workers="
            f"{loader.persistent_workers}: set persistent_workers=True and at least one worker"
        )
    loader.__class__ = _ahead_class()
    return loader


@functools.cache
def _ahead_class() -> type[DataLoader[Any]]:
    """Return the class of changed loaders. It is made of the same arguments as a DataLoader, by which Lightning makes a
    loader again for several ranks.
    """
    from torch.utils.data import DataLoader

    class AheadLoader(DataLoader[Any]):
        _ahead: EpochsAhead | None = None

        def __iter__(self) -> Any:
            if self._ahead is None:
                options = {name: getattr(self, name) for name in _LOADER_OPTIONS if hasattr(self, name)}
                # Not of this loader itself: in a cycle its workers would wait for Python to collect it.
                self._ahead = EpochsAhead(
                    DataLoader(self.dataset, batch_sampler=self.batch_sampler, **options), options
                )
            return iter(self._ahead)

        @property
        def _iterator(self) -> Any:
            """Iterator of the workers; a library that ends them sets it to None, and the next epoch begins anew."""
            return None if self._ahead is None else self._ahead.workers

        @_iterator.setter
        def _iterator(self, value: Any) -> None:
            self._ahead = None

        @property
        def num_restarts(self) -> int:
            """Number of epochs that began with idle workers."""
            return 0 if self._ahead is None else self._ahead.num_restarts

    return AheadLoader


def compile_blocks(model: torch.nn.Module, *, mode: str = "default", dynamic: bool | None = None) -> None:
    """Compile the repeated blocks of a model in place: the longest ModuleList or Sequential of one class.

    Raises:
        ChoiceError: The model repeats no block.
    """
    from steptune.tuner.training.compilation import allow_recompilations, compile_in_place
    from steptune.tuner.workloads.blocks import longest_repetition

    blocks = longest_repetition(model)
    if not blocks:
        raise ChoiceError(
            f"compile_blocks requires a ModuleList or Sequential of several blocks of one class, and "
            f"{type(model).__name__} has none: compile the whole model with torch.compile"
        )
    allow_recompilations(len(blocks))
    for block in blocks:
        compile_in_place(block, mode, dynamic)


def _fingerprint(dataset: Any) -> str:
    """Return a dataset's folder name in the cache, derived from its number of samples and the content of the first
    sample.
    """
    import torch

    from steptune.tuner.training.structure import flatten

    if not len(dataset):
        return "empty"
    first = dataset.load(0) if hasattr(dataset, "load") and hasattr(dataset, "augment") else dataset[0]
    tensors, description = flatten(first)
    found = hashlib.sha256(repr((len(dataset), description)).encode())
    for tensor in tensors.values():
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
