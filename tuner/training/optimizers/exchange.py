"""Replacement of the user's optimizer by another algorithm over the same groups.

What is taken over: the groups with their parameters, learning rates, weight decay, and keys of the user's own (which a
scheduler may read); betas and momentum where both algorithms have them, with what belongs to them. The learning rate is
the user's unless the workload names one for the algorithm; then groups keep their ratio to the optimizer's own rate.
An option that changes the meaning of the others, and that the new algorithm lacks, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.training.optimizers.lamb import Lamb
from steptune.tuner.training.optimizers.lars import Lars
from steptune.tuner.training.optimizers.sm3 import Sm3

CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "lamb": Lamb,
    "lars": Lars,
    "adafactor": torch.optim.Adafactor,
    "sm3": Sm3,
}
"""Optimizer classes, by their names in the strategy `optimizer_algorithm`."""

STATE: Mapping[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "lars": ("velocity",),
    "adafactor": ("row_var", "variance"),
    "sm3": ("axis_0", "momentum"),
}
"""Names of the states that an algorithm's step creates; a parameter may have only some of them."""

_SHARED: Mapping[str, tuple[str, ...]] = {
    "adamw": ("weight_decay", "betas", "amsgrad", "maximize", "differentiable"),
    "lamb": ("weight_decay", "betas"),
    "lars": ("weight_decay", "momentum"),
    "adafactor": ("weight_decay", "maximize"),
    "sm3": ("weight_decay",),
}
"""Options that are copied from the user's optimizer.

Its weight decay may have been coupled to the gradient: that is part of its algorithm, as the statistics are.
"""

_BELONGS_TO: Mapping[str, str | None] = {
    "maximize": None,
    "differentiable": None,
    "amsgrad": "betas",
    "nesterov": "momentum",
    "dampening": "momentum",
}
"""Owner of each option: an option may be dropped only together with the option that owns it, and never if its owner is
None.
"""


def exchanged(
    optimizer: torch.optim.Optimizer, algorithm: str, learning_rate: float | None = None
) -> torch.optim.Optimizer:
    """Return a new optimizer of another algorithm, over the groups of an optimizer that has not stepped yet.

    Args:
        learning_rate: Rate of the new algorithm, for groups with the old optimizer's own rate; None keeps the user's.

    Raises:
        UnsupportedError: The optimizer has an option that the new algorithm lacks, and that is no part of the old one.
    """
    for group in optimizer.param_groups:
        _check_options(type(optimizer).__name__, group, algorithm)
    groups = [_group(group, optimizer.defaults, algorithm, learning_rate) for group in optimizer.param_groups]
    return CLASSES[algorithm](groups)


def _check_options(name: str, group: dict[str, Any], algorithm: str) -> None:
    shared = _SHARED[algorithm]
    for option, owner in _BELONGS_TO.items():
        kept = owner is None or (owner in shared and bool(group.get(owner)))
        if group.get(option) and kept and option not in shared:
            raise UnsupportedError(
                f"{name} has {option}={group[option]!r}, which {algorithm} does not support, so the training "
                f"would change: use {name} without {option}, or leave out optimizer_algorithm"
            )


def _group(
    group: dict[str, Any], defaults: dict[str, Any], algorithm: str, learning_rate: float | None
) -> dict[str, Any]:
    own = {name: value for name, value in group.items() if name not in defaults}
    shared = {name: group[name] for name in _SHARED[algorithm] if name in group}
    if not shared.get("momentum", True):
        del shared["momentum"]  # plain SGD has a momentum of 0, which is no choice of one
    rate = group["lr"]
    if learning_rate is not None:
        rate = learning_rate * (rate / defaults["lr"] if defaults.get("lr") else 1.0)
    return {**own, **shared, "lr": rate}


def algorithm_that_ran(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the algorithm that has updated an optimizer's parameters, or None.

    It is known by the optimizer's class, and by nonzero state that a step of the algorithm leaves.
    """
    name = next((name for name, cls in CLASSES.items() if type(optimizer) is cls), None)
    held = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    kept = [state[key] for state in held for key in STATE.get(name or "", ()) if key in state]
    return name if any(bool(torch.count_nonzero(local(value))) for value in kept) else None


def local(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    return value.to_local() if hasattr(value, "to_local") else value
