"""Linear layers computed at padded sizes.

Tensor cores read aligned groups of 16-bit numbers: a matmul whose rows have an odd length runs on slower kernels, or
on a copy that the library makes. A padded layer computes with zeros up to the next multiple and returns the part that
was asked for, so that nothing after it sees the padding: a loss is of the user's vocabulary, and zeros enter no sum.

The parameters stay as they are, in shape, name and number: they are padded anew in every forward pass (one copy of
the weight), so that checkpoints, optimizers and tied embeddings notice nothing. Looking up an embedding gains nothing
from padding and is left alone; its tied output layer is padded.

Source: NVIDIA, "Matrix Multiplication Background User's Guide"
(https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

SMALL = 8
MOST_PADDING = 1 / 8
"""Maximum padding as a share of the size, for multiples above `SMALL`: 1,000 classes become 1,024, but 65 become 72 and
not 128.
"""


def padded_size(size: int, multiple: int) -> int:
    """Round a size up to the multiple, or to a multiple of `SMALL` where the padding would be too large a share."""
    wanted = -(-size // multiple) * multiple
    if multiple > SMALL and wanted - size > MOST_PADDING * size:
        return padded_size(size, SMALL)
    return wanted


class PaddedLinear(nn.Linear):
    """A linear layer of `in_features` to `out_features` that computes at padded sizes.

    Attributes:
        multiple: Number to a multiple of which sizes are rounded up; see `padded_size`.
    """

    multiple: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features), a view of a wider result."""
        columns = padded_size(self.in_features, self.multiple) - self.in_features
        rows = padded_size(self.out_features, self.multiple) - self.out_features
        weight = F.pad(self.weight, (0, columns, 0, rows))
        bias = F.pad(self.bias, (0, rows)) if self.bias is not None and rows else self.bias
        result = F.linear(F.pad(x, (0, columns)) if columns else x, weight, bias)
        return result[..., : self.out_features] if rows else result


def unaligned_linears(model: nn.Module, multiple: int) -> list[nn.Linear]:
    """Return the linear layers with sizes that would be padded; leave out subclasses, because their computation may
    differ.
    """
    return [module for module in model.modules() if type(module) is nn.Linear and _changes(module, multiple)]


def pad_linears(model: nn.Module, multiple: int) -> nn.Module:
    """Replace the class of every linear layer with unaligned sizes by a padded class, in place: modules and parameters
    remain the same objects.
    """
    for module in unaligned_linears(model, multiple):
        module.__class__ = PaddedLinear
        module.multiple = multiple  # type: ignore[assignment]
    return model


def _changes(module: nn.Linear, multiple: int) -> bool:
    sizes = (module.in_features, module.out_features)
    return any(padded_size(size, multiple) != size for size in sizes)
