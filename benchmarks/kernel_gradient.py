"""Deep gradient compression over the parameters of Swin-B and ViT-L, up to what is sent, and blocks in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from kernel_optimizers import Shapes, swin_b, vit_l
from kernel_timing import DEVICE, Clock, Times, timed
from torch import Tensor

from steptune.kernels import deep_gradient, int8_blocks

RATIO = 0.001
MOMENTUM = 0.9
NUM_WARMUP = 6
"""Steps after which thresholds have settled."""


class Step:
    """One rank's tensors of more than one dimension."""

    def __init__(self, shapes: Shapes) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        sparse = [shape for shape in shapes if len(shape) > 1]
        self.gradients = [torch.randn(shape, device=DEVICE, generator=generator) * 1e-4 for shape in sparse]
        self.momenta, self.unsent = ([torch.zeros_like(g) for g in self.gradients] for _ in range(2))
        counts = [math.ceil(RATIO * g.numel()) for g in self.gradients]
        own = {count: deep_gradient.Settings(MOMENTUM, False, count) for count in counts}
        self.settings = [own[count] for count in counts]
        self.thresholds = torch.stack(
            [g.abs().flatten().topk(count).values[-1] for g, count in zip(self.gradients, counts, strict=True)]
        )

    def by_kernel(self) -> deep_gradient.Sent:
        sent = deep_gradient.compensate_and_select(
            self.gradients, self.momenta, self.unsent, self.thresholds, self.settings
        )
        self.thresholds = sent.thresholds
        return sent

    def by_sorting(self) -> list[Tensor]:
        """Tensor by tensor, with exactly the largest elements."""
        sent = []
        for g, u, v, own in zip(self.gradients, self.momenta, self.unsent, self.settings, strict=True):
            v.add_(u.mul_(own.momentum).add_(g))
            flat = v.view(-1)
            places = flat.abs().topk(own.most, sorted=False).indices.int()
            sent.append(flat[places])
            flat[places] = 0.0
            u.view(-1)[places] = 0.0
        return sent

    def check(self) -> None:
        """Compare steps with the reference.

        Raises:
            ValueError: They differ.
        """
        momenta, unsent = ([t.clone() for t in own] for own in (self.momenta, self.unsent))
        wanted = deep_gradient.reference(self.gradients, momenta, unsent, self.thresholds, self.settings)
        found = self.by_kernel()
        if float((found.values - wanted.values).abs().sum()) > 1e-3 * float(wanted.values.abs().sum()):
            raise ValueError("other elements are sent")


def times(step: Step, function: Callable[[Step], object], *, checked: bool) -> Times:
    for _ in range(NUM_WARMUP):
        function(step)
        if checked:
            step.check()
    return {"step": timed(partial(function, step))}


def rows(rate: float, clock: Clock, *, small: bool = False) -> Iterator[dict]:
    """One row a model.

    Args:
        small: Tries the script on a CPU.
    """
    models = {"tiny": [(64, 70), (7,), (5000, 2)]} if small else {"Swin-B": swin_b(), "ViT-L/16": vit_l()}
    for name, shapes in models.items():
        step = Step(shapes)
        num_elements = sum(g.numel() for g in step.gradients)
        found = {
            "ours": clock.attempt(partial(times, step, Step.by_kernel, checked=True)),
            "tensor by tensor, sorted": clock.attempt(partial(times, step, Step.by_sorting, checked=False)),
        }
        sent = int((step.by_kernel().values != 0).sum())
        yield {
            "kernel": "deep_gradient",
            "case": f"{name}, {num_elements / 1e6:.0f} million elements in {len(step.settings)} tensors, ratio {RATIO}",
            "sent_share": sent / num_elements,
            "floor_us": {"step": 20 * num_elements / rate * 1e6},
            "times": found,
        }


def int8_rows(rate: float, clock: Clock, *, small: bool = False) -> Iterator[dict]:
    """One row: both halves of the compression, the mean over eight ranks' parts.

    Args:
        small: Tries the script on a CPU.
    """
    num_rows, length, ranks = (16, 256, 2) if small else (1 << 18, 256, 8)
    blocks = torch.randn(num_rows, length, device=DEVICE)
    payload, scales = int8_blocks.encode_reference(blocks)
    given = payload.view(ranks, -1, length), scales.view(ranks, -1)
    if not torch.allclose(int8_blocks.mean_of(*given), int8_blocks.mean_reference(*given), atol=1e-6):
        raise ValueError("another mean")
    if int((int8_blocks.encode(blocks)[0] != payload).sum()) > 1e-4 * blocks.numel():
        raise ValueError("other numbers")
    ways = {
        "ours": (int8_blocks.encode, int8_blocks.mean_of),
        "plain": (int8_blocks.encode_reference, int8_blocks.mean_reference),
    }
    one = blocks.numel() / rate * 1e6
    yield {
        "kernel": "int8_blocks",
        "case": f"{blocks.numel() / 1e6:.0f} million elements in blocks of {length}, {ranks} ranks",
        "floor_us": {"encode": 5 * one, "mean": (1 + 4 / ranks) * one},
        "times": {
            label: clock.attempt(
                lambda e=encode, m=mean_of: {"encode": timed(lambda: e(blocks)), "mean": timed(lambda: m(*given))}
            )
            for label, (encode, mean_of) in ways.items()
        },
    }
