"""Pattern of optimizers that compute LARS: timm's and Steptune's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from steptune.kernels import lars
from steptune.kernels.lars import Settings
from steptune.kernels.multi_tensor.optimizers import Kind, Part, Rule, all_of, rate

WHAT = "the optimizer LARS from timm or Steptune"
OPERATORS = ("lars_update",)


def _of_timm(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> Settings:
    """Return the settings of timm's LARS, whose first momentum is the undampened gradient."""
    lr, momentum = rate(group), group["momentum"]
    is_first = momentum == 0 or "momentum_buffer" not in optimizer.state[parameter]
    bounded = bool(group["trust_clip"])
    return Settings(
        rate=lr,
        kept=0.0 if is_first else momentum,
        share=1.0 if is_first else 1.0 - group["dampening"],
        weight_decay=group["weight_decay"],
        trust=group["trust_coeff"],
        eps=group["eps"],
        adapts=group["weight_decay"] != 0 or bool(group["always_adapt"]),
        divisor=lr if bounded else 1.0,
        largest_ratio=1.0 if bounded else math.inf,
        momentum=momentum if group["nesterov"] else 0.0,
    )


def _of_steptune(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> Settings:
    """Return the settings of Steptune's LARS, which applies the learning rate inside the momentum."""
    adapts = not (group["exclude_vectors"] and parameter.dim() < 2)
    return Settings(
        rate=1.0,
        kept=group["momentum"],
        share=rate(group),
        weight_decay=group["weight_decay"] if adapts else 0.0,
        trust=group["trust"],
        adapts=adapts,
    )


def _refuse_rate(optimizer: Any) -> str:
    if any(group["trust_clip"] and not rate(group) for group in optimizer.param_groups):
        return "trust_clip divides by the learning rate, which is 0"
    return ""


def _by_kernel(parts: list[Part]) -> list[Tensor]:
    return [lars.lars(p.parameters, p.gradients, p.states[0] if p.states else None, p.settings) for p in parts]


def _by_reference(parts: list[Part]) -> list[Tensor]:
    return [lars.reference(p.parameters, p.gradients, p.states[0] if p.states else None, p.settings) for p in parts]


RULE = Rule(
    word="lars",
    by_kernel=_by_kernel,
    by_reference=_by_reference,
    kinds={
        "timm.optim.lars.Lars": Kind(
            options=frozenset(
                {
                    "lr",
                    "momentum",
                    "dampening",
                    "weight_decay",
                    "nesterov",
                    "trust_coeff",
                    "eps",
                    "trust_clip",
                    "always_adapt",
                }
            ),
            refusal=_refuse_rate,
            settings=_of_timm,
            states=lambda group: ("momentum_buffer",) if group["momentum"] else (),
        ),
        "steptune.tuner.training.optimizers.lars.Lars": Kind(
            options=frozenset({"lr", "momentum", "weight_decay", "trust", "exclude_vectors"}),
            settings=_of_steptune,
            states=all_of(("velocity",)),
        ),
    },
)
