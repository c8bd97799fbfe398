"""How much an operator computes and moves at least, from the shapes of its arguments.

FLOP count a multiplication and an addition as two, as `torch.utils.flop_counter` does. Bytes are
compulsory traffic: every input read once, every output written once. What cannot be said from shapes
alone is None. The output of a convolution depends on its stride, which shapes do not tell: it is taken
from the backward pass of the same input and weight, where the trace has exactly one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steptune.tuner.profiling.argument_shapes import Arguments, Shape, Tensor


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CONVOLUTIONS = _names(
    "conv1d conv2d conv3d convolution _convolution cudnn_convolution mkldnn_convolution miopen_convolution "
    "thnn_conv2d _slow_conv2d_forward slow_conv3d_forward convolution_overrideable"
)
CONVOLUTION_BACKWARD = {
    # Positions of input, output gradient, weight.
    "convolution_backward": (1, 0, 2),
    "cudnn_convolution_backward": (0, 1, 2),
    "mkldnn_convolution_backward": (0, 1, 2),
    "miopen_convolution_backward": (0, 1, 2),
}
INPUT_GRADIENTS = frozenset({"cudnn_convolution_backward_input", "miopen_convolution_backward_input"})
WEIGHT_GRADIENTS = frozenset({"cudnn_convolution_backward_weight", "miopen_convolution_backward_weight"})
MATRIX_PRODUCTS = {
    # Positions of both factors.
    "mm": (0, 1),
    "addmm": (1, 2),
    "_addmm_activation": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "_scaled_mm": (0, 1),
}
ELEMENTWISE = _names(
    "add sub rsub mul div pow neg abs exp log sqrt rsqrt reciprocal sigmoid tanh relu gelu silu leaky_relu elu "
    "hardtanh hardswish softplus mish clamp clamp_min clamp_max threshold where sin cos erf sign floor ceil round "
    "square addcmul addcdiv lerp masked_fill eq ne lt gt le ge logical_and logical_or logical_not bitwise_and "
    "bitwise_or bitwise_not maximum minimum threshold_backward gelu_backward silu_backward sigmoid_backward "
    "tanh_backward leaky_relu_backward elu_backward hardtanh_backward hardswish_backward"
)
FILLS = frozenset({"fill_", "zero_"})


@dataclass(frozen=True)
class Convolution:
    input: Shape
    output: Shape
    weight: Shape


@dataclass(frozen=True)
class Work:
    """Operations and bytes of one call. None: the shapes do not say."""

    flops: int | None = None
    num_bytes: int | None = None


class WorkModel:
    """The work of the operators of one trace."""

    def __init__(self, calls: Iterable[tuple[str, Arguments]]) -> None:
        """Takes the operators' names ("aten::mm") with their arguments, each combination once."""
        found = {_convolution(_base(name), arguments) for name, arguments in calls}
        convolutions = [convolution for convolution in found if convolution]
        self._output = _unique(((c.input, c.weight), c.output) for c in convolutions)
        self._weight = _unique(((c.input, c.output), c.weight) for c in convolutions)

    def work(self, name: str, arguments: Arguments) -> Work:
        """Work of one call of an operator."""
        base = _base(name)
        if base in MATRIX_PRODUCTS:
            return _product(arguments, *MATRIX_PRODUCTS[base])
        if base == "linear":
            return _linear(arguments)
        if base in CONVOLUTIONS or base in CONVOLUTION_BACKWARD or base in INPUT_GRADIENTS | WEIGHT_GRADIENTS:
            return self._of_convolution(base, arguments)
        return Work(num_bytes=_elementwise_bytes(base, arguments))

    def _of_convolution(self, base: str, arguments: Arguments) -> Work:
        if base in CONVOLUTION_BACKWARD:
            convolution = _convolution(base, arguments)
            # The gradients of input and weight cost as much as the forward pass each. Shapes do not tell where
            # one of them is not needed, as that of the images in a first layer.
            return _doubled(_of(convolution, arguments)) if convolution else Work()
        first, second, third = (arguments.shape(position) for position in range(3))
        if base in INPUT_GRADIENTS:
            return _of(Convolution((), second, third), arguments)
        if base in WEIGHT_GRADIENTS:
            weight = self._weight.get((third, second))
            return _of(Convolution(third, second, weight), arguments) if weight else Work()
        output = self._output.get((first, second))
        return _of(Convolution(first, output, second), arguments) if output else Work()


