"""Workloads whose step cannot be recorded as a CUDA graph, each for a reason of its own; all of them train."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import steptune


class Plain(steptune.Workload):
    """Can be recorded."""

    global_batch = 8

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def dataset(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(4, (64,), generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return self.changed(F.cross_entropy(model(inputs), labels))

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


class Reads(Plain):
    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * (2.0 if loss.item() > 1e9 else 1.0)


class Branches(Plain):
    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        if loss > 1e9:
            return loss * 2
        return loss


class Shapes(Plain):
    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        kept = loss.reshape(1)[loss.reshape(1) > -1]
        return kept.sum()


class Copies(Plain):
    """A tensor is made on the host in every step."""

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * torch.tensor([1.0], device=loss.device).sum()


class Synchronises(Plain):
    """Waits in a way that torch does not notice before a graph is recorded."""

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        if loss.device.type == "cuda":
            torch.cuda.synchronize()
        return loss


class Seeds(Plain):
    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        if loss.device.type == "cuda":
            torch.cuda.manual_seed(17)
        return loss


class Counts(Plain):
    """Computes with a number of Python's that is another one in every step: compiled again and again."""

    def model(self) -> nn.Module:
        return Counting()


class Counting(nn.Module):
    """A bare product, so that compiling it again generates no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4, bias=False)
        self.num_steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        if self.num_steps < 0:
            return x
        return self.linear(x)
