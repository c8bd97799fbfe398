"""Twelve small trainings of different kinds, and what can be wrong with one, for tests and the guard's benchmarks.

Trainings and faults are in two halves: limits may be fitted on the first and are tried on the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, ClassVar

import torch
from guarded_updates import FAULTS as UPDATE_FAULTS
from guarded_updates import WARM_UP, Updated
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

NUM_SAMPLES = 64
NUM_TOKENS, LENGTH = 24, 12
NUM_CLASSES = 4


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in FP32, or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class Training(Updated):
    """A subclass has a model, tensors, and a loss of its own.

    Attributes:
        routes: Whether the model decides discretely where values go.
    """

    global_batch = 8
    max_grad_norm = 1.0
    routes: ClassVar[bool] = False
    kind = torch.optim.AdamW
    options: ClassVar[dict[str, Any]] = {"lr": 2e-3, "weight_decay": 0.05}

    def tensors(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Tensors that the data set consists of."""
        labels = torch.arange(NUM_SAMPLES) % NUM_CLASSES
        samples = torch.randn(NUM_SAMPLES, 16, generator=generator) + 2 * functional.one_hot(labels, 16)
        return samples, labels

    def dataset(self) -> Any:
        return TensorDataset(*self.tensors(torch.Generator().manual_seed(5)))

    def criterion(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, labels)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        samples, labels = batch
        return self.criterion(model(samples), labels)


class Perceptron(Training):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(16, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, NUM_CLASSES)
        )


class Convolutional(Training):
    """Batch normalisation, SGD with momentum, no clipping."""

    max_grad_norm = None
    kind = torch.optim.SGD
    options: ClassVar = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, NUM_CLASSES),
        )

    def tensors(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        labels = torch.arange(NUM_SAMPLES) % NUM_CLASSES
        images = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=generator)
        return images + labels[:, None, None, None] * 0.4, labels


