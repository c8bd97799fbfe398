"""Mixture-of-experts layer: a router sends each token to one or two feed-forward networks.

    probabilities = softmax(router(x)), in FP32
    top-1 (Switch):  y = p_1 E_1(x)
    top-2 (GShard):  y = (p_1 E_1(x) + p_2 E_2(x)) / (p_1 + p_2)

An expert takes at most `capacity` tokens, first choices before second ones, in the order of the tokens.
A choice whose expert is full is dropped: it adds nothing, and the residual connection around the layer
carries the token. GShard's random dispatch of second choices is left out.

Experts run "looped", one after the other on the tokens they have (dynamic shapes: the device is waited
for), or "batched", all at once on tokens scattered into (experts, capacity, width) slots (static shapes,
and matmuls over empty slots). Both compute the same.

Sources: Lepikhin et al., "GShard" (2020), arXiv 2006.16668; Fedus et al., "Switch Transformers" (2021),
arXiv 2101.03961.

Shapes: T tokens, D width, E experts, K choices of a token, C capacity, F inner width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Routing:
    """Assignment of tokens to experts.

    Attributes:
        weights: (T, K), weights of the experts' outputs; FP32.
        experts: (T, K), numbers of the chosen experts.
        positions: (T, K), places within the experts.
        kept: (T, K), whether there was room.
        balance: The auxiliary loss.
    """

    weights: torch.Tensor
    experts: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    balance: torch.Tensor


def capacity_of(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Return an expert's capacity in tokens: its even share of the routed tokens, times the capacity factor."""
    return max(1, math.ceil(top_k * num_tokens / num_experts * factor))


def route(logits: torch.Tensor, top_k: int, capacity: int) -> Routing:
    """Assign tokens to experts by the router's logits.

    Args:
        logits: (T, E), FP32.
    """
    probabilities = logits.softmax(dim=-1)
    weights, experts = probabilities.topk(top_k, dim=-1)
    if top_k > 1:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    positions = _positions(experts, logits.shape[1])
    return Routing(weights, experts, positions, positions < capacity, balance_loss(probabilities, experts[:, 0]))


def _positions(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return, for each choice (T, K), the number of earlier choices of the same expert."""
    num_tokens, top_k = experts.shape
    in_order = experts.t().reshape(-1)  # all first choices, then all second ones
    chosen = F.one_hot(in_order, num_experts)
    before = (chosen.cumsum(dim=0) - chosen).gather(1, in_order[:, None]).squeeze(1)
    return before.view(top_k, num_tokens).t()


def balance_loss(probabilities: torch.Tensor, first_choice: torch.Tensor) -> torch.Tensor:
    """Return E times the sum over experts of (share of tokens with this expert as first choice) * (the expert's mean
    probability).

    1 where all experts are used alike (Switch, equation 4; GShard's is the same over E squared).
    """
    num_experts = probabilities.shape[1]
    shares = F.one_hot(first_choice, num_experts).to(probabilities.dtype).mean(dim=0)
    return num_experts * (shares * probabilities.mean(dim=0)).sum()


class Router(nn.Linear):
    """Router that computes the experts' logits, always in FP32 (Switch, section 2.4)."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__(width, num_experts, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())


class Experts(nn.Module):
    """E feed-forward networks of two layers with GELU."""

    def __init__(self, num_experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(num_experts, width, inner))
        self.down = nn.Parameter(torch.empty(num_experts, inner, width))
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all experts at once, (E, C, D) to (E, C, D)."""
        return torch.bmm(F.gelu(torch.bmm(x, self.up)), self.down)

    def one(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Apply one expert to its own tokens, (n, D) to (n, D)."""
        return F.gelu(x @ self.up[number]) @ self.down[number]


class ExpertLayer(nn.Module):
    """Mixture-of-experts layer: a router sends each token to one or two experts, which are feed-forward networks.

    Attributes:
        expert_implementation: "looped" or "batched".
        experts: Modules whose parameters all have the experts as their first dimension.
        exchange: Function that runs (E, C, D) slots where their experts are, on other ranks; None runs them here. With
            it, experts always run batched.
    """

    expert_implementations: ClassVar[tuple[str, ...]] = ("looped", "batched")

    def __init__(
        self, width: int, inner: int, num_experts: int, top_k: int, capacity_factor: float, implementation: str
    ) -> None:
        super().__init__()
        self.router = Router(width, num_experts)
        self.experts = Experts(num_experts, width, inner)
        self.expert_implementation = implementation
        self.exchange: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._num_experts = num_experts
        self._top_k = top_k
        self._capacity_factor = capacity_factor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return outputs of tokens (batch, sequence, D), the auxiliary loss, and the number of dropped choices."""
        tokens = x.flatten(0, 1)
        capacity = capacity_of(len(tokens), self._num_experts, self._top_k, self._capacity_factor)
        routing = route(self.router(tokens), self._top_k, capacity)
        in_slots = self.exchange is not None or self.expert_implementation == "batched"
        run = self._batched if in_slots else self._looped
        out = run(tokens, routing, capacity)
        return out.view(x.shape), routing.balance, (~routing.kept).sum()

    def _batched(self, tokens: torch.Tensor, routing: Routing, capacity: int) -> torch.Tensor:
        """Run all experts at once. Every kept choice has its own slot; dropped choices share one further slot, which is
        ignored.
        """
        spare = self._num_experts * capacity
        slots = torch.where(routing.kept, routing.experts * capacity + routing.positions, spare)
        buffer = tokens.new_zeros(spare + 1, tokens.shape[1])
        for choice in range(self._top_k):
            buffer = buffer.index_copy(0, slots[:, choice], tokens)
        slots_of_experts = buffer[:spare].view(self._num_experts, capacity, -1)
        done = (self.exchange or self.experts)(slots_of_experts).flatten(0, 1)
        weights = torch.where(routing.kept, routing.weights, 0.0)
        picked = done[slots.clamp(max=spare - 1)]
        out: torch.Tensor = (picked * weights[..., None].to(picked.dtype)).sum(dim=1)
        return out.to(tokens.dtype)

    def _looped(self, tokens: torch.Tensor, routing: Routing, capacity: int) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for number in range(self._num_experts):
            mine = (routing.experts == number) & routing.kept
            token, choice = mine.nonzero(as_tuple=True)
            done = self.experts.one(number, tokens[token])
            weighted = done * routing.weights[token, choice, None].to(done.dtype)
            out = out.index_add(0, token, weighted.to(out.dtype))
        return out
