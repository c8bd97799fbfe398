"""LAMB: Adam, with each layer's update scaled to the norm of the layer's weights.

For every tensor, with m and v as in Adam (bias-corrected):

    u = m / (sqrt(v) + eps) + weight_decay * p
    p = p - lr * (|p| / |u|) * u

The ratio is 1 where |p| or |u| is zero. Vectors (biases, gains of normalisation) are neither decayed nor scaled, as
in the authors' code. There is no clipping by the global norm: a job clips by the workload's `max_grad_norm`.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2
(https://arxiv.org/abs/1904.00962).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from steptune.tuner.training.optimizers.multi_tensor import (
    MultiTensorOptimizer,
    check,
    is_excluded,
    norms,
    number,
    ratios,
    scale_each,
)


class Lamb(MultiTensorOptimizer):
    """LAMB optimizer.

    Args:
        params: As for every torch optimizer.
        lr: Multiplies the size of a layer's weights: 0.001 moves each layer by a thousandth of its norm.
        betas: Decay of the means of the gradient and of its square.
        eps: Added to the root of the second mean.
        weight_decay: Decoupled; part of the update that is scaled.
        exclude_vectors: Whether parameters of fewer than two dimensions are neither decayed nor scaled.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        exclude_vectors: bool = True,
    ) -> None:
        check("lr", number(lr))
        check("betas[0]", betas[0], below=1)
        check("betas[1]", betas[1], below=1)
        check("eps", eps)
        check("weight_decay", weight_decay)
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "exclude_vectors": exclude_vectors,
        }
        super().__init__(params, options)

    def update(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        states = [self._state_of(p) for p in parameters]
        means, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        for state in states:
            state["step"] += 1
        steps = [int(state["step"]) for state in states]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [math.sqrt(1 - beta2**step) for step in steps])
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, [1 - beta1**step for step in steps])
        torch._foreach_div_(updates, roots)
        if not is_excluded(parameters, group):
            if group["weight_decay"]:
                torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
            scale_each(updates, ratios(norms(parameters), norms(updates)))
        torch._foreach_add_(parameters, updates, alpha=-number(group["lr"]))

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # on the CPU: reading it costs nothing
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
