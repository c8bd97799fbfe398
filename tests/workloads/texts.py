"""A classifier of sequences whose lengths vary: something for every strategy of the recipe."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

import steptune

VOCABULARY, CLASSES, WIDTH = 43, 5, 12


class Texts(torch.utils.data.Dataset):
    """Seeded sequences of 2 to 60 tokens; the class is the most frequent of the first five tokens of the vocabulary."""

    def __init__(self, num_samples: int) -> None:
        generator = random.Random(0)
        self.lengths = [min(60, 2 + int(generator.lognormvariate(2.2, 0.8))) for _ in range(num_samples)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        label = index % CLASSES
        tokens = torch.randint(CLASSES, VOCABULARY, (self.lengths[index],), generator=generator)
        tokens[0] = label
        return tokens, label


class Reader(nn.Module):
    """The mean of the tokens' embeddings through two layers of odd sizes; padding is -1."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 21)
        self.head = nn.Linear(21, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = (tokens >= 0).unsqueeze(-1)
        embedded = self.embedding(tokens.clamp(min=0)) * mask
        return self.head(torch.tanh(self.up(embedded.sum(1) / mask.sum(1))))


class Reading(steptune.Workload):
    """Batches padded to their longest text. The rate is below AdamW's best: others at theirs train as far."""

    global_batch = 8
    max_global_batch = 32
    sample_unit = "token"
    learning_rates: ClassVar[dict[str, float]] = {"adafactor": 0.1, "sm3": 0.3, "lamb": 0.04}

    def __init__(self, num_samples: int = 512, rate: float = 0.02) -> None:
        self._num_samples = num_samples
        self._rate = rate

    def model(self) -> nn.Module:
        return Reader()

    def dataset(self) -> Any:
        return Texts(self._num_samples)

    def collate(self, samples: list[Any]) -> Any:
        tokens = nn.utils.rnn.pad_sequence([t for t, _ in samples], batch_first=True, padding_value=-1)
        return tokens, torch.tensor([label for _, label in samples])

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        tokens, labels = batch
        return F.cross_entropy(model(tokens), labels)

    def num_units(self, batch: Any) -> int:
        return int((batch[0] >= 0).sum())

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named_parameters], lr=self._rate)
