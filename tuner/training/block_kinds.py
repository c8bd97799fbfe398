"""Grouping of a model's repeated blocks by kind: all blocks of one kind are compiled once.

TorchDynamo compiles a block once for all that run the same code on parameters of the same shapes with the same plain
attributes: a rate of stochastic depth or the size of a shifted window makes a block a kind of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PLAIN = (bool, int, float, str, type(None))
_OWN = {"training"}
"""Plain attributes that every module has, and that do not distinguish kinds of blocks."""


def block_kinds(blocks: Sequence[torch.nn.Module]) -> list[int]:
    """Return each block's kind as a number, counted from 0 in order of first occurrence.

    An attribute that equals every block's position in the model is taken for its index and ignored: code seldom
    computes with it.
    """
    attributes = [_plain_attributes(block) for block in blocks]
    of_first = attributes[0] if attributes else {}
    indices = {
        key
        for key, first in of_first.items()
        if type(first) is int and all(found.get(key) == place for place, found in enumerate(attributes))
    }
    numbers: dict[Hashable, int] = {}
    kinds = []
    for block, found in zip(blocks, attributes, strict=True):
        shapes = tuple(tuple(parameter.shape) for parameter in block.parameters())
        plain = tuple(item for item in found.items() if len(blocks) == 1 or item[0] not in indices)
        kinds.append(numbers.setdefault((shapes, plain), len(numbers)))
    return kinds


def _plain_attributes(block: torch.nn.Module) -> dict[tuple[str, str], Hashable]:
    """Return the plain attributes of all of a block's modules, by module name and attribute name, with the modules'
    classes.
    """
    found: dict[tuple[str, str], Hashable] = {}
    for name, module in block.named_modules():
        found[name, "class"] = f"{type(module).__module__}.{type(module).__qualname__}"
        for key, value in vars(module).items():
            if key not in _OWN and not key.startswith("_") and _is_plain(value):
                found[name, key] = tuple(value) if isinstance(value, list) else value
    return found


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, list | tuple) and all(isinstance(v, _PLAIN) for v in value))
