"""ReLU and max pooling that keep only what their backward pass needs: one bit per element (ReLU), or one byte per
window (pooling).

Autograd keeps a ReLU's output, of which only the sign is needed, and a pooling's input (needed for its shape) and
64-bit indices, of which only the place within the window is needed. The gradients are bit for bit those of torch's own
modules.

Source: Jain et al., "Gist: Efficient Data Encoding for Deep Neural Network Training" (ISCA 2018), "Binarize"
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from steptune.tuner.training.encodings import Layout, is_dense, masked, relu_mask

if TYPE_CHECKING:
    import torch

MAX_WINDOW = 256
"""Maximum number of positions in a window, because a position is stored in one byte."""

Counting = Callable[[int, int], None]
Noting = Callable[["torch.Tensor"], None]


def keep_masks(model: torch.nn.Module, count: Counting, note: Noting) -> None:
    """Replace the forward pass of every `nn.ReLU` and `nn.MaxPool2d` of a model; its state keys stay the same.

    Args:
        count: Called with the bytes that autograd would keep, and the bytes that are kept instead.
        note: Called with every output: non-negative, with many zeros.
    """
    from torch import nn

    for module in model.modules():
        if type(module) is nn.ReLU:
            module.forward = _rectifying(module, count, note)  # type: ignore[method-assign]
        elif type(module) is nn.MaxPool2d:
            module.forward = _pooling(module, count, note)  # type: ignore[method-assign]


def _rectifying(module: torch.nn.ReLU, count: Counting, note: Noting) -> Any:
    import torch

    original = module.forward
    function: Any = _functions()[0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        # A view must change in its base too, which an autograd function of one's own does not promise.
        if not (torch.is_grad_enabled() and x.requires_grad and is_dense(x)) or (module.inplace and x._is_view()):
            return original(x)
        output: torch.Tensor = function.apply(x, module.inplace, count)
        note(output)
        return output

    return forward


def _pooling(module: torch.nn.MaxPool2d, count: Counting, note: Noting) -> Any:
    import torch

    original = module.forward
    function: Any = _functions()[1]

    def forward(x: torch.Tensor) -> torch.Tensor:
        window = Window.of(module)
        if module.return_indices or window.size > MAX_WINDOW or not (torch.is_grad_enabled() and x.requires_grad):
            return original(x)  # type: ignore[no-any-return]
        output: torch.Tensor = function.apply(x, window, count)
        note(output)
        return output

    return forward


class Window:
    """Pooling window: (height, width) pairs of its kernel, stride, padding and dilation."""

    def __init__(self, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> None:
        self.kernel = _pair(kernel)
        self.stride = _pair(stride)
        self.padding = _pair(padding)
        self.dilation = _pair(dilation)
        self.ceil_mode = ceil_mode

    @classmethod
    def of(cls, module: torch.nn.MaxPool2d) -> Window:
        return cls(module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)

    @property
    def size(self) -> int:
        return self.kernel[0] * self.kernel[1]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode

    def places(self, indices: torch.Tensor, width: int) -> torch.Tensor:
        """Convert a tensor (…, H', W') of flat indices in a plane of this width to positions within the windows, as
        uint8.
        """
        import torch

        narrow = indices.int()  # half the memory for a moment; a plane has less than 2³¹ elements
        top, left = self._corners(narrow)
        column = (narrow % width).sub_(left).floor_divide_(self.dilation[1])
        row = narrow.floor_divide_(width).sub_(top).floor_divide_(self.dilation[0])
        return row.mul_(self.kernel[1]).add_(column).to(torch.uint8)

    def indices(self, places: torch.Tensor, width: int) -> torch.Tensor:
        """Convert positions within the window back to indices in the plane."""
        narrow = places.int()
        top, left = self._corners(narrow)
        column = (narrow % self.kernel[1]).mul_(self.dilation[1]).add_(left)
        row = narrow.floor_divide_(self.kernel[1]).mul_(self.dilation[0]).add_(top)
        return row.mul_(width).add_(column).long()

    def _corners(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row (H', 1) and the column (W',) where each window begins, which may be in the padding."""
        import torch

        height, width = like.shape[-2:]
        rows, columns = (torch.arange(n, dtype=like.dtype, device=like.device) for n in (height, width))
        top = rows[:, None] * self.stride[0] - self.padding[0]
        left = columns * self.stride[1] - self.padding[1]
        return top, left


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@cache
def _functions() -> tuple[Any, Any]:
    """Return the autograd functions; they are created on demand, because creating them loads torch."""
    import torch

    class Rectify(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, inplace: bool, count: Counting) -> torch.Tensor:
            if inplace:
                ctx.mark_dirty(x)
                output = x.relu_()
            else:
                output = x.relu()
            mask = relu_mask(output)
            ctx.save_for_backward(mask)
            ctx.layout = Layout.of(output)
            count(_bytes(output), _bytes(mask))
            return output

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            (mask,) = ctx.saved_tensors
            return masked(gradient, mask, ctx.layout), None, None

    class Pool(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, window: Window, count: Counting) -> torch.Tensor:
            output, indices = torch.ops.aten.max_pool2d_with_indices(x, *window.arguments)
            places = window.places(indices, x.shape[-1])
            ctx.save_for_backward(places)
            ctx.window, ctx.layout, ctx.device = window, Layout.of(x), x.device
            count(_bytes(x) + _bytes(indices), _bytes(places))
            return output  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            (places,) = ctx.saved_tensors
            layout: Layout = ctx.layout
            indices = ctx.window.indices(places, layout.shape[-1])
            # Of the input only its shape and strides are read: the result stands in for it.
            result = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=ctx.device)
            backward = torch.ops.aten.max_pool2d_with_indices_backward.grad_input
            backward(gradient, result, *ctx.window.arguments, indices, grad_input=result)
            return result, None, None

    return Rectify, Pool
