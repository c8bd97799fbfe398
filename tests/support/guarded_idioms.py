"""Three loops in idioms of their own, each with faults and correct changes that were written before any was tried.

A contrastive training has a second encoder, an average of the first, and a queue of its keys. A variational autoencoder
has two parameter groups, noise of its own and a weight that rises by the step. A recurrent language model carries its
state from step to step, ties its weights and follows a schedule.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from steptune.tuner.scripts.agent.changes import Changes
from steptune.tuner.scripts.agent.guard_watch import GuardWatch


@dataclass(frozen=True)
class Idiom:
    """Loop that trains in one idiom.

    Attributes:
        twist: Name of the one thing that is other than today; empty where nothing is.
        dtype: Dtype of autocast around the forward pass, as a trial sets it; None without.
    """

    twist: str = ""
    dtype: torch.dtype | None = None
    faults: ClassVar[tuple[str, ...]] = ()
    same: ClassVar[tuple[str, ...]] = ()
    models: ClassVar[tuple[str, ...]] = ()

    def has(self, twist: str) -> bool:
        assert twist in (*self.faults, *self.same)
        return self.twist == twist

    def run(self, guard: GuardWatch) -> None:
        torch.manual_seed(3)
        wanted = {} if self.dtype is None else {"autocast": str(self.dtype).removeprefix("torch.")}
        self._train(guard, Changes(wanted, None, "", (0,), self.models), _Batches(guard))

    def _train(self, guard: GuardWatch, changes: Changes, batches: _Batches) -> None:
        raise NotImplementedError

    def _implementation(self) -> dict[str, bool]:
        found = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
        return found.get(self.twist, {})


class _Batches:
    """Batches of random numbers, which the guard sees like those of a loader."""

    def __init__(self, guard: GuardWatch) -> None:
        self._guard, self._generator = guard, torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while not self._guard.over:
            yield self._guard.fed(torch.randn(24, 16, generator=self._generator))


def _backward(guard: GuardWatch, *losses: torch.Tensor) -> None:
    guard.loss(losses[0] if len(losses) == 1 else sum(losses))
    torch.autograd.backward(losses)


class Encoder(nn.Sequential):
    """Small encoder with a layer norm."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 12))


class Contrast(Idiom):
    """Contrastive training with a momentum encoder and a queue of keys."""

    models = ("Encoder",)
    faults = ("momentum", "temperature", "stale queue", "keys of one view", "margin")
    same = ("fused", "foreach", "average by two calls", "logits by einsum", "cleared to zeros")

    def _train(self, guard: GuardWatch, changes: Changes, batches: _Batches) -> None:
        encoder = Encoder()
        slow = copy.deepcopy(encoder).requires_grad_(False)
        queue = functional.normalize(torch.randn(64, 12), dim=1)
        optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3, **self._implementation())
        guard.made_optimizer(optimizer, 0)
        for batch in batches:
            view, other = batch + 0.1 * torch.randn_like(batch), batch + 0.1 * torch.randn_like(batch)
            guard.called(encoder)
            changes.module(encoder)
            query = functional.normalize(encoder(view), dim=1)
            with torch.no_grad():
                key = functional.normalize(slow(view if self.has("keys of one view") else other), dim=1)
            loss = self._loss(query, key, queue)
            optimizer.zero_grad(set_to_none=not self.has("cleared to zeros"))
            _backward(guard, loss)
            optimizer.step()
            guard.step_ended(None)
            share = 0.02 if self.has("momentum") else 0.01
            with torch.no_grad():
                for ours, theirs in zip(slow.parameters(), encoder.parameters(), strict=True):
                    if self.has("average by two calls"):
                        ours.mul_(1 - share).add_(theirs, alpha=share)
                    else:
                        ours.lerp_(theirs, share)
            if not self.has("stale queue"):
                queue = torch.cat([queue[len(key) :], key])

    def _loss(self, query: torch.Tensor, key: torch.Tensor, queue: torch.Tensor) -> torch.Tensor:
        positive = (query * key).sum(1, keepdim=True)
        if self.has("margin"):
            positive = positive - 0.01
        negative = torch.einsum("nc,kc->nk", query, queue) if self.has("logits by einsum") else query @ queue.T
        logits = torch.cat([positive, negative], dim=1) / (0.202 if self.has("temperature") else 0.2)
        return functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