def _base(name: str) -> str:
    return name.removeprefix("aten::")


def _unique(pairs: Iterable[tuple[tuple[Shape, Shape], Shape]]) -> dict[tuple[Shape, Shape], Shape]:
    """Keys with one value only."""
    values: dict[tuple[Shape, Shape], set[Shape]] = {}
    for key, value in pairs:
        values.setdefault(key, set()).add(value)
    return {key: next(iter(found)) for key, found in values.items() if len(found) == 1}


def _convolution(base: str, arguments: Arguments) -> Convolution | None:
    """Convolution that a call of the backward pass states."""
    if base not in CONVOLUTION_BACKWARD:
        return None
    shapes = [arguments.shape(position) for position in CONVOLUTION_BACKWARD[base]]
    same_rank = len(shapes[0]) == len(shapes[1]) == len(shapes[2]) >= 3
    return Convolution(*shapes) if same_rank else None


def _of(convolution: Convolution, arguments: Arguments) -> Work:
    """2 · elements of the output · elements of one filter (channels of a group times its window)."""
    if len(convolution.output) < 3 or len(convolution.output) != len(convolution.weight):
        return Work()
    flops = 2 * math.prod(convolution.output) * math.prod(convolution.weight[1:])
    size = _item_bytes(arguments.tensors)
    shapes = (convolution.input, convolution.output, convolution.weight)
    elements = sum(math.prod(shape) for shape in shapes if shape)
    return Work(flops, elements * size if size and convolution.input else None)


def _doubled(work: Work) -> Work:
    """Both gradients. Each reads and writes another of input and weight, so the bytes are twice those as well."""
    return Work(*(None if amount is None else 2 * amount for amount in (work.flops, work.num_bytes)))


def _product(arguments: Arguments, left: int, right: int) -> Work:
    a, b = arguments.shape(left), arguments.shape(right)
    if len(a) != len(b) or len(a) not in (2, 3) or a[:-2] != b[:-2] or a[-1] != b[-2]:
        return Work()
    output = (*a[:-1], b[-1])
    return Work(2 * math.prod(output) * a[-1], _traffic(arguments.tensors, output))


def _linear(arguments: Arguments) -> Work:
    rows, weight = arguments.shape(0), arguments.shape(1)
    if len(weight) != 2 or not rows or rows[-1] != weight[1]:
        return Work()
    output = (*rows[:-1], weight[0])
    return Work(2 * math.prod(output) * rows[-1], _traffic(arguments.tensors, output))


def _traffic(tensors: Sequence[Tensor | None], output: Shape) -> int | None:
    """Bytes of all inputs and of an output of the first one's type."""
    present = [tensor for tensor in tensors if tensor]
    size = _item_bytes(present)
    if not size or not all(tensor.item_bytes for tensor in present):
        return None
    return sum(tensor.num_bytes for tensor in present) + math.prod(output) * size


def _elementwise_bytes(base: str, arguments: Arguments) -> int | None:
    """Inputs and output; one that works in place writes its first argument."""
    tensors = [tensor for tensor in arguments.tensors if tensor]
    if not tensors or not all(tensor.item_bytes for tensor in tensors):
        return None
    if base in FILLS:
        return tensors[0].num_bytes
    if base == "copy_":
        return tensors[0].num_bytes + tensors[1].num_bytes if len(tensors) > 1 else None
    if base.removesuffix("_") not in ELEMENTWISE:
        return None
    if base.endswith("_"):
        return sum(tensor.num_bytes for tensor in tensors) + tensors[0].num_bytes
    output = _broadcast([tensor.shape for tensor in tensors])
    return None if output is None else _traffic(tensors, output)


def _broadcast(shapes: Sequence[Shape]) -> Shape | None:
    """The shape that all broadcast to; None where they do not."""
    width = max(map(len, shapes))
    padded = [(1,) * (width - len(shape)) + shape for shape in shapes]
    output = tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))
    fits = all(size in (1, wanted) for shape in padded for size, wanted in zip(shape, output, strict=True))
    return output if fits else None


def _item_bytes(tensors: Sequence[Tensor | None]) -> int:
    return next((tensor.item_bytes for tensor in tensors if tensor), 0)