class Block(nn.Module):
    """Transformer block, whose attention and feed-forward are left out at random as a whole where `depth` says so."""

    def __init__(self, width: int, dropout: float = 0.0, depth: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.depth = depth
        self.temper = 1.0

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) * (self.temper / math.sqrt(q.shape[-1]))
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        x = x + self._kept(self.dropout(self.out(scores.softmax(-1) @ v)))
        return x + self._kept(self.dropout(self.down(functional.gelu(self.up(self.second(x))))))

    def _kept(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.depth:
            return x
        keep = torch.rand(x.shape[0], 1, 1, device=x.device) >= self.depth
        return x * keep / (1 - self.depth)


class Tokens(nn.Module):
    """A language model of two blocks."""

    def __init__(self, width: int = 32, dropout: float = 0.0, *, causal: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(NUM_TOKENS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_TOKENS, bias=False)
        self.causal = causal

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril() if self.causal else None
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Causal(Training):
    """A warm-up, dropout."""

    warm_up = True
    dropout = 0.1

    def model(self) -> nn.Module:
        return Tokens(dropout=self.dropout)

    def tensors(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        starts = torch.randint(NUM_TOKENS, (NUM_SAMPLES, 1), generator=generator)
        tokens = (starts + 3 * torch.arange(LENGTH + 1)) % NUM_TOKENS
        noise = torch.rand(tokens.shape, generator=generator) < 0.1
        tokens = torch.where(noise, torch.randint(NUM_TOKENS, tokens.shape, generator=generator), tokens)
        return tokens[:, :-1], tokens[:, 1:]

    def criterion(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-1)


class WideCausal(Causal):
    """Tensors of hundreds of thousands of elements."""

    dropout = 0.0
    options: ClassVar = {"lr": 5e-4, "weight_decay": 0.05}

    def model(self) -> nn.Module:
        return Tokens(256)


class Masked(Causal):
    """Only masked tokens are predicted, and samples have other numbers of them: the loss is a mean over these."""

    warm_up = False
    dropout = 0.0
    sample_unit = "token"

    def model(self) -> nn.Module:
        return Tokens(causal=False)

    def tensors(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        tokens, _ = super().tensors(generator)
        share = torch.rand(NUM_SAMPLES, 1, generator=generator) * 0.7 + 0.05
        masked = torch.rand(tokens.shape, generator=generator) < share
        masked[:, 0] = True
        return torch.where(masked, 0, tokens), torch.where(masked, tokens, -1)

    def num_units(self, batch: Any) -> int:
        return int((batch[1] >= 0).sum())


class MaskedBySamples(Masked):
    """Which says nothing of its tokens: micro-batches are weighted by their samples, and that is wrong."""

    sample_unit = "sample"

    def num_units(self, batch: Any) -> int:
        return len(batch[0])


class Patches(Training):
    """A transformer over patches of images, with stochastic depth."""

    warm_up = True

    def model(self) -> nn.Module:
        class Vision(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.patches = nn.Conv2d(3, 24, 4, stride=4)
                self.places = nn.Parameter(0.02 * torch.randn(4, 24))
                self.blocks = nn.ModuleList(Block(24, depth=0.2 * (k + 1)) for k in range(2))
                self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, NUM_CLASSES)

            def forward(self, images: torch.Tensor) -> torch.Tensor:
                x = self.patches(images).flatten(2).transpose(1, 2) + self.places
                for block in self.blocks:
                    x = block(x)
                return self.head(self.norm(x).mean(1))  # type: ignore[no-any-return]

        return Vision()

    tensors = Convolutional.tensors


class Regression(Training):
    """A mean of squares and a penalty."""

    kind = torch.optim.Adam
    options: ClassVar = {"lr": 2e-3, "betas": (0.9, 0.99)}
    penalty = 0.02

    def model(self) -> nn.Module:
        class Curved(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.SiLU())
                self.head = nn.Linear(32, 3)

            def forward(self, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                hidden = self.body(samples)
                return self.head(hidden), hidden

        return Curved()

    def tensors(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        samples = torch.randn(NUM_SAMPLES, 16, generator=generator)
        return samples, torch.stack([samples[:, 0] * samples[:, 1], samples.sum(1).sin(), samples[:, 2]], dim=1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        samples, targets = batch
        output, hidden = model(samples)
        return functional.mse_loss(wide(output), targets) + self.penalty * wide(hidden).square().mean()


class Recurrent(Training):
    kind = torch.optim.RMSprop
    options: ClassVar = {"lr": 1e-3, "weight_decay": 1e-2, "momentum": 0.5}

    def model(self) -> nn.Module:
        class Reader(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.reader, self.head = nn.LSTM(6, 20, batch_first=True), nn.Linear(20, NUM_CLASSES)

            def forward(self, series: torch.Tensor) -> torch.Tensor:
                return self.head(self.reader(series)[0].mean(1))  # type: ignore[no-any-return]

        return Reader()

    def tensors(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        labels = torch.arange(NUM_SAMPLES) % NUM_CLASSES
        return torch.randn(NUM_SAMPLES, 8, 6, generator=generator) + 0.5 * labels[:, None, None], labels


class Autoencoder(Training):
    max_grad_norm = None
    kind = torch.optim.Adam
    options: ClassVar = {"lr": 2e-3}

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(8, 4, 3, padding=1),
            nn.Tanh(),
            nn.ConvTranspose2d(4, 8, 2, stride=2),
            nn.GELU(),
            nn.Conv2d(8, 3, 3, padding=1),
        )

    def tensors(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        images = torch.rand(NUM_SAMPLES, 3, 8, 8, generator=generator)
        return images, images.round()

    def criterion(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(wide(output), labels)


class Recommender(Training):
    kind = torch.optim.Adagrad
    options: ClassVar = {"lr": 0.02, "weight_decay": 1e-3}

    def model(self) -> nn.Module:
        class Factors(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.users, self.items = nn.Embedding(20, 12), nn.Embedding(30, 12)
                self.join = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1))

            def forward(self, pairs: torch.Tensor) -> torch.Tensor:
                user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
                return self.join(torch.cat([user, item], 1)).squeeze(1) + (user * item).sum(1)  # type: ignore[no-any-return]

        return Factors()

    def tensors(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        pairs = torch.stack([torch.randint(n, (NUM_SAMPLES,), generator=generator) for n in (20, 30)], dim=1)
        return pairs, (pairs.sum(1) % 3 == 0).float()

    def criterion(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(wide(output), labels)


class Contrastive(Training):
    """Samples of a batch are compared with one another."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        samples, labels = batch
        found = functional.normalize(wide(model(samples)), dim=1)
        near = labels[:, None] == labels[None]
        scores = (found @ found.T / 0.5).masked_fill(torch.eye(len(labels), dtype=torch.bool, device=labels.device), -9)
        return -(scores.log_softmax(1) * near).sum() / near.sum()


class Residual(Training):
    """Group normalisation, branches whose last scale begins at zero."""

    kind = torch.optim.NAdam
    options: ClassVar = {"lr": 2e-3, "weight_decay": 1e-2}

    def model(self) -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, NUM_CLASSES)
                self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
                self.norm, self.last = nn.GroupNorm(4, 16), nn.GroupNorm(4, 16)
                nn.init.zeros_(self.last.weight)

            def forward(self, images: torch.Tensor) -> torch.Tensor:
                x = self.stem(images)
                x = x + self.last(self.second(functional.silu(self.norm(self.first(x)))))
                return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]

        return Net()

    tensors = Convolutional.tensors


class Experts(Training):
    """One of four experts for each sample."""

    routes = True

    def model(self) -> nn.Module:
        class Mixture(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.router, self.head = nn.Linear(16, 24), nn.Linear(24, 4), nn.Linear(24, NUM_CLASSES)
                self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))

            def forward(self, samples: torch.Tensor) -> torch.Tensor:
                x = functional.relu(self.up(samples))
                odds = wide(self.router(x)).softmax(-1)
                best, chosen = odds.max(-1)
                routed = torch.stack([expert(x) for expert in self.experts], 1)
                picked = routed.gather(1, chosen[:, None, None].expand(-1, 1, routed.shape[-1])).squeeze(1)
                return self.head(x + functional.gelu(picked) * best[:, None].to(picked.dtype))  # type: ignore[no-any-return]

        return Mixture()


TRAININGS: tuple[type[Training], ...] = (
    Perceptron,
    Convolutional,
    Causal,
    Masked,
    Patches,
    Regression,
    Recurrent,
    Autoencoder,
    Recommender,
    Contrastive,
    Residual,
    Experts,
)
"""Those at even places are the first half."""


# --- faults -----------------------------------------------------------------------------------

Plant = Callable[[type[Training]], type[Training] | None]
"""Function that makes the faulty training of a training; None where it means nothing there."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that is wrong with a training.

    Attributes:
        part: "update", "gradient", "state", "masks".
    """

    name: str
    part: str
    plant: Plant


def _altered(training: type[Training], **attributes: Any) -> type[Training]:
    return type(f"Faulty{training.__name__}", (training,), attributes)


def of_loss(change: Callable[[Callable[..., torch.Tensor], nn.Module, Any], torch.Tensor]) -> Plant:
    """The loss is computed otherwise, of the same."""

    def plant(training: type[Training]) -> type[Training]:
        def loss(self: Training, model: nn.Module, batch: Any) -> torch.Tensor:
            return change(partial(training.loss, self), model, batch)

        return _altered(training, loss=loss)

    return plant


def of_model(change: Callable[[nn.Module], bool | None]) -> Plant:
    """The model computes otherwise; where `change` returns False, it has nothing to change."""

    def plant(training: type[Training]) -> type[Training] | None:
        if change(training().model()) is False:
            return None

        def model(self: Training) -> nn.Module:
            made = training.model(self)
            change(made)
            return made

        return _altered(training, model=model)

    return plant


def of_output(kinds: type[nn.Module] | tuple[type[nn.Module], ...], change: Callable[[Any], Any], place: int) -> Plant:
    """One module's output is changed."""

    def hook(model: nn.Module) -> bool:
        found = [module for module in model.modules() if isinstance(module, kinds)]
        if len(found) <= abs(place):
            return False
        found[place].register_forward_hook(lambda module, arguments, output: change(output))
        return True

    return of_model(hook)


def of_gradient(change: Callable[[torch.Tensor], torch.Tensor], place: int) -> Plant:
    """The gradient of one tensor is changed."""

    def hook(model: nn.Module) -> bool:
        list(model.parameters())[place].register_hook(change)
        return True

    return of_model(hook)


def _attributes(kinds: type[nn.Module] | tuple[type[nn.Module], ...], **changed: Any) -> Plant:
    def change(model: nn.Module) -> bool:
        found = [module for module in model.modules() if isinstance(module, kinds)]
        found = [module for module in found if all(getattr(module, name) != value for name, value in changed.items())]
        for module in found:
            for name, value in changed.items():
                setattr(module, name, value)
        return bool(found)

    return of_model(change)


def _scaled(factor: float) -> Plant:
    return of_loss(lambda loss, model, batch: loss(model, batch) * factor)


def _of_batch(change: Callable[[Any], Any]) -> Plant:
    return of_loss(lambda loss, model, batch: loss(model, change(batch)))


def _halves(loss: Callable[..., torch.Tensor], model: nn.Module, batch: Any) -> torch.Tensor:
    """Mean loss of both halves, as accumulation with equal weights has it."""
    middle = len(batch[0]) // 2
    return (loss(model, [x[:middle] for x in batch]) + loss(model, [x[middle:] for x in batch])) / 2


def _where(plant: Plant, *names: str) -> Plant:
    """Only where it means anything."""
    return lambda training: plant(training) if training.__name__ in names else None


def _frozen(model: nn.Module) -> bool:
    named = [p for p in model.parameters() if p.dim() > 1]
    named[len(named) // 2].requires_grad_(False)
    return True


def _previous(training: type[Training]) -> type[Training]:
    """A buffer is filled too late: every other step sees the batch before."""

    def loss(self: Any, model: nn.Module, batch: Any) -> torch.Tensor:
        seen = getattr(self, "_seen", batch)
        self._seen = batch
        return training.loss(self, model, seen)

    return _altered(training, loss=loss)


def _not_cleared(training: type[Training]) -> type[Training]:
    def optimizer(self: Training, named_parameters: Any) -> torch.optim.Optimizer:
        made = training.optimizer(self, named_parameters)
        made.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
        return made

    return _altered(training, optimizer=optimizer)


def _tenth_noise(gradient: torch.Tensor) -> torch.Tensor:
    wave = torch.arange(gradient.numel(), device=gradient.device).reshape(gradient.shape).mul(2.4).cos()
    return gradient * (1 + 0.2 * wave).to(gradient.dtype)


def _first_rows(gradient: torch.Tensor) -> torch.Tensor:
    kept = gradient.clone()
    kept[: max(1, len(kept) // 4)] = 0
    return kept


def _rolled(batch: Any) -> Any:
    return [batch[0], batch[1].roll(1, 0)]


def _quarter_lost(loss: Callable[..., torch.Tensor], model: nn.Module, batch: Any) -> torch.Tensor:
    return loss(model, [x[: len(x) - max(1, len(x) // 4)] for x in batch])


_ATTENDED = ("Causal", "Masked", "Patches")
_CLASSES = ("Perceptron", "Convolutional", "Patches", "Recurrent", "Residual", "Experts")
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d)
_PRODUCTS = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)


def _smoothed(loss: Any, model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def _weighted(loss: Any, model: nn.Module, batch: Any) -> torch.Tensor:
    output = wide(model(batch[0]))
    weights = torch.tensor([1.0, 1.0, 1.0, 2.0], device=output.device, dtype=output.dtype)
    return functional.cross_entropy(output, batch[1], weight=weights)


_GRADIENT: dict[str, Plant] = {
    "loss halved": _scaled(0.5),
    "loss 20 % larger": _scaled(1.2),
    "loss 5 % smaller": _scaled(0.95),
    "summed, not averaged": _scaled(8.0),
    "loss negated": _scaled(-1.0),
    "last sample left out": _of_batch(lambda batch: [x[:-1] for x in batch]),
    "a quarter of the batch left out": of_loss(_quarter_lost),
    "labels of the neighbour": _of_batch(_rolled),
    "labels of the next class": _where(_of_batch(lambda b: [b[0], (b[1] + 1) % NUM_CLASSES]), *_CLASSES),
    "labels shifted by one token": _where(_of_batch(lambda b: [b[0], b[1].roll(1, 1)]), "Causal", "Masked"),
    "halves weighted alike": _where(of_loss(_halves), "Masked", "Contrastive", "Convolutional"),
    "labels smoothed": _where(of_loss(_smoothed), *_CLASSES),
    "classes weighted": _where(of_loss(_weighted), *_CLASSES),
    "penalty left out": _where(lambda training: _altered(training, penalty=0.0), "Regression"),
    "penalty doubled": _where(lambda training: _altered(training, penalty=0.04), "Regression"),
    "first branch detached": of_output(_PRODUCTS, lambda output: output.detach(), 0),
    "a branch half detached": of_output(_PRODUCTS, lambda output: (output + output.detach()) / 2, 1),
    "last output detached by a tenth": of_output(_PRODUCTS, lambda y: 0.9 * y + 0.1 * y.detach(), -1),
    "output 5 % larger": of_output(_PRODUCTS, lambda output: output * 1.05, 1),
    "a norm's output detached": of_output(_NORMS, lambda output: output.detach(), 0),
    "a layer frozen": of_model(_frozen),
    "gradient of the first tensor halved": of_gradient(lambda gradient: gradient / 2, 0),
    "gradient of the last tensor doubled": of_gradient(lambda gradient: gradient * 2, -1),
    "gradient of one tensor 10 % larger": of_gradient(lambda gradient: gradient * 1.1, 2),
    "gradient of one tensor negated": of_gradient(lambda gradient: -gradient, 2),
    "gradient of one tensor lost": of_gradient(lambda gradient: gradient * 0, -2),
    "a quarter of a gradient lost": of_gradient(_first_rows, 0),
    "gradient of one tensor a fifth wrong": of_gradient(_tenth_noise, 0),
    "gradients of one tensor clamped": of_gradient(lambda g: g.clamp(-g.std(correction=0), g.std(correction=0)), 0),
    "batch of the step before": _previous,
    "gradients not cleared": _not_cleared,
    "no bias": of_model(
        lambda m: [p.register_hook(lambda g: g * 0) for name, p in m.named_parameters() if name.endswith("bias")] != []
    ),
    "epsilon of norms 0.1": _attributes(_NORMS, eps=0.1),
    "not causal": _attributes(Tokens, causal=False),
    "causal though it is not": _where(_attributes(Tokens, causal=True), "Masked"),
    "attention not scaled": _where(_attributes(Block, temper=5.0), *_ATTENDED),
    "attention scaled twice": _where(_attributes(Block, temper=0.2), *_ATTENDED),
    "padding counted as tokens": _where(_of_batch(lambda b: [b[0], b[1].clamp(min=0)]), "Masked"),
    "images not normalised": _where(
        _of_batch(lambda b: [b[0] * 1.5 + 0.2, b[1]]), "Convolutional", "Patches", "Residual", "Autoencoder"
    ),
    "inputs of four bits": _where(
        _of_batch(lambda b: [(b[0] * 2).round() / 2, b[1]]), *_CLASSES, "Regression", "Autoencoder", "Contrastive"
    ),
}
_STATE: dict[str, Plant] = {
    "statistics never updated": _attributes(nn.BatchNorm2d, momentum=0.0),
    "statistics updated twice as fast": _attributes(nn.BatchNorm2d, momentum=0.2),
    "statistics updated 10 % too fast": _attributes(nn.BatchNorm2d, momentum=0.11),
    "statistics averaged over all steps": _attributes(nn.BatchNorm2d, momentum=None),
}
_MASKS: dict[str, Plant] = {
    "dropout off": _where(lambda training: _altered(training, dropout=0.0), "Causal"),
    "dropout of a half": _where(lambda training: _altered(training, dropout=0.5), "Causal"),
    "dropout not rescaled": _where(of_output(nn.Dropout, lambda output: output * 0.9, 0), "Causal"),
    "stochastic depth off": _where(_attributes(Block, depth=0.0), "Patches"),
    "stochastic depth of a half": _where(_attributes(Block, depth=0.7), "Patches"),
}
_UPDATE: dict[str, Plant] = {
    **UPDATE_FAULTS,  # type: ignore[dict-item]
    "a layer left out": lambda training: _altered(training, left_out=_some_name(training, 0.5)),
    "a bias left out": lambda training: _altered(training, left_out=_some_name(training, 1.0)),
    "rate 10 % too low": lambda training: _altered(
        training, options={**training.options, "lr": 0.9 * training.options["lr"]}
    ),
    "rate doubled": lambda training: _altered(training, options={**training.options, "lr": 2 * training.options["lr"]}),
    "updated twice": lambda training: _twice(training),
    "updated every other step": lambda training: _seldom(training),
    "gradients averaged with the step before": lambda training: _smooth(training),
}


def _some_name(training: type[Training], place: float) -> str:
    names = [name for name, _ in training().model().named_parameters()]
    return names[int(place * (len(names) - 1))]


def _with_optimizer(training: type[Training], change: Callable[[torch.optim.Optimizer], None]) -> type[Training]:
    def optimizer(self: Training, named_parameters: Any) -> torch.optim.Optimizer:
        made = training.optimizer(self, named_parameters)
        change(made)
        return made

    return _altered(training, optimizer=optimizer)


def _twice(training: type[Training]) -> type[Training]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        once = optimizer.step

        def step(self: Any, closure: Any = None) -> Any:
            once()
            return once()

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    return _with_optimizer(training, change)


def _seldom(training: type[Training]) -> type[Training]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        once, count = optimizer.step, 0

        def step(self: Any, closure: Any = None) -> Any:
            nonlocal count
            count += 1
            return once() if count % 2 else None

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    return _with_optimizer(training, change)


def _smooth(training: type[Training]) -> type[Training]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        last: dict[Any, torch.Tensor] = {}

        def average(*_: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        now = parameter.grad.clone()
                        parameter.grad.add_(last.get(parameter, now)).div_(2)
                        last[parameter] = now

        optimizer.register_step_pre_hook(average)

    return _with_optimizer(training, change)


FAULTS: tuple[Fault, ...] = tuple(
    Fault(name=name, part=part, plant=plant)
    for part, plants in (("update", _UPDATE), ("gradient", _GRADIENT), ("state", _STATE), ("masks", _MASKS))
    for name, plant in plants.items()
)
"""Those at even places are the first half."""

__all__ = ["FAULTS", "TRAININGS", "WARM_UP", "Fault", "Training"]
