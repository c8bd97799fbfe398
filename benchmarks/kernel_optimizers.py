"""LAMB and LARS over the parameters of Swin-B and ViT-L, in each formulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from kernel_timing import DEVICE, Clock, Times, error, timed, timed_in_a_row
from torch import Tensor

from steptune.kernels import lamb, lars
from steptune.tuner.training.optimizers.lamb import Lamb
from steptune.tuner.training.optimizers.lars import Lars

COMPILE_S = 60.0
"""Seconds that a compiler may take: a graph of all parameters has thousands of operators."""
TOLERANCE = 1e-5
STEPS = 10
Shapes = list[tuple[int, ...]]


def swin_b() -> Shapes:
    """Shapes of Swin-B's parameters: 88 million."""
    width = 128
    shapes: Shapes = [(width, 3, 4, 4), (width,), (width,), (width,)]
    for stage, depth in enumerate((2, 2, 18, 2)):
        c = width << stage
        if stage:
            shapes += [(2 * c,), (2 * c,), (c, 2 * c)]
        block = [(c,), (c,), (169, c // 32), (3 * c, c), (3 * c,), (c, c), (c,), (c,), (c,)]
        shapes += [*block, (4 * c, c), (4 * c,), (c, 4 * c), (c,)] * depth
    return [*shapes, (8 * width,), (8 * width,), (1000, 8 * width), (1000,)]


def vit_l() -> Shapes:
    """Shapes of ViT-L/16's parameters: 304 million."""
    c = 1024
    block: Shapes = [(c,), (c,), (3 * c, c), (3 * c,), (c, c), (c,), (c,), (c,)]
    block += [(4 * c, c), (4 * c,), (c, 4 * c), (c,)]
    return [(1, 1, c), (1, 197, c), (c, 3, 16, 16), (c,), *block * 24, (c,), (c,), (1000, c), (1000,)]


class Update:
    """One optimizer's tensors, and its step in each formulation."""

    def __init__(self, shapes: Shapes) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.parameters, self.gradients = (
            [torch.randn(shape, device=DEVICE, generator=generator) * size for shape in shapes] for size in (0.02, 1e-4)
        )
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]
        self.trained = [torch.nn.Parameter(p) for p in self.parameters]
        for parameter, gradient in zip(self.trained, self.gradients, strict=True):
            parameter.grad = gradient
        self.num_elements = sum(p.numel() for p in self.parameters)
        decays = [0.05 if p.dim() > 1 else 0.0 for p in self.parameters]
        shares = {"decay1": 0.9, "share1": 0.1, "decay2": 0.999, "share2": 0.001}
        of_lamb = {
            d: lamb.Settings(
                rate=1e-4, mean_correction=5.3, root_correction=22.0, weight_decay=d, adapts=d > 0, **shares
            )
            for d in set(decays)
        }
        of_lars = {d: lars.Settings(rate=1e-2, kept=0.9, share=1.0, weight_decay=d, adapts=d > 0) for d in set(decays)}
        self.lamb = [of_lamb[d] for d in decays]
        self.lars = [of_lars[d] for d in decays]

    def check(self, step: Callable[..., Tensor], reference: Callable[..., Tensor], num_states: int) -> None:
        """Compare two steps from the same tensors.

        Raises:
            ValueError: They differ.
        """
        own = [self.parameters, self.gradients, self.first, self.second][: 2 + num_states]
        copies = [[tensor.clone() for tensor in tensors] for tensors in own]
        twice = [[tensor.clone() for tensor in tensors] for tensors in own]
        step(*copies)
        reference(*twice)
        for found, wanted in zip(copies, twice, strict=True):
            worst = max(error(a, b) for a, b in zip(found, wanted, strict=True) if float(b.abs().max()) > 0)
            if not worst < TOLERANCE:
                raise ValueError(f"wrong by {worst}")


def by_foreach_lamb(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], means: Sequence[Tensor], squares: Sequence[Tensor]
) -> None:
    """LAMB with clipping by operators over all tensors at once."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    scaled = torch._foreach_mul(gradients, (1.0 / norm).clamp(max=1.0))
    torch._foreach_lerp_(means, scaled, 0.1)
    torch._foreach_mul_(squares, 0.999)
    torch._foreach_addcmul_(squares, scaled, scaled, 0.001)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_mul_(roots, 22.0)
    torch._foreach_add_(roots, 1e-6)
    updates = torch._foreach_mul(means, 5.3)
    torch._foreach_div_(updates, roots)
    torch._foreach_add_(updates, parameters, alpha=0.05)
    sizes, lengths = torch.stack(torch._foreach_norm(parameters)), torch.stack(torch._foreach_norm(updates))
    ratios = torch.where((sizes > 0) & (lengths > 0), sizes / lengths, torch.ones_like(sizes)) * -1e-4
    torch._foreach_mul_(updates, list(ratios.unbind()))
    torch._foreach_add_(parameters, updates)


def by_foreach_lars(parameters: Sequence[Tensor], gradients: Sequence[Tensor], momenta: Sequence[Tensor]) -> None:
    """LARS by operators over all tensors at once."""
    sizes, slopes = torch.stack(torch._foreach_norm(parameters)), torch.stack(torch._foreach_norm(gradients))
    usable = (sizes > 0) & (slopes > 0)
    ratios = torch.where(usable, 1e-3 * sizes / (slopes + 0.05 * sizes), torch.ones_like(sizes))
    steps = torch._foreach_add(gradients, parameters, alpha=0.05)
    torch._foreach_mul_(steps, list(ratios.unbind()))
    torch._foreach_mul_(momenta, 0.9)
    torch._foreach_add_(momenta, steps)
    torch._foreach_add_(parameters, momenta, alpha=-1e-2)


def times(function: Callable[[], object]) -> Times:
    """Time a step by itself, with the host's part, and steps in a row, where the host works while the device does."""
    return {"step": timed(function), "in a row": timed_in_a_row(function, STEPS)}


