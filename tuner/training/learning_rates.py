"""Learning rates on the device, where an update that is recorded as a CUDA graph reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class LearningRates:
    """Learning rates as tensors on the device, for optimizers that read them there.

    The scheduler goes on computing with its own numbers; what it sets is filled in before the next replay.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        import torch

        self.on_device = all(_reads_tensor(optimizer, group) for group in optimizer.param_groups)
        self._optimizer = optimizer
        self._values: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        if self.on_device:
            self._values = [None] * len(optimizer.param_groups)
            self._tensors = [torch.zeros((), device=device) for _ in optimizer.param_groups]

    def fill(self) -> None:
        if not self.on_device:
            return
        for number, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            if hasattr(rate, "data_ptr"):
                self._tensors[number].copy_(rate, non_blocking=True)
            elif rate != self._values[number]:
                self._tensors[number].fill_(rate)
                self._values[number] = rate

    @contextmanager
    def given(self) -> Iterator[None]:
        """Give the optimizer the tensors as its learning rates while the context is active."""
        groups = self._optimizer.param_groups if self.on_device else []
        rates = [group["lr"] for group in groups]
        for group, tensor in zip(groups, self._tensors, strict=True):
            group["lr"] = tensor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def _reads_tensor(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Say whether an optimizer reads a group's learning rate as a tensor: every fused update does, and so does Adam,
    unless its update is multi-tensor and not capturable.
    """
    import torch

    return bool(
        group.get("fused")
        or (isinstance(optimizer, torch.optim.Adam) and (group.get("capturable") or not group.get("foreach")))
    )
