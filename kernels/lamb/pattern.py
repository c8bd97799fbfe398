"""Pattern of optimizers that compute LAMB: timm's, torch_optimizer's and Steptune's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steptune.kernels import lamb
from steptune.kernels.lamb import Settings
from steptune.kernels.multi_tensor import prepare
from steptune.kernels.multi_tensor.optimizers import Kind, Part, Rule, all_of, rate

WHAT = "the optimizer LAMB from timm, torch_optimizer or Steptune"
OPERATORS = ("lamb_moments", "lamb_update")
STATES = ("exp_avg", "exp_avg_sq")


def _decays(group: Mapping[str, Any]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    return {"decay1": beta1, "share1": 1 - beta1, "decay2": beta2, "share2": 1 - beta2, "eps": group["eps"]}


# --- timm -------------------------------------------------------------------------------------


def _refuse_timm(optimizer: Any) -> str:
    if any(group.get("caution") for group in optimizer.param_groups):
        return "caution=True masks the update by its sign, which the kernel does not support"
    return ""


def _count_timm(group: dict[str, Any]) -> None:
    group["step"] = group.get("step", 0) + 1


def _of_timm(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> Settings:
    decays, lr, decay = _decays(group), rate(group), group["weight_decay"]
    if not group["grad_averaging"]:
        decays["share1"] = 1.0
    corrections = {}
    if group["bias_correction"]:
        corrections = {
            "mean_correction": 1 / (1 - decays["decay1"] ** group["step"]),
            "root_correction": 1 / math.sqrt(1 - decays["decay2"] ** group["step"]),
        }
    decoupled = bool(group.get("decoupled_decay", False))
    scale = lr**2 / optimizer.defaults["lr"] if group.get("corrected_weight_decay", False) else lr
    return Settings(
        rate=lr,
        **decays,
        **corrections,
        weight_decay=0.0 if decoupled else decay,
        shrink=1 - scale * decay if decoupled else 1.0,
        adapts=decay != 0 or bool(group["always_adapt"]),
        largest_ratio=1.0 if group["trust_clip"] else math.inf,
    )


# --- torch_optimizer --------------------------------------------------------------------------


def _of_torch_optimizer(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> Settings:
    state = optimizer.state[parameter]
    state["step"] = state.get("step", 0) + 1
    decays = _decays(group)
    correction = 1.0
    if optimizer.debias:
        correction = math.sqrt(1 - decays["decay2"] ** state["step"]) / (1 - decays["decay1"] ** state["step"])
    return Settings(
        rate=rate(group) * correction,
        **decays,
        weight_decay=group["weight_decay"],
        adapts=not optimizer.adam,
        largest_weight_norm=optimizer.clamp_value,
    )


def _note_norms(optimizer: Any, parameters: list[Tensor], norms: Tensor) -> None:
    """Record weight norm, update norm and trust ratio in each parameter's state, as torch_optimizer's LAMB does."""
    owners = {parameter.data_ptr(): parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter, row in zip(parameters, norms, strict=True):
        state = optimizer.state[owners[parameter.data_ptr()]]
        state["weight_norm"], state["adam_norm"], state["trust_ratio"] = row.unbind()


# --- Steptune ---------------------------------------------------------------------------------


def _of_steptune(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> Settings:
    state = optimizer.state[parameter]
    state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)) + 1
    step, decays = int(state["step"]), _decays(group)
    adapts = not (group["exclude_vectors"] and parameter.dim() < 2)
    return Settings(
        rate=rate(group),
        **decays,
        mean_correction=1 / (1 - decays["decay1"] ** step),
        root_correction=1 / math.sqrt(1 - decays["decay2"] ** step),
        weight_decay=group["weight_decay"] if adapts else 0.0,
        adapts=adapts,
    )


_ADAM = frozenset({"lr", "betas", "eps", "weight_decay"})
_TIMM = frozenset(
    {
        "bias_correction",
        "grad_averaging",
        "max_grad_norm",
        "trust_clip",
        "always_adapt",
        "caution",
        "decoupled_decay",
        "corrected_weight_decay",
    }
)


def _by_kernel(parts: list[Part]) -> list[Tensor]:
    """Clip all gradients by their common norm, and update all tensors by the kernel."""
    launches = [
        prepare(list(zip(part.parameters, part.gradients, *part.states, strict=True)), part.settings) for part in parts
    ]
    limit = parts[0].max_grad_norm
    squares = launches[0].numbers.new_zeros(())
    if limit is not None:
        squares = torch.stack([lamb.gradient_squares(launch) for launch in launches]).sum()
    clip = lamb.clip_factor(squares, limit)
    return [lamb.update(launch, clip) for launch in launches]


def _by_reference(parts: list[Part]) -> list[Tensor]:
    return [
        lamb.reference(p.parameters, p.gradients, p.states[0], p.states[1], p.settings, p.max_grad_norm) for p in parts
    ]


RULE = Rule(
    word="lamb",
    by_kernel=_by_kernel,
    by_reference=_by_reference,
    kinds={
        "timm.optim.lamb.Lamb": Kind(
            options=_ADAM | _TIMM,
            refusal=_refuse_timm,
            begin=_count_timm,
            settings=_of_timm,
            states=all_of(STATES),
            max_grad_norm=lambda optimizer: optimizer.defaults["max_grad_norm"],
        ),
        "torch_optimizer.lamb.Lamb": Kind(
            options=_ADAM, settings=_of_torch_optimizer, states=all_of(STATES), end=_note_norms
        ),
        "steptune.tuner.training.optimizers.lamb.Lamb": Kind(
            options=_ADAM | {"exclude_vectors"}, settings=_of_steptune, states=all_of(STATES)
        ),
    },
)
