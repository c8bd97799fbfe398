"""LARS: momentum SGD, with each layer's learning rate scaled to the norm of the layer's weights.

For every tensor, with g its gradient:

    rate = lr * trust * |p| / (|g| + weight_decay * |p|)
    v = momentum * v + rate * (g + weight_decay * p)
    p = p - v

As in the paper the rate is inside of the momentum, so a change of `lr` acts on new gradients only; torch's SGD has
it outside. The rate is `lr` where |p| or |g| is zero. Vectors (biases, gains of normalisation) are neither decayed
nor scaled: their rate is `lr`.

Source: You et al., "Large Batch Training of Convolutional Networks", algorithm 1
(https://arxiv.org/abs/1708.03888).
"""

from __future__ import annotations

from typing import Any

import torch

from steptune.tuner.training.optimizers.multi_tensor import (
    MultiTensorOptimizer,
    check,
    is_excluded,
    norms,
    number,
    scale_each,
)


class Lars(MultiTensorOptimizer):
    """LARS optimizer.

    Args:
        params: As for every torch optimizer.
        lr: The global rate; much larger than SGD's, because `trust` is small.
        momentum: Share of the last step that is kept.
        weight_decay: Added to the gradient, times the weights.
        trust: The paper's eta: the part of a layer's norm that one step may move it, at lr 1.
        exclude_vectors: Whether parameters of fewer than two dimensions are neither decayed nor scaled.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        trust: float = 1e-3,
        exclude_vectors: bool = True,
    ) -> None:
        check("lr", number(lr))
        check("momentum", momentum, below=1)
        check("weight_decay", weight_decay)
        check("trust", trust)
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "exclude_vectors": exclude_vectors,
        }
        super().__init__(params, options)

    def update(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], group: dict[str, Any]) -> None:
        decay, rate = group["weight_decay"], number(group["lr"])
        velocities = [self._velocity(p) for p in parameters]
        torch._foreach_mul_(velocities, group["momentum"])
        if is_excluded(parameters, group):
            torch._foreach_add_(velocities, gradients, alpha=rate)
        else:
            sizes, slopes = norms(parameters), norms(gradients)
            directions = torch._foreach_add(gradients, parameters, alpha=decay)
            trusted = group["trust"] * sizes / (slopes + decay * sizes)
            usable = (sizes > 0) & (slopes > 0)
            scale_each(directions, rate * torch.where(usable, trusted, torch.ones_like(trusted)))
            torch._foreach_add_(velocities, directions)
        torch._foreach_sub_(parameters, velocities)

    def _velocity(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if not state:
            state["velocity"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        velocity: torch.Tensor = state["velocity"]
        return velocity
