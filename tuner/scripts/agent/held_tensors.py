"""Tensors that a script keeps in addition to its parameters, each in the shape of a parameter. Averages of the weights
are among them.

An averaged model is called in no training step, so nothing else of a guarded step shows it.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from typing import Any

import torch

MOST_FOR_EACH = 4
"""Maximum number of additional tensors per parameter; if a script keeps more, none is watched."""


class HeldTensors:
    """Tensors with the shape of a parameter that are neither parameters nor their gradients.

    Args:
        parameters: Parameters of the optimizers.
        others: Tensors to ignore, because they do not belong to the script.
    """

    def __init__(self, parameters: Collection[torch.Tensor], others: Collection[torch.Tensor]) -> None:
        shapes = {parameter.shape for parameter in parameters}
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        gc.collect()  # what waits for the collector in a cycle belongs to nobody
        known = {id(tensor) for tensor in (*parameters, *gradients, *others)}
        found = [
            thing
            for thing in gc.get_objects()
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and id(thing) not in known and _is_like(thing, shapes)
        ]
        self.are_too_many = len(found) > MOST_FOR_EACH * len(parameters)
        self._tensors: list[torch.Tensor] = [] if self.are_too_many else found

    def sampled(self, sample: Any) -> dict[str, torch.Tensor]:
        """Return sampled elements of each additional tensor, by tensor number."""
        return {str(number): sample(tensor) for number, tensor in enumerate(self._tensors)}

    @property
    def roundoffs(self) -> dict[str, float]:
        """Distance from 1 to the next larger value in the dtype of each additional tensor, by tensor number."""
        return {str(number): torch.finfo(tensor.dtype).eps for number, tensor in enumerate(self._tensors)}


def _is_like(tensor: torch.Tensor, shapes: Collection[torch.Size]) -> bool:
    plain = tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.is_floating_point()
    try:
        return plain and tensor.shape in shapes and tensor.grad_fn is None
    except RuntimeError:  # a view made without gradients, and changed in place since
        return False