def checked_lamb(update: Update, clip: float | None) -> Times:
    options = {"settings": update.lamb, "max_grad_norm": clip}
    update.check(partial(lamb.lamb, **options), partial(lamb.reference, **options), 2)
    own = (update.parameters, update.gradients, update.first, update.second)
    return times(lambda: lamb.lamb(*own, **options))


def checked_lars(update: Update) -> Times:
    update.check(partial(lars.lars, settings=update.lars), partial(lars.reference, settings=update.lars), 1)
    own = (update.parameters, update.gradients, update.first)
    return times(lambda: lars.lars(*own, update.lars))


def timm_step(name: str, update: Update, **options: float) -> Times:
    """Time timm's own optimizer, a loop over tensors."""
    import timm.optim

    return times(getattr(timm.optim, name)(update.trained, **options).step)


def compiled_step(function: Callable[..., None], *tensors: Sequence[Tensor]) -> Times:
    torch._dynamo.reset()
    step = torch.compile(function, dynamic=False)
    with torch.no_grad():
        step(*tensors)
        return times(lambda: step(*tensors))


@torch.no_grad()
def rows(rate: float, clock: Clock, *, small: bool = False) -> Iterator[dict]:
    """One row an optimizer and model; formulations that compile for long come last.

    Args:
        small: Tries the script on a CPU.
    """
    models = {"small": swin_b()[4:30]} if small else {"Swin-B": swin_b(), "ViT-L/16": vit_l()}
    for name, shapes in models.items():
        update = Update(shapes)
        p, g, m, v = update.parameters, update.gradients, update.first, update.second
        for clip in (1.0, None):
            settings = update.lamb
            ways: dict[str, Callable[[], Times]] = {
                "ours": lambda clip=clip, u=update: checked_lamb(u, clip),
                "loop": lambda clip=clip, s=settings, t=(p, g, m, v): times(lambda: lamb.reference(*t, s, clip)),
                "timm": lambda clip=clip, u=update: timm_step("Lamb", u, weight_decay=0.05, max_grad_norm=clip),
            }
            if clip is not None:
                ways["foreach"] = lambda t=(p, g, m, v): times(lambda: by_foreach_lamb(*t))
            else:
                ways["foreach, Steptune's"] = lambda u=update: times(Lamb(u.trained, weight_decay=0.05).step)
            yield row("lamb", f"{name}, clip {clip}", update, (40 if clip is None else 44), rate, clock, ways)
        ways = {
            "ours": lambda u=update: checked_lars(u),
            "loop": lambda u=update, t=(p, g, m): times(lambda: lars.reference(*t, u.lars)),
            "timm": lambda u=update: timm_step("Lars", u, momentum=0.9, weight_decay=0.05),
            "foreach": lambda t=(p, g, m): times(lambda: by_foreach_lars(*t)),
            "foreach, Steptune's": lambda u=update: times(Lars(u.trained, weight_decay=0.05).step),
        }
        yield row("lars", name, update, 28, rate, clock, ways)
        del update, p, g, m, v, ways


@torch.no_grad()
def fill_cache(name: str) -> None:
    """Compile a foreach formulation, as a process beside others may."""
    update = Update(swin_b())
    p, g, m, v = update.parameters, update.gradients, update.first, update.second
    if name == "lars":
        torch.compile(by_foreach_lars, dynamic=False)(p, g, m)
    else:
        torch.compile(by_foreach_lamb, dynamic=False)(p, g, m, v)


@torch.no_grad()
def compiled_rows(rate: float, clock: Clock) -> Iterator[dict]:
    """The foreach formulations, compiled as one graph."""
    update = Update(swin_b())
    p, g, m, v = update.parameters, update.gradients, update.first, update.second
    inner = Clock(min(COMPILE_S, clock.left))
    ways: dict[str, Callable[[], Times]] = {"foreach compiled": lambda: compiled_step(by_foreach_lars, p, g, m)}
    yield row("lars", "Swin-B", update, 28, rate, inner, ways)
    inner = Clock(min(COMPILE_S, clock.left))
    ways = {"foreach compiled": lambda: compiled_step(by_foreach_lamb, p, g, m, v)}
    yield row("lamb", "Swin-B, clip 1.0", update, 44, rate, inner, ways)


def row(
    kernel: str,
    case: str,
    update: Update,
    bytes_per_element: int,
    rate: float,
    clock: Clock,
    ways: dict[str, Callable[[], Times]],
) -> dict:
    floor_us = bytes_per_element * update.num_elements / rate * 1e6
    found = {label: clock.attempt(way) for label, way in ways.items()}
    return {
        "kernel": kernel,
        "case": f"{case}, {update.num_elements / 1e6:.0f} million elements in {len(update.parameters)} tensors",
        "floor_us": {"step": floor_us, "in a row": floor_us},
        "times": found,
    }
