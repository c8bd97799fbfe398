"""Seeded random samples of a fixed shape: for timing a model without its data. Never zeros."""

from __future__ import annotations

from typing import Any

import torch


class RandomImages:
    """Images of standard normal pixels, with labels; sample i is the same every time."""

    def __init__(self, length: int, shape: tuple[int, int, int], num_classes: int) -> None:
        self._length = length
        self._shape = shape
        self._num_classes = num_classes

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(self._shape, generator=generator)
        return {"pixel_values": image, "labels": torch.randint(self._num_classes, (), generator=generator)}


class RandomTokens:
    """Sequences of uniform tokens; sample i is the same every time."""

    def __init__(self, length: int, sequence: int, vocabulary: int) -> None:
        self._length = length
        self._sequence = sequence
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(self._vocabulary, (self._sequence,), generator=generator)}
