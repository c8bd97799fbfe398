"""FP32 masters of 16-bit parameters: the optimizer half of precision level O2.

The model computes with 16-bit weights; the optimizer holds FP32 copies. After the backward pass the
16-bit gradients are copied into FP32 ones, and after the update the masters are rounded back. Both
copies are one multi-tensor operation. Definition: apex amp O2 ("master_weights"), with
normalisation layers kept in FP32; see docs/strategies/precision.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class MasterWeights:
    """Pairs every trainable 16-bit parameter with an FP32 master; FP32 ones are their own master."""

    def __init__(self, named_parameters: list[tuple[str, torch.nn.Parameter]]) -> None:
        import torch

        self._names: list[str] = []
        self._masters: list[torch.nn.Parameter] = []
        self._pairs: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
        for name, parameter in named_parameters:
            if not parameter.requires_grad:
                continue
            self._names.append(name)
            if parameter.dtype == torch.float32:
                self._masters.append(parameter)
            else:
                master = torch.nn.Parameter(parameter.detach().float())
                self._masters.append(master)
                self._pairs.append((parameter, master))

    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """What the user's optimizer is given: their own names, FP32 values."""
        return list(zip(self._names, self._masters, strict=True))

    def take_gradients(self) -> None:
        """Copies the 16-bit gradients into FP32 gradients of the masters and frees them."""
        import torch

        sources, targets = [], []
        for parameter, master in self._pairs:
            if parameter.grad is not None:
                master.grad = torch.empty_like(master)
                sources.append(parameter.grad)
                targets.append(master.grad)
                parameter.grad = None
        if targets:
            torch._foreach_copy_(targets, sources)

    def write_back(self) -> None:
        """Rounds the masters into the model's parameters."""
        import torch

        if self._pairs:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in self._pairs], [master for _, master in self._pairs])

    def reload(self) -> None:
        """Takes the masters anew from the model's parameters."""
        import torch

        if self._pairs:
            with torch.no_grad():
                torch._foreach_copy_([master for _, master in self._pairs], [p for p, _ in self._pairs])

    def state(self) -> dict[str, torch.Tensor]:
        """FP32 values by the user's names."""
        return {name: master.detach() for name, master in self.named()}