class Coder(nn.Module):
    """Small variational autoencoder."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 40), nn.SiLU(), nn.Linear(40, 12))
        self.decoder = nn.Sequential(nn.Linear(6, 40), nn.SiLU(), nn.Linear(40, 16))
        self.noise = noise

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encoder(inputs).chunk(2, dim=1)
        drawn = self.noise * torch.randn(mean.shape)
        return self.decoder(mean + drawn * torch.exp(log_variance / 2)), mean, log_variance


class Variation(Idiom):
    """Variational autoencoder with two rates, clipped elements and a rising weight of the divergence."""

    models = ("Coder",)
    faults = ("rate of a group", "second beta", "elements not clipped", "weight a step ahead", "noise")
    same = ("fused", "loop", "two losses in one backward", "square by product", "cleared after the step")

    def _train(self, guard: GuardWatch, changes: Changes, batches: _Batches) -> None:
        model = Coder(1.02 if self.has("noise") else 1.0)
        groups = [
            {"params": list(model.encoder.parameters()), "lr": 1e-3, "weight_decay": 0.1},
            {"params": list(model.decoder.parameters()), "lr": 3.1e-3 if self.has("rate of a group") else 3e-3},
        ]
        betas = (0.9, 0.998 if self.has("second beta") else 0.999)
        optimizer = torch.optim.AdamW(groups, betas=betas, **self._implementation())
        guard.made_optimizer(optimizer, 0)
        for number, batch in enumerate(batches):
            guard.called(model)
            changes.module(model)
            found, mean, log_variance = model(batch)
            apart = found - batch
            square = (apart * apart if self.has("square by product") else apart.square()).sum(1).mean()
            divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
            weight = 0.1 * (number + 1 + self.has("weight a step ahead"))
            if not self.has("cleared after the step"):
                optimizer.zero_grad()
            parts = square, weight * divergence
            _backward(guard, *(parts if self.has("two losses in one backward") else (sum(parts),)))
            if not self.has("elements not clipped"):
                nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            guard.step_ended(None)
            if self.has("cleared after the step"):
                optimizer.zero_grad()


class Reader(nn.Module):
    """Small recurrent language model with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(50, 24), nn.GRU(24, 24, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(50))

    def forward(self, tokens: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, state = self.cell(self.embedding(tokens), state)
        return hidden @ self.embedding.weight.T + self.bias, state


class Carried(Idiom):
    """Recurrent language model whose state goes on from step to step."""

    models = ("Reader",)
    faults = ("state begins anew", "smoothing", "no Nesterov", "bound of clipping", "schedule before the step")
    same = ("fused", "foreach", "loss from logarithms", "cleared to zeros", "state cloned")

    def _train(self, guard: GuardWatch, changes: Changes, batches: _Batches) -> None:
        model = Reader()
        nesterov = not self.has("no Nesterov")
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.5, momentum=0.9, nesterov=nesterov, **self._implementation()
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
        guard.made_optimizer(optimizer, 0)
        state = torch.zeros(1, 24, 24)
        for batch in batches:
            tokens = (batch.abs() * 20).long() % 50
            guard.called(model)
            changes.module(model)
            given = torch.zeros_like(state) if self.has("state begins anew") else state.detach()
            logits, state = model(tokens[:, :-1], given.clone() if self.has("state cloned") else given)
            loss = self._loss(logits.reshape(-1, 50), tokens[:, 1:].reshape(-1))
            optimizer.zero_grad(set_to_none=not self.has("cleared to zeros"))
            _backward(guard, loss)
            nn.utils.clip_grad_norm_(model.parameters(), 0.26 if self.has("bound of clipping") else 0.25)
            if self.has("schedule before the step"):
                schedule.step()
            optimizer.step()
            guard.step_ended(None)
            if not self.has("schedule before the step"):
                schedule.step()

    def _loss(self, logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        smoothing = 0.105 if self.has("smoothing") else 0.1
        if self.has("loss from logarithms"):
            logs = functional.log_softmax(logits, dim=1)
            return (1 - smoothing) * functional.nll_loss(logs, wanted) - smoothing * logs.mean()
        return functional.cross_entropy(logits, wanted, label_smoothing=smoothing)


IDIOMS: tuple[type[Idiom], ...] = (Contrast, Variation, Carried)
