"""SM3: Adagrad that keeps statistics for rows and columns instead of every element.

For a tensor with n_1 x n_2 x ... elements, one accumulator a_k of n_k elements for each dimension k:

    s = min over k of a_k (broadcast) + g * g
    a_k = max of s over all other dimensions
    p = p - lr * g / sqrt(s)            (0 where s is zero)

So a matrix of m x n needs m + n numbers where Adam needs 2 m n. A vector has one accumulator, which is Adagrad's.
With `momentum` the quotient is averaged over steps, and the average takes as much memory as the parameters: the
paper trains with 0.9; it is off here unless asked for.

Source: Anil et al., "Memory-Efficient Adaptive Optimization", algorithm SM3-II (https://arxiv.org/abs/1901.11150).
"""

from __future__ import annotations

from typing import Any

import torch

from steptune.tuner.training.optimizers.multi_tensor import MultiTensorOptimizer, check, number


class Sm3(MultiTensorOptimizer):
    """SM3-II optimizer.

    Args:
        params: As for every torch optimizer.
        lr: The rate; not decayed by itself, but the accumulators only grow.
        momentum: Share of the last direction that is kept; 0 keeps none and takes no memory.
        weight_decay: Decoupled, as AdamW's.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        check("lr", number(lr))
        check("momentum", momentum, below=1)
        check("weight_decay", weight_decay)
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def update(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], group: dict[str, Any]) -> None:
        rate, momentum = number(group["lr"]), group["momentum"]
        states = [self._state_of(p, momentum) for p in parameters]
        num_axes = max(1, parameters[0].dim())
        by_axis = [[state[f"axis_{axis}"] for state in states] for axis in range(num_axes)]
        sums = list(torch._foreach_add(by_axis[0], 0.0))
        for accumulators in by_axis[1:]:
            sums = list(torch._foreach_minimum(sums, accumulators))
        torch._foreach_addcmul_(sums, gradients, gradients)
        for axis, accumulators in enumerate(by_axis):
            others = [k for k in range(num_axes) if k != axis]
            torch._foreach_copy_(accumulators, [s.amax(others, keepdim=True) if others else s for s in sums])
        torch._foreach_clamp_min_(sums, torch.finfo(parameters[0].dtype).tiny)
        torch._foreach_sqrt_(sums)
        directions = list(torch._foreach_div(gradients, sums))
        if momentum:
            averages = [state["momentum"] for state in states]
            torch._foreach_lerp_(averages, directions, 1 - momentum)
            directions = averages
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_add_(parameters, directions, alpha=-rate)

    def _state_of(self, parameter: torch.Tensor, momentum: float) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            shape = list(parameter.shape)
            for axis in range(max(1, len(shape))):
                kept = [size if k == axis else 1 for k, size in enumerate(shape)]
                state[f"axis_{axis}"] = parameter.new_zeros(kept)
        if momentum and "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
