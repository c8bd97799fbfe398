"""Amount of work of one operator call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from steptune.tuner.profiling.argument_shapes import Arguments, Shape, Tensor


@dataclass(frozen=True)
class Work:
    """FLOP and bytes of one call. None if the shapes do not determine them.

    Attributes:
        flops: FLOP as `torch.utils.flop_counter` counts them: a multiply-add is two, causal attention counts in full.
        num_bytes: Compulsory traffic: every input read once, every output written once.
        least_flops: FLOP that cannot be left out: half for causal attention; None: all of `flops`.
        dtype: Dtype of the factors, as in `c10::ScalarType`, in lower case.
    """

    flops: int | None = None
    num_bytes: int | None = None
    least_flops: int | None = field(default=None, compare=False)
    dtype: str = field(default="", compare=False)

    @property
    def needed_flops(self) -> int | None:
        return self.flops if self.least_flops is None else self.least_flops


def names(text: str) -> frozenset[str]:
    """Return the set of words in a text."""
    return frozenset(text.split())


def item_bytes_of(tensors: Sequence[Tensor | None]) -> int:
    """Return the bytes per element of the first tensor; 0 if unknown."""
    return next((tensor.item_bytes for tensor in tensors if tensor), 0)


def dtype_of(arguments: Arguments, position: int) -> str:
    """Return the dtype of the tensor at a position; empty if unknown."""
    tensor = arguments.tensors[position] if position < len(arguments.tensors) else None
    return tensor.dtype if tensor else ""


def traffic(tensors: Sequence[Tensor | None], *outputs: Shape) -> int | None:
    """Return the bytes of all inputs, and of outputs with the first input's dtype."""
    present = [tensor for tensor in tensors if tensor]
    size = item_bytes_of(present)
    if not size or not all(tensor.item_bytes for tensor in present):
        return None
    return sum(tensor.num_bytes for tensor in present) + sum(map(math.prod, outputs)) * size
