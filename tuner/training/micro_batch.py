"""Division of a batch into micro-batches whose weighted losses sum to the loss of the whole batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.training.structure import map_structure
from steptune.tuner.workloads.workload import leaves

if TYPE_CHECKING:
    from steptune.tuner.workloads.workload import Workload


def batch_length(batch: Any) -> int | None:
    """Return the size of the first dimension, if all tensors of a batch share it, else None."""
    lengths = {int(leaf.shape[0]) if len(leaf.shape) else 0 for leaf in leaves(batch) if hasattr(leaf, "shape")}
    return lengths.pop() if len(lengths) == 1 and 0 not in lengths else None


def split_batch(workload: Workload, batch: Any, count: int) -> tuple[list[Any], list[float]]:
    """Cut a batch into micro-batches along the first dimension.

    Returns:
        `count` micro-batches, and their weights: the share of each in the batch's samples or tokens, so
        that the weighted sum of mean losses is the mean over the whole.

    Raises:
        WorkloadRejectedError: The tensors of the batch have no common first dimension.
    """
    length = batch_length(batch)
    if length is None or length < count:
        raise WorkloadRejectedError(
            f"a batch cannot be split into {count} micro-batches: its tensors need a common first dimension "
            f"of at least {count}"
        )
    return split_at(workload, batch, [length * number // count for number in range(count + 1)])


def split_at(workload: Workload, batch: Any, bounds: Sequence[int]) -> tuple[list[Any], list[float]]:
    """Return the parts of a batch between the given bounds along its first dimension, and their weights, as
    `split_batch` does.

    Lists and tuples with one string or object per sample are cut too: torch's `default_collate` makes them of strings.
    """
    length = batch_length(batch)

    def is_column(value: Any) -> bool:
        plain = isinstance(value, list | tuple) and not hasattr(value, "_fields") and len(value) == length
        return plain and not any(hasattr(leaf, "shape") for leaf in leaves(value))

    def piece(start: int, end: int) -> Any:
        def cut(leaf: Any) -> Any:
            return leaf[start:end] if hasattr(leaf, "shape") or is_column(leaf) else leaf

        return map_structure(cut, batch, is_column)

    pieces = [piece(start, end) for start, end in itertools.pairwise(bounds)]
    units = [workload.num_units(piece) for piece in pieces]
    total = sum(units) or 1
    return pieces, [number / total for number in units]
