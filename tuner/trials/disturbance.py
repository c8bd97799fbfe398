"""Disturbance of a reference run by simulated rounding errors, to measure how rounding affects this model.

Parameters alone do not show it: where a gradient is zero by symmetry (the bias of attention's keys, say),
disturbed parameters keep the symmetry and rounding breaks it, which an optimizer that normalises its
steps turns into full steps. So the output of every innermost module is disturbed too, and through it the
gradient that flows back.

Neither shows the effect of rounding on the bias corrections of Adam and similar optimizers: 1 - beta ** t, in its first
steps a small difference of two large numbers. Python computes them in FP64. An update that counts its steps on the
device (its capturable form, unless it is fused) computes them in FP32.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from steptune.tuner.training.layouts import dense_strides, with_strides
from steptune.tuner.training.structure import map_structure

if TYPE_CHECKING:
    import torch


FP32_ROUNDOFF = 2.0**-24
POWER_ROUNDOFFS = 4.0
"""Maximum error of a power of Adam's beta computed on a device, in unit roundoffs. On a CPU it was 1.5 after five
steps; rounding beta itself contributes a part that grows with the number of steps.
"""
TOWARDS_NEIGHBOUR = 1.25
"""Relative change of a number, in unit roundoffs, after which it rounds to a neighbouring number. The change is 0.5 to
1.5 times the distance to the neighbour, also just below a power of two, where this distance is half as large.
"""
PIECE = 1 << 22
"""Number of elements that are disturbed at once: a tensor is processed in chunks of this size."""
SEEDS_OF_A_RANK = 2**16
"""Distance between the seeds of two ranks: more than the number of seeds that one rank uses."""


class Disturbance:
    """Source of relative noise of one unit roundoff, with a separate random generator.

    A tensor of a finer format gets noise that is uniform within the unit roundoff. In a format with exactly this unit
    roundoff, a part of one would mostly be rounded away again: there an element moves to one of its two neighbours, or
    not, with the probabilities that make its mean stay and its mean distance one unit roundoff.

    The same seed disturbs in the same way, and the global generator (dropout, augmentation) is not touched.
    """

    def __init__(self, unit_roundoff: float, seed: int) -> None:
        self._unit_roundoff = unit_roundoff
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, tensor: Any) -> Any:
        """Return a disturbed copy of a floating-point tensor, with its gradient disturbed by the same factors; return
        anything else unchanged.
        """
        import torch

        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return tensor
        return _disturbed().apply(tensor, self._steps(tensor.detach()))

    def _steps(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the relative change of each element, in a dtype that resolves (1 + change). The changes are computed
        in chunks to limit memory.
        """
        import torch

        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = self._generators[tensor.device] = torch.Generator(tensor.device).manual_seed(self._seed)
        dense = with_strides(tensor, dense_strides(tensor))
        steps = torch.empty_like(dense)
        for values, found in zip(_pieces(dense), _pieces(steps), strict=True):
            noise = 2 * torch.rand(values.shape, generator=generator, device=tensor.device, dtype=torch.float32) - 1
            found.copy_(self._step(values, noise))
        return steps

    def _step(self, values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        import torch

        own = torch.finfo(values.dtype).eps / 2
        if own < self._unit_roundoff:
            return self._unit_roundoff * noise
        wide = values.to(_wide(values.dtype))
        neighbour = (wide * (1 + TOWARDS_NEIGHBOUR * own * noise.sign().to(wide.dtype))).to(values.dtype)
        step = (neighbour.to(wide.dtype) - wide) / wide
        moves = noise.abs() * step.abs() < self._unit_roundoff  # never where the step is no number
        return torch.where(moves, step, 0.0)

    def of_rank(self, rank: int) -> Disturbance:
        """Return the disturbance for the outputs on a rank. Outputs are disturbed differently on each rank, parameters
        identically on all ranks.

        Rank 0 continues with the generator that has disturbed the parameters.
        """
        return self if rank == 0 else Disturbance(self._unit_roundoff, self._seed + rank * SEEDS_OF_A_RANK)

    @contextmanager
    def of_outputs(self, model: torch.nn.Module) -> Iterator[None]:
        """Disturb the outputs of all modules without children while active, in the forward and the backward pass, and
        let norms compute in another memory layout.
        """

        def disturb(module: Any, arguments: Any, output: Any) -> Any:
            return map_structure(self, output)

        def prepared(hook: Callable[..., Any]) -> Callable[..., Any]:
            """Return the hook, excluded from torch.compile's graphs, which cannot contain its random generator."""
            dynamo = sys.modules.get("torch._dynamo")
            return hook if dynamo is None else dynamo.disable(hook)

        from steptune.tuner.trials.other_layout import put_in_other_layout

        with ExitStack() as undone:
            for module in model.modules():
                if next(module.children(), None) is None:
                    undone.callback(put_in_other_layout(module, prepared))
                    undone.callback(module.register_forward_hook(prepared(disturb)).remove)
            yield


@functools.cache
def _disturbed() -> Any:
    """Return an autograd function that multiplies by (1 + step) in a wider dtype and rounds once; it treats the
    gradient likewise.
    """
    import torch

    def multiplied(tensor: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        dense = (
            tensor if tensor.stride() == steps.stride() else torch.empty_like(steps, dtype=tensor.dtype).copy_(tensor)
        )
        result = torch.empty_like(dense)
        for values, factors, found in zip(_pieces(dense), _pieces(steps), _pieces(result), strict=True):
            wide = _wide(values.dtype)
            found.copy_(values.to(wide) * (1 + factors.to(wide)))
        return result

    class Disturbed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(steps)
            return multiplied(tensor, steps)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return multiplied(gradient, *ctx.saved_tensors), None

    return Disturbed


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a wider dtype, in which the product of two numbers of this dtype is exact or nearly so."""
    import torch

    return torch.float64 if dtype.itemsize >= 4 else torch.float32


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the elements of a dense tensor in memory order, in chunks."""
    pieces: tuple[torch.Tensor, ...] = tensor.as_strided((tensor.numel(),), (1,)).split(PIECE)
    return pieces


def corrects_biases(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer is Adam or similar, with an implementation that counts steps on the device."""
    return all("betas" in group and "capturable" in group for group in optimizer.param_groups)


def rounds_bias_corrections(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer computes its bias corrections in FP32."""
    groups = optimizer.param_groups
    return corrects_biases(optimizer) and any(g["capturable"] and not g.get("fused") for g in groups)


@contextmanager
def of_bias_corrections(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Scale every update while active, as if the powers of the betas had their maximum rounding error.

    The optimizer must not have taken a step yet. Steps that are replayed as a graph are not disturbed.
    """
    count = 0
    rates: list[Any] = []

    def enlarge(*_: Any) -> None:
        nonlocal count
        count += 1
        rates[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * (1 + POWER_ROUNDOFFS * FP32_ROUNDOFF * _condition(group["betas"], count))

    def restore(*_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    handles = [optimizer.register_step_pre_hook(enlarge), optimizer.register_step_post_hook(restore)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _condition(betas: tuple[Any, Any], step: int) -> float:
    """Return the ratio of the update's relative error to the relative error of beta ** step. The update scales with
    sqrt(1 - beta2 ** step) / (1 - beta1 ** step).
    """
    first, second = (float(beta) ** step / (1 - float(beta) ** step) for beta in betas)
    return first + second / 2
