"""Selection of a model's expert implementation: those that the model offers, and the one in use.

Two kinds of models have it: those of transformers, which have `set_experts_implementation` and their own names for the
implementations, and modules with the attributes `expert_implementations` (names) and `expert_implementation` (the
one in use, which may be set). Some modules of the second kind let their experts run on other ranks: they have
`experts`, a module whose parameters all have the experts as first dimension, and `exchange`, which may be set to a
function that runs the slots (experts, tokens, width) of all experts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

IMPLEMENTATIONS = ("looped", "batched", "grouped")
TRANSFORMERS_NAMES = {"looped": "eager", "batched": "batched_mm", "grouped": "grouped_mm"}


def offered_implementations(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the implementations that all expert layers in the model offer; none without such layers."""
    layers = [set(layer.expert_implementations) for layer in _layers(model)]
    layers += [set(IMPLEMENTATIONS) for _ in _transformers_models(model)]
    common = set.intersection(*layers) if layers else set()
    return tuple(name for name in IMPLEMENTATIONS if name in common)


def used_implementation(model: torch.nn.Module) -> str | None:
    """Return the implementation that all expert layers use; None if there are no such layers, or if they use different
    ones.
    """
    names = {str(layer.expert_implementation) for layer in _layers(model)}
    own = {theirs: name for name, theirs in TRANSFORMERS_NAMES.items()}
    for inner in _transformers_models(model):
        theirs = inner.config._experts_implementation
        names.add(own.get(theirs, str(theirs)))
    return names.pop() if len(names) == 1 else None


def use_implementation(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """Set the implementation of every expert layer."""
    for layer in _layers(model):
        layer.expert_implementation = name
    for inner in _transformers_models(model):
        inner.set_experts_implementation(TRANSFORMERS_NAMES[name])
    return model


def movable_layers(model: torch.nn.Module) -> list[Any]:
    """Return the expert layers whose experts may be placed on other ranks."""
    return [layer for layer in _layers(model) if hasattr(layer, "exchange")]


def num_movable_experts(model: torch.nn.Module) -> int:
    """Return the number that the expert-parallel degree must divide; 0 where no layer's experts can be moved."""
    return math.gcd(*(len(next(layer.experts.parameters())) for layer in movable_layers(model)))


def _layers(model: torch.nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(module, "expert_implementations"))


def _transformers_models(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the outermost transformers models that can set the implementation; each of them also sets it in the models
    inside it.
    """
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        can: Any = getattr(module, "_can_set_experts_implementation", None)
        if module not in inside and can is not None and can():
            inside.update(module.modules())
            yield module
