"""Base class of this folder's optimizers, which update many parameters in one call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]


class MultiTensorOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that pass all parameters with a gradient to `update`, in one call per group, device,
    dtype and number of dimensions.

    The number of dimensions matters to every optimizer here: vectors (biases, gains of normalisation) are treated
    otherwise than matrices.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in _by_kind(p for p in group["params"] if p.grad is not None):
                self.update(parameters, [p.grad for p in parameters], group)  # type: ignore[misc]
        return loss

    @abstractmethod
    def update(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update parameters in place. The gradients must not be changed."""


def _by_kind(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    kinds: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ValueError("sparse gradients are not supported: create the embedding with sparse=False")
        if parameter.is_complex():
            raise ValueError("complex parameters are not supported: convert them with torch.view_as_real")
        kinds.setdefault((parameter.device, parameter.dtype, parameter.dim()), []).append(parameter)
    return list(kinds.values())


def norms(tensors: Tensors) -> torch.Tensor:
    """Return the tensors' Euclidean norms, stacked, in FP32 or a wider dtype."""
    wide = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else None
    return torch.stack(torch._foreach_norm(tensors, 2, wide))


def scale_each(tensors: Tensors, factors: torch.Tensor) -> None:
    """Multiply each tensor by its factor, without making the host wait for the factors."""
    torch._foreach_mul_(tensors, list(factors.to(tensors[0].dtype).unbind()))


def ratios(numerators: torch.Tensor, denominators: torch.Tensor) -> torch.Tensor:
    """Divide element by element. The ratio is 1 where either number is zero, as for weights that are still zero."""
    usable = (numerators > 0) & (denominators > 0)
    return torch.where(usable, numerators / denominators, torch.ones_like(numerators))


def is_excluded(parameters: list[torch.Tensor], group: dict[str, Any]) -> bool:
    """Say whether these parameters, as vectors or scalars, are excluded from weight decay and from learning rates
    scaled by a norm.
    """
    return bool(group["exclude_vectors"]) and parameters[0].dim() < 2


def number(value: float | torch.Tensor) -> float:
    """Return a learning rate, which may be a tensor, as a number."""
    return float(value)


def check(name: str, value: float, *, below: float = float("inf")) -> None:
    """Refuse an option that is negative or too large.

    Raises:
        ValueError: The message names the option, its value and the allowed range.
    """
    if not 0 <= value < below:
        limit = "" if below == float("inf") else f" and below {below:g}"
        raise ValueError(f"{name} must be at least 0{limit}, got {value!r}")
