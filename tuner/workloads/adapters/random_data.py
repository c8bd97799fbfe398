"""Seeded random samples, never zeros, of a fixed shape, for timing a model without its data.

They cost the host little, so that they do not limit the measured speed of the model, but they take the path of real
data: a DataLoader on the host collates them, and they are copied to the device. An image consists of bytes, as from a
decoder, and is a view into a pool of some hundred images; a batch costs one copy.
"""

from __future__ import annotations

import math
from typing import Any

import torch

POOL_SIZE = 512
"""Number of different images: at 224 pixels they take 77 MB, more than caches hold."""
MASKED_SHARE = 0.15
IGNORED = -100
"""Label that cross-entropy ignores."""
_BYTE_MEAN, _BYTE_DEVIATION = 127.5, 73.9


class RandomImages:
    """Images of uniform random bytes, with labels. Sample i is always the same, and equals sample i + POOL_SIZE."""

    def __init__(self, length: int, shape: tuple[int, int, int], num_classes: int, pool_size: int = POOL_SIZE) -> None:
        generator = torch.Generator().manual_seed(0)
        count = min(length, pool_size)
        self._length = length
        self._pool = random_bytes((count, *shape), generator)
        self._labels = torch.randint(num_classes, (count,), generator=generator)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        place = index % len(self._pool)
        return {"pixel_values": self._pool[place], "labels": self._labels[place]}


class RandomTokens:
    """Sequences of independent tokens with Zipf-like frequencies. Sample i is always the same."""

    def __init__(self, length: int, sequence: int, vocabulary: int) -> None:
        self._length = length
        self._sequence = sequence
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._tokens(torch.Generator().manual_seed(index))}

    def _tokens(self, generator: torch.Generator) -> torch.Tensor:
        """Draw token k with a probability proportional to log(1 + 1 / (k + 1))."""
        exponents = torch.rand(self._sequence, generator=generator) * math.log(self._vocabulary)
        return (exponents.exp_().long() - 1).clamp_(0, self._vocabulary - 1)


class MaskedTokens(RandomTokens):
    """Sequences of random tokens, 15 % of which are replaced by the vocabulary's last token and have labels.

    Every sample has the same number of labels, so that all micro-batches have the same weight.
    """

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        tokens = self._tokens(generator)
        chosen = torch.randperm(self._sequence, generator=generator)[: max(1, round(MASKED_SHARE * self._sequence))]
        labels = torch.full_like(tokens, IGNORED)
        labels[chosen] = tokens[chosen]
        tokens[chosen] = self._vocabulary - 1
        return {"input_ids": tokens, "labels": labels}


def random_bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return uniform random bytes, drawn eight at a time."""
    count = math.prod(shape)
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:count].view(shape)


def with_normal_pixels(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch with its bytes converted to FP32 pixels of mean 0 and variance 1, on the device."""
    pixels = batch["pixel_values"]
    if pixels.dtype != torch.uint8:
        return batch
    return {**batch, "pixel_values": pixels.float().sub_(_BYTE_MEAN).mul_(1 / _BYTE_DEVIATION)}
