"""Calls of exported code in a training loop of another library, where PyTorch has no words for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

    from steptune.tuner.strategies.dataset_cache.strategy import CachedDataset


def cached(
    dataset: Dataset[Any],
    where: Literal["memory", "disk"] = "memory",
    *,
    directory: str | Path = "sample_cache",
    fill: bool = False,
) -> CachedDataset:
    """Keep decoded samples of a map-style dataset.

    What `dataset.load(index)` returns is stored, and `dataset.augment(sample)` is called every time. Of a dataset
    without them, what `dataset[index]` returns is stored, which must then be the same every time.

    Args:
        dataset: As the loader takes it.
        where: In memory, or as one file a sample.
        directory: Of the files.
        fill: Read all samples now: workers of a loader share what is in memory before they start.
    """
    from steptune.tuner.strategies.dataset_cache.strategy import CachedDataset

    made = CachedDataset(dataset, where, Path(directory))
    if fill:
        made.fill(range(len(made)))
    return made


def compile_blocks(model: torch.nn.Module, *, mode: str = "default", dynamic: bool | None = None) -> None:
    """Compile the repeated blocks of a model in place: the longest ModuleList or Sequential of one class."""
    from steptune.tuner.training.compilation import allow_recompilations, compile_in_place
    from steptune.tuner.workloads.blocks import longest_repetition

    blocks = longest_repetition(model)
    allow_recompilations(len(blocks))
    for block in blocks:
        compile_in_place(block, mode, dynamic)
