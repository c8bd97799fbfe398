"""Trainings, faults and correct changes that are younger than all limits and rules of the guard: no fit has seen them.

Two towers that are compared with one another, a translator over packed sentences, a transducer that sums over
alignments, and a student of a teacher that is its average.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from guarded_trainings import (
    NUM_CLASSES,
    NUM_SAMPLES,
    NUM_TOKENS,
    Convolutional,
    Fault,
    Training,
    of_model,
    wide,
)
from torch import nn
from torch.nn import functional

LENGTH, PADDING = 12, 0
FRAMES, LABELS = 6, 3


class TwoTower(Training):
    """Pictures and words meet in one space, whose temperature is learned; the words' tower has a rate of its own."""

    options: ClassVar = {"lr": 1e-3, "weight_decay": 0.05}
    words_rate = 3e-3
    both_ways, learns_temperature, whole_batch, compares_by_norm = True, True, True, False

    def model(self) -> nn.Module:
        class Towers(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.pictures = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 12))
                self.words = nn.Sequential(nn.EmbeddingBag(NUM_TOKENS, 24), nn.SiLU(), nn.Linear(24, 12))
                self.temperature = nn.Parameter(torch.tensor(0.7))

            def forward(self, pictures: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                return self.pictures(pictures), self.words(words)

        return Towers()

    def tensors(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        words = torch.randint(NUM_TOKENS, (NUM_SAMPLES, 5), generator=generator)
        shown = functional.one_hot(words, NUM_TOKENS).sum(1).float() @ torch.randn(NUM_TOKENS, 16, generator=generator)
        return shown + 0.3 * torch.randn(shown.shape, generator=generator), words

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        named = list(named_parameters)
        words = [p for name, p in named if "words." in name]
        others = [p for name, p in named if "words." not in name]
        return self.kind([{"params": others}, {"params": words, "lr": self.words_rate}], **self.options)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        pictures, words = (self._unit(wide(found)) for found in model(*batch))
        temperature = wide(model.temperature if self.learns_temperature else model.temperature.detach()).exp()
        if not self.whole_batch:
            half = len(pictures) // 2
            return self._both(pictures[:half], words[:half], temperature) / 2 + (
                self._both(pictures[half:], words[half:], temperature) / 2
            )
        return self._both(pictures, words, temperature)

    def _unit(self, found: torch.Tensor) -> torch.Tensor:
        if self.compares_by_norm:
            return found * found.square().sum(1, keepdim=True).rsqrt()
        return functional.normalize(found, dim=1)

    def _both(self, pictures: torch.Tensor, words: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        scores, own = temperature * pictures @ words.T, torch.arange(len(words), device=words.device)
        first = functional.cross_entropy(scores, own)
        return (first + functional.cross_entropy(scores.T, own)) / 2 if self.both_ways else first


class Rotated(nn.Module):
    """Attention whose queries and keys are turned by their places."""

    def __init__(self, width: int, base: float, *, by_library: bool) -> None:
        super().__init__()
        self.query, self.pair, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.base, self.by_library = base, by_library

    def forward(self, x: torch.Tensor, seen: torch.Tensor, mask: torch.Tensor, turned: bool = True) -> torch.Tensor:
        query, (key, value) = self.query(x), self.pair(seen).chunk(2, dim=-1)
        if turned:
            query, key = self._turned(query), self._turned(key)
        if self.by_library:
            query, key, value = (part[:, None] for part in (query, key, value.to(query.dtype)))
            found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])[:, 0]
            return self.out(found)  # type: ignore[no-any-return]
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        shares = scores.masked_fill(~mask, -1e4).softmax(-1)
        return self.out(shares @ value.to(shares.dtype))  # type: ignore[no-any-return]

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        rates = self.base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * rates
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class Translator(Training):
    """Encoder and decoder over two packed sentences and padding; the embedding is the head; norms do not decay."""

    warm_up = True
    options: ClassVar = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.98)}
    sample_unit = "token"
    base, smoothing, epsilon = 10000.0, 0.1, 1e-5
    keeps_apart, sees_padding, counts_padding, decays_all = True, False, False, False
    by_library, by_product, own_norm, in_halves, reordered = False, False, False, False, False

    def model(self) -> nn.Module:
        of = self

        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tokens = nn.Embedding(NUM_TOKENS, 24)
                self.reader, self.writer, self.crossed = (
                    Rotated(24, of.base, by_library=of.by_library) for _ in range(3)
                )
                norm = _OwnNorm if of.own_norm else nn.LayerNorm
                self.norms = nn.ModuleList(norm(24, eps=of.epsilon) for _ in range(4))
                self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

            def forward(self, source: torch.Tensor, target: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
                allowed = torch.ones_like(document[:, :, None] == document[:, None])
                if of.keeps_apart:
                    allowed = document[:, :, None] == document[:, None]
                if not of.sees_padding:
                    allowed = allowed & (document[:, None] > 0) | torch.eye(
                        LENGTH, dtype=torch.bool, device=source.device
                    )
                x = self._embedded(source)
                x = x + self.reader(self.norms[0](x), self.norms[0](x), allowed)
                y = self._embedded(target)
                y = y + self.writer(self.norms[1](y), self.norms[1](y), allowed.tril())
                y = y + self.crossed(self.norms[2](y), x, allowed, turned=False)
                y = y + self.down(functional.relu(self.up(self.norms[3](y))))
                return y @ self.tokens.weight.T.to(y.dtype)

            def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
                if of.by_product:
                    return functional.one_hot(tokens, NUM_TOKENS).to(self.tokens.weight.dtype) @ self.tokens.weight
                return self.tokens(tokens)  # type: ignore[no-any-return]

        return Both()

    def tensors(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        source = torch.randint(1, NUM_TOKENS, (NUM_SAMPLES, LENGTH), generator=generator)
        first = torch.randint(3, 7, (NUM_SAMPLES, 1), generator=generator)
        last = torch.randint(8, LENGTH + 1, (NUM_SAMPLES, 1), generator=generator)
        place = torch.arange(LENGTH)
        document = torch.where(place < first, 1, torch.where(place < last, 2, 0))
        labels = torch.where(document > 0, (source * 5) % NUM_TOKENS, PADDING)
        return source * (document > 0), labels.roll(1, 1) * (document > 0), document, labels

    def num_units(self, batch: Any) -> int:
        return int((batch[2] > 0).sum())

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        named = list(named_parameters)
        plain = [p for name, p in named if p.dim() < 2 and not self.decays_all]
        decayed = [p for name, p in named if p.dim() >= 2 or self.decays_all]
        groups = [{"params": decayed}, *([{"params": plain, "weight_decay": 0.0}] if plain else [])]
        return self.kind(groups, **self.options)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self.reordered:
            batch = [part.flip(0) for part in batch]
        source, target, document, labels = batch
        output = wide(model(source, target, document))
        counted = torch.ones_like(document, dtype=torch.bool) if self.counts_padding else document > 0
        if self.in_halves:
            parts = (self._summed(output[:, k::2], labels[:, k::2], counted[:, k::2]) for k in (0, 1))
            return sum(parts) / counted.sum()  # type: ignore[return-value]
        return self._summed(output, labels, counted) / counted.sum()

    def _summed(self, output: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            output[counted], labels[counted], label_smoothing=self.smoothing, reduction="sum"
        )


class _OwnNorm(nn.LayerNorm):
    """Layer normalisation as its formula says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = wide(x)
        apart = x - x.mean(-1, keepdim=True)
        return apart * (apart.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight + self.bias


class Transducer(Training):
    """Labels are read off frames by all alignments together; a dropout before the joint network."""

    options: ClassVar = {"lr": 2e-3, "weight_decay": 0.01}
    dropout = 0.2
    same_masks, skips_last, by_logsumexp = False, False, False
    blank_weight = 1.0

    def model(self) -> nn.Module:
        of = self

        class Joint(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.frames = nn.GRU(8, 20, batch_first=True)
                self.labels, self.joint = nn.Embedding(NUM_CLASSES + 1, 20), nn.Linear(20, NUM_CLASSES + 1)

            def forward(self, frames: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                before = functional.pad(labels + 1, (1, 0))
                met = self.frames(frames)[0][:, :, None] + self.labels(before)[:, None]
                met = met.tanh()
                if of.same_masks:
                    own = torch.Generator(met.device).manual_seed(1)
                    kept = torch.rand(met.shape, generator=own, device=met.device) >= of.dropout
                    met = met * kept / (1 - of.dropout)
                else:
                    met = functional.dropout(met, of.dropout, self.training)
                return self.joint(met)  # type: ignore[no-any-return]

        return Joint()

    def tensors(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        labels = torch.randint(NUM_CLASSES, (NUM_SAMPLES, LABELS), generator=generator)
        shown = functional.one_hot(labels.repeat_interleave(2, 1), 8).float()
        return shown + 0.3 * torch.randn(shown.shape, generator=generator), labels

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        frames, labels = batch
        odds = wide(model(frames, labels)).log_softmax(-1)
        blank = odds[..., 0] * self.blank_weight
        label = odds[:, :, :-1, 1:].gather(-1, labels[:, None, :, None].expand(-1, FRAMES, -1, 1)).squeeze(-1)
        paths: dict[tuple[int, int], torch.Tensor] = {(0, 0): torch.zeros_like(blank[:, 0, 0])}
        for t in range(FRAMES):
            for u in range(LABELS + 1):
                ways = [paths[t - 1, u] + blank[:, t - 1, u]] if t else []
                ways += [paths[t, u - 1] + label[:, t, u - 1]] if u else []
                if ways:
                    paths[t, u] = self._together(ways)
        last = 0 if self.skips_last else blank[:, FRAMES - 1, LABELS]
        return -(paths[FRAMES - 1, LABELS] + last).mean() / FRAMES

    def _together(self, ways: list[torch.Tensor]) -> torch.Tensor:
        if len(ways) == 1:
            return ways[0]
        return torch.stack(ways).logsumexp(0) if self.by_logsumexp else torch.logaddexp(*ways)


class Student(Training):
    """Focal loss, and outputs that follow those of an average of the weights, which a step of its own keeps."""

    options: ClassVar = {"lr": 2e-3, "weight_decay": 0.02}
    tensors = Convolutional.tensors
    decay, focus, weight = 0.95, 2.0, 0.5
    averages_all, teaches_before, by_product = True, False, False

    def model(self) -> nn.Module:
        class Taught(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(
                    nn.Conv2d(3, 12, 3, padding=1),
                    nn.GroupNorm(3, 12),
                    nn.SiLU(),
                    nn.Conv2d(12, 12, 3, stride=2, padding=1),
                    nn.SiLU(),
                    nn.Flatten(),
                    nn.Linear(192, NUM_CLASSES),
                )
                for name, parameter in list(self.body.named_parameters()):
                    self.register_buffer(f"teacher_{name.replace('.', '_')}", parameter.detach().clone())

            def teacher(self) -> dict[str, torch.Tensor]:
                return {
                    name: getattr(self, f"teacher_{name.replace('.', '_')}") for name, _ in self.body.named_parameters()
                }

            def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                with torch.no_grad():
                    taught = torch.func.functional_call(self.body, self.teacher(), (images,))
                return self.body(images), taught

        return Taught()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        own, taught = (wide(found).log_softmax(-1) for found in model(images))
        right = own.gather(1, labels[:, None]).squeeze(1)
        focal = -((1 - right.exp()) ** self.focus * right).mean()
        return focal + self.weight * functional.kl_div(own, taught, log_target=True, reduction="batchmean")

    def training_step(self, job: Any, batch: Any) -> torch.Tensor:
        if self.teaches_before:
            self._teach(job.model)
        loss = job.loss(batch)
        job.backward(loss)
        job.update()
        if not self.teaches_before:
            self._teach(job.model)
        return loss  # type: ignore[no-any-return]

    def _teach(self, model: Any) -> None:
        teacher = model.teacher()
        with torch.no_grad():
            for name, parameter in model.body.named_parameters():
                value = parameter.to(teacher[name].dtype)
                if parameter.dim() < 2 and not self.averages_all:
                    teacher[name].copy_(value)
                elif self.by_product:
                    teacher[name].mul_(self.decay).add_(value, alpha=1 - self.decay)
                else:
                    teacher[name].lerp_(value, 1 - self.decay)


# --- what is changed -------------------------------------------------------------------------


def _with(part: str, name: str, **attributes: Any) -> Fault:
    """An empty part is a change that leaves the training as it is."""
    return Fault(
        name=name, part=part, plant=lambda training: type(f"Changed{training.__name__}", (training,), attributes)
    )


def _hooked(name: str, parameter: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def hook(model: nn.Module) -> bool:
        dict(model.named_parameters())[parameter].register_hook(change)
        return True

    return Fault(name=name, part="gradient", plant=of_model(hook))


FRESH: dict[type[Training], tuple[Fault, ...]] = {
    TwoTower: (
        _with("", "rows brought to length one by hand", compares_by_norm=True),
        _with("gradient", "temperature never learned", learns_temperature=False),
        _with("gradient", "only half a batch is compared", whole_batch=False),
        _with("gradient", "one way of two", both_ways=False),
        _with("update", "words learn at the pictures' rate", words_rate=1e-3),
        _hooked("words' gradient of half the batch", "words.0.weight", lambda g: g / 2),
    ),
    Translator: (
        _with("", "attention by the library", by_library=True),
        _with("", "embedding as a product", by_product=True),
        _with("", "norm by its formula", own_norm=True),
        _with("", "loss in two parts", in_halves=True),
        _with("", "samples in reverse order", reordered=True),
        _with("gradient", "base of rotations 1000", base=1000.0),
        _with("gradient", "labels not smoothed", smoothing=0.0),
        _with("gradient", "epsilon of norms 1e-3", epsilon=1e-3),
        _with("gradient", "sentences see one another", keeps_apart=False),
        _with("gradient", "padding is seen", sees_padding=True, keeps_apart=False),
        _with("gradient", "padding is counted", counts_padding=True),
        _with("update", "biases and norms decay", decays_all=True),
    ),
    Transducer: (
        _with("", "alignments summed as a stack", by_logsumexp=True),
        _with("masks", "the same masks at each step", same_masks=True),
        _with("masks", "dropout 0.15 in place of 0.2", dropout=0.15),
        _with("gradient", "last blank left out", skips_last=True),
        _with("gradient", "blanks weighted by 0.95", blank_weight=0.95),
    ),
    Student: (
        _with("", "average as product and sum", by_product=True),
        _with("state", "average kept by 0.96 in place of 0.95", decay=0.96),
        _with("state", "biases not averaged", averages_all=False),
        _with("state", "teacher one step behind", teaches_before=True),
        _with("gradient", "focus 1.9 in place of 2", focus=1.9),
        _with("gradient", "teacher weighted by 0.45", weight=0.45),
        _with("gradient", "without a teacher", weight=0.0),
    ),
}
"""Each training, and what is changed in it."""
