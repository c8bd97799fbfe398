"""Causal transformer whose feed-forward layers are mixtures of experts (see `experts`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.workloads.adapters.random_data import RandomTokens
from steptune.tuner.workloads.workload import NamedParameters, Workload
from steptune.tuner.workloads.zoo.experts import ExpertLayer

_DATASET_LENGTH = 65536


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model."""

    vocabulary: int
    sequence: int
    width: int
    depth: int
    num_heads: int
    num_experts: int
    top_k: int
    capacity_factor: float


class ExpertBlock(nn.Module):
    """Transformer block of pre-norm attention and experts, each with a residual connection."""

    def __init__(self, shape: Shape, implementation: str) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.projection = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.experts = ExpertLayer(
            shape.width, 4 * shape.width, shape.num_experts, shape.top_k, shape.capacity_factor, implementation
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, tokens, width))
        out, balance, num_dropped = self.experts(self.norm2(x))
        return x + out, balance, num_dropped


class ExpertTransformer(nn.Module):
    """Transformer that maps tokens (batch, sequence) to logits. It also returns the mean auxiliary loss, and the number
    of choices that were dropped because their expert was full.
    """

    def __init__(self, shape: Shape, implementation: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(ExpertBlock(shape, implementation) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        balances, dropped = [], []
        for block in self.blocks:
            x, balance, num_dropped = block(x)
            balances.append(balance)
            dropped.append(num_dropped)
        return self.head(self.norm(x)), torch.stack(balances).mean(), torch.stack(dropped).sum()


class MixtureOfExperts(Workload):
    """Training of a mixture-of-experts transformer to predict the next token.

    Args:
        top_k: 1 as in Switch, 2 as in GShard.
        capacity_factor: Capacity of an expert, as a multiple of its even share.
        balance: Weight of the auxiliary loss.
        experts: "looped" or "batched".
    """

    sample_unit = "token"
    max_grad_norm = 1.0

    def __init__(
        self,
        batch: int = 16,
        sequence: int = 512,
        vocabulary: int = 32000,
        width: int = 512,
        depth: int = 8,
        num_heads: int = 8,
        num_experts: int = 8,
        top_k: int = 2,
        capacity_factor: float = 1.25,
        balance: float = 0.01,
        experts: str = "looped",
        lr: float = 3e-4,
    ) -> None:
        if experts not in ExpertLayer.expert_implementations:
            raise WorkloadRejectedError(
                f"experts is {experts!r}: it must be one of {', '.join(ExpertLayer.expert_implementations)}"
            )
        if not 1 <= top_k <= min(2, num_experts):
            raise WorkloadRejectedError(
                f"top_k is {top_k}: it must be 1 (Switch) or 2 (GShard), and at most the number of experts"
            )
        self.global_batch = batch
        self._shape = Shape(
            vocabulary=vocabulary,
            sequence=sequence,
            width=width,
            depth=depth,
            num_heads=num_heads,
            num_experts=num_experts,
            top_k=top_k,
            capacity_factor=capacity_factor,
        )
        self._balance = balance
        self._experts = experts
        self._lr = lr

    def model(self) -> nn.Module:
        return ExpertTransformer(self._shape, self._experts)

    def dataset(self) -> Any:
        return RandomTokens(_DATASET_LENGTH, self._shape.sequence + 1, self._shape.vocabulary)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        tokens = batch["input_ids"]
        logits, balance, _ = model(tokens[:, :-1])
        entropy: torch.Tensor = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss: torch.Tensor = entropy + self._balance * balance
        return loss

    def optimizer(self, named_parameters: NamedParameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=self._lr)

    def num_units(self, batch: Any) -> int:
        tokens = batch["input_ids"]
        return int(tokens.shape[0] * (tokens.shape[1] - 1))
