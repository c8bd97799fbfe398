"""The repeated blocks of a model: one definition for checkpointing, compilation and wrapping."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def longest_repetition(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the members of the longest ModuleList or Sequential whose members are all of one class.

    Of equally long ones the outermost wins (modules are visited parents first). Containers of
    fewer than two members, and members without parameters, are not blocks.
    """
    import torch

    best: list[torch.nn.Module] = []
    for module in model.modules():
        if not isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
            continue
        members = list(module)
        same_class = len({type(member) for member in members}) == 1
        has_parameters = all(any(True for _ in member.parameters()) for member in members)
        if len(members) > max(1, len(best)) and same_class and has_parameters:
            best = members
    return best
