"""Change of the memory layout in which norms compute, for disturbed runs of a script; `trials/other_layout.py` does the
same for workloads.

On a CPU, kernels for one layout add up statistics in FP64 and those for another in FP32, one value after another. Over
65,000 values that rounds a hundred times as much as a disturbed output shows, and in all values of a channel alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Layout with channels last, by number of dimensions."""


def put_in_other_layout(part: torch.nn.Module) -> Callable[[], None]:
    """Make a batch or group norm compute in the other memory layout: channels last for a contiguous input, else
    contiguous. Return a function that undoes this. Leave other modules as they are.
    """
    if not isinstance(part, torch.nn.modules.batchnorm._BatchNorm | torch.nn.GroupNorm):
        return lambda: None

    def before(_: Any, arguments: Any) -> Any:
        layouts = _layouts(arguments[0]) if arguments else None
        return None if layouts is None else (_Relaid.apply(arguments[0], *layouts), *arguments[1:])  # type: ignore[no-untyped-call]

    def after(_: Any, arguments: Any, output: Any) -> Any:
        layouts = _layouts(arguments[0]) if arguments else None
        if layouts is None or not isinstance(output, torch.Tensor) or output.dim() != arguments[0].dim():
            return output  # of a user's subclass
        return _Relaid.apply(output, *layouts)  # type: ignore[no-untyped-call]

    handles = part.register_forward_pre_hook(before), part.register_forward_hook(after)

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _layouts(value: Any) -> tuple[torch.memory_format, torch.memory_format] | None:
    """Return the memory layout to which a value is to be converted, and its present layout; None if the value is not to
    be converted.
    """
    is_tensor = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() in LAYOUTS
    if not is_tensor:
        return None
    last = LAYOUTS[value.dim()]
    if value.is_contiguous():
        return last, torch.contiguous_format
    return (torch.contiguous_format, last) if value.is_contiguous(memory_format=last) else None


class _Relaid(torch.autograd.Function):
    """Autograd function that returns a tensor in another memory layout, and the gradient in the tensor's original
    layout.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, layout: torch.memory_format, own: torch.memory_format) -> torch.Tensor:
        ctx.own = own
        return tensor.clone(memory_format=layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].contiguous(memory_format=ctx.own), None, None
