"""Encodings of tensors in fewer bytes: two lossless ones for ReLU outputs, two lossy ones for any tensor.

An encoding keeps the order of the elements in memory, so that a decoded tensor has the strides of the encoded one and
the same kernels run on it. Shapes: `n` elements, `b` blocks.

Sources: Jain et al., "Gist: Efficient Data Encoding for Deep Neural Network Training" (ISCA 2018): Binarize, sparse
storage, delayed precision reduction; Chen et al., "ActNN" (2021), arXiv 2104.14129: a scale for each block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 256
"""Number of consecutive values that share one scale."""
LEVELS = 124
"""Number of int8 levels on either side of zero; zero itself is exact."""
INFINITE, NOT_A_NUMBER = 127, 126
"""Codes of infinity (negated for minus infinity) and of NaN."""
BLOCKS_AT_ONCE = 1 << 14
"""Number of blocks that are encoded at a time, so that the peak memory of encoding stays far below the memory that it
saves.
"""
WORTHWHILE = 0.75
"""Maximum size of a sparse encoding, as a share of the tensor's size, for which the encoding is worth its time."""


@dataclass(frozen=True)
class Layout:
    """Layout of a tensor's elements in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a flat (n,) tensor, whose elements are in memory order, in the original shape and strides."""
        return flat.as_strided(self.shape, self.strides)


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's elements fill one contiguous block of memory, whatever the order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor as (n,) in memory order, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


# --- bits ---------------------------------------------------------------------------------------


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack (n,) booleans into (ceil(n / 8),) bytes, the first in the lowest bit."""
    import torch

    padded = torch.nn.functional.pad(bits.view(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded << shifts).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Unpack the first `count` bits of a result of `pack_bits`."""
    import torch

    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts).bitwise_and_(1).view(-1)[:count].view(torch.bool)


# --- forms --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Whole:
    """The tensor itself, unencoded."""

    tensor: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def decode(self) -> torch.Tensor:
        return self.tensor


@dataclass(frozen=True, eq=False)
class Sparse:
    """Encoding as one bit for each element, and the nonzero values. Lossless, down to the sign of a zero.

    Attributes:
        bits: (ceil(n / 8),) bytes.
        values: Values whose bit is set.
    """

    layout: Layout
    bits: torch.Tensor
    values: torch.Tensor

    @classmethod
    def encode(cls, tensor: torch.Tensor) -> Sparse | Whole:
        """Encode a tensor, or keep it whole if it has too few zeros; counting the zeros waits for the device."""
        import torch

        flat = flattened(tensor)
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        present = flat.view(integers) != 0
        found = cls(Layout.of(tensor), pack_bits(present), flat[present])
        whole = Whole(tensor)
        return found if found.num_bytes <= WORTHWHILE * whole.num_bytes else whole

    @property
    def num_bytes(self) -> int:
        return self.bits.numel() + self.values.numel() * self.values.element_size()

    def decode(self) -> torch.Tensor:
        count = math.prod(self.layout.shape)
        flat = self.values.new_zeros(count)
        flat.masked_scatter_(unpack_bits(self.bits, count), self.values)
        return self.layout.shaped(flat)


@dataclass(frozen=True, eq=False)
class Half:
    """Encoding as bfloat16, which has the range of float32: no value overflows. Relative error at most 2⁻⁸."""

    layout: Layout
    values: torch.Tensor

    @classmethod
    def encode(cls, tensor: torch.Tensor) -> Half:
        import torch

        return cls(Layout.of(tensor), flattened(tensor).to(torch.bfloat16))

    @property
    def num_bytes(self) -> int:
        return 2 * self.values.numel()

    def decode(self) -> torch.Tensor:
        return self.layout.shaped(self.values.to(self.layout.dtype))


@dataclass(frozen=True, eq=False)
class Blocks:
    """Encoding as int8 with a float32 scale for each block of 256 values; error at most the block's largest finite
    value / 248.

    Zero stays zero and infinite stays infinite, so masks and padding stay what they are (attention on CUDA pads what it
    keeps with infinities), and NaN stays NaN.

    Attributes:
        values: (b, 256) int8.
        scales: (b, 1) float32.
    """

    layout: Layout
    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def encode(cls, tensor: torch.Tensor) -> Blocks:
        import torch

        flat = flattened(tensor)
        count = math.ceil(flat.numel() / BLOCK)
        values = torch.empty(count, BLOCK, dtype=torch.int8, device=tensor.device)
        scales = torch.empty(count, 1, dtype=torch.float32, device=tensor.device)
        for first in range(0, count, BLOCKS_AT_ONCE):
            blocks = _blocks(flat[first * BLOCK : (first + BLOCKS_AT_ONCE) * BLOCK])
            rows = slice(first, first + BLOCKS_AT_ONCE)
            finite = blocks.isfinite()
            largest = torch.where(finite, blocks.abs(), 0.0).amax(dim=1, keepdim=True)
            scales[rows] = largest / LEVELS
            steps = (blocks / torch.where(largest == 0, 1.0, scales[rows])).round_().clamp_(-LEVELS, LEVELS)
            odd = torch.where(blocks.isnan(), NOT_A_NUMBER, torch.where(blocks > 0, INFINITE, -INFINITE))
            values[rows] = torch.where(finite, steps, odd).to(torch.int8)
        return cls(Layout.of(tensor), values, scales)

    @property
    def num_bytes(self) -> int:
        return self.values.numel() + 4 * self.scales.numel()

    def decode(self) -> torch.Tensor:
        numbers = self.values * self.scales
        numbers.masked_fill_(self.values == INFINITE, math.inf).masked_fill_(self.values == -INFINITE, -math.inf)
        numbers.masked_fill_(self.values == NOT_A_NUMBER, math.nan)
        return self.layout.shaped(numbers.view(-1)[: math.prod(self.layout.shape)].to(self.layout.dtype))


def _blocks(flat: torch.Tensor) -> torch.Tensor:
    """Return (n,) values as (ceil(n / 256), 256) float32 blocks, the last one padded with zeros."""
    import torch

    missing = -flat.numel() % BLOCK
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).float().view(-1, BLOCK)


Form = Whole | Sparse | Half | Blocks


def relu_mask(output: torch.Tensor) -> torch.Tensor:
    """Return packed bits (ceil(n / 8),), set where a ReLU passes the gradient on, also at NaN, as in
    `threshold_backward`.
    """
    return pack_bits(~(flattened(output) <= 0))


def masked(gradient: torch.Tensor, mask: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the gradient where a mask from `relu_mask` is set, and zero elsewhere."""
    import torch

    return torch.where(layout.shaped(unpack_bits(mask, gradient.numel())), gradient, 0.0)
