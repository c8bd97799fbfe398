"""LSTM language model: embedding, LSTM layers with dropout between them, and an output layer that shares the
embedding's weights.

Its state begins with zeros in every sequence. The recurrence makes many small operators one after another,
which libraries fuse for FP32 and 16 bits alike.

Sources: Zaremba et al., "Recurrent Neural Network Regularization" (2014), arXiv 1409.2329; Press and Wolf,
"Using the Output Embedding to Improve Language Models" (2017), arXiv 1608.05859.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from steptune.tuner.workloads.adapters.random_data import RandomTokens
from steptune.tuner.workloads.workload import NamedParameters, Workload

_DATASET_LENGTH = 65536


class Lstm(nn.Module):
    """LSTM whose forward pass maps tokens (batch, sequence) to logits (batch, sequence, vocabulary)."""

    def __init__(self, vocabulary: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            x = self.dropout(layer(x)[0])
        logits: torch.Tensor = self.head(x)
        return logits


class LstmLanguageModel(Workload):
    """Training of an LSTM to predict the next token.

    Args:
        batch: Sequences of a step.
        sequence: Tokens of each.
        vocabulary: Number of tokens; the default is WikiText-2's.
        dropout: Dropout probability for the embedding and the layers' outputs.
    """

    sample_unit = "token"
    max_grad_norm = 0.25

    def __init__(
        self,
        batch: int = 64,
        sequence: int = 128,
        vocabulary: int = 33278,
        width: int = 1024,
        depth: int = 2,
        dropout: float = 0.2,
        lr: float = 1e-3,
    ) -> None:
        self.global_batch = batch
        self._sequence = sequence
        self._vocabulary = vocabulary
        self._shape = (width, depth, dropout)
        self._lr = lr

    def model(self) -> nn.Module:
        return Lstm(self._vocabulary, *self._shape)

    def dataset(self) -> Any:
        return RandomTokens(_DATASET_LENGTH, self._sequence + 1, self._vocabulary)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        tokens = batch["input_ids"]
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def optimizer(self, named_parameters: NamedParameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=self._lr)

    def num_units(self, batch: Any) -> int:
        tokens = batch["input_ids"]
        return int(tokens.shape[0] * (tokens.shape[1] - 1))
