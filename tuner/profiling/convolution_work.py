"""FLOP and bytes of convolutions.

The output size depends on stride, padding and dilation. Traces of torch 2.1 and later have them among the values of
arguments. In older traces it is taken from the backward pass of the same input and weight, if there is exactly one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from steptune.tuner.profiling.argument_shapes import Arguments, Shape
from steptune.tuner.profiling.work import Work, dtype_of, item_bytes_of, names

_USUAL = (3, 4, 5)
GEOMETRY: dict[str, tuple[int, int, int]] = {
    # Positions of stride, padding, dilation. Input and weight come first.
    **dict.fromkeys(names("conv1d conv2d conv3d convolution _convolution convolution_overrideable"), _USUAL),
    "cudnn_convolution": (3, 2, 4),
    "cudnn_convolution_relu": _USUAL,
    "cudnn_convolution_add_relu": (5, 6, 7),
    **dict.fromkeys(names("mkldnn_convolution miopen_convolution miopen_depthwise_convolution"), (4, 3, 5)),
    "miopen_convolution_relu": _USUAL,
    **dict.fromkeys(names("_conv_depthwise2d conv_depthwise3d slow_conv_dilated2d slow_conv_dilated3d"), (4, 5, 6)),
    **dict.fromkeys(names("thnn_conv2d _slow_conv2d_forward slow_conv3d_forward"), (4, 5, -1)),
    # oneDNN as TorchInductor calls it: input, weight, bias, padding, stride, dilation.
    **dict.fromkeys(names("mkldnn::_convolution_pointwise mkldnn::_convolution_pointwise_"), (4, 3, 5)),
}
TRANSPOSED = names(
    "conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution_transpose miopen_convolution_transpose "
    "mkldnn_convolution_transpose slow_conv_transpose2d slow_conv_transpose3d"
)
MAY_BE_TRANSPOSED = names("convolution _convolution convolution_overrideable")
TRANSPOSED_FLAG = 6
BACKWARD = {
    # Positions of input, output gradient, weight.
    "convolution_backward": (1, 0, 2),
    "cudnn_convolution_backward": (0, 1, 2),
    "mkldnn_convolution_backward": (0, 1, 2),
    "miopen_convolution_backward": (0, 1, 2),
}
BACKWARD_TRANSPOSED_FLAG, BACKWARD_MASK = 7, 10
"""Positions in `convolution_backward` of the transposed flag, and of the mask of wanted gradients (input, weight,
bias).
"""
INPUT_GRADIENTS = names("cudnn_convolution_backward_input miopen_convolution_backward_input")
WEIGHT_GRADIENTS = names("cudnn_convolution_backward_weight miopen_convolution_backward_weight")
CONVOLUTIONS = frozenset({*GEOMETRY, *TRANSPOSED, *BACKWARD}) | INPUT_GRADIENTS | WEIGHT_GRADIENTS


@dataclass(frozen=True)
class Convolution:
    input: Shape
    output: Shape
    weight: Shape
    transposed: bool = False


class ConvolutionWork:
    """Work model for the convolutions of one trace."""

    def __init__(self, calls: Iterable[tuple[str, Arguments]]) -> None:
        """Initialise from the distinct pairs of an operator's name ("convolution") and its arguments."""
        found = {_of_gradient(name, arguments) for name, arguments in calls}
        convolutions = [convolution for convolution in found if convolution]
        self._output = _unique(((c.input, c.weight), c.output) for c in convolutions)
        self._weight = _unique(((c.input, c.output), c.weight) for c in convolutions)

    def work(self, name: str, arguments: Arguments) -> Work:
        """Return the work of one call."""
        if name in BACKWARD:
            return _gradients(name, arguments)
        first, second, third = (arguments.shape(position) for position in range(3))
        if name in INPUT_GRADIENTS:
            return _of(Convolution((), second, third), arguments)
        if name in WEIGHT_GRADIENTS:
            weight = self._weight.get((third, second))
            return _of(Convolution(third, second, weight), arguments) if weight else Work()
        if name in TRANSPOSED or (name in MAY_BE_TRANSPOSED and arguments.flags(TRANSPOSED_FLAG) == (True,)):
            return _of(Convolution(first, (), second, transposed=True), arguments)
        output = _output(arguments, *GEOMETRY[name]) or self._output.get((first, second))
        return _of(Convolution(first, output, second), arguments) if output else Work()


def _unique(pairs: Iterable[tuple[tuple[Shape, Shape], Shape]]) -> dict[tuple[Shape, Shape], Shape]:
    """Return each key that has only one distinct value, with this value."""
    values: dict[tuple[Shape, Shape], set[Shape]] = {}
    for key, value in pairs:
        values.setdefault(key, set()).add(value)
    return {key: next(iter(found)) for key, found in values.items() if len(found) == 1}


def _output(arguments: Arguments, stride: int, padding: int, dilation: int) -> Shape | None:
    """Return the shape of the output, from the arguments at these positions; None if they are unknown."""
    image, weight = arguments.shape(0), arguments.shape(1)
    rank = len(weight) - 2
    if rank < 1 or len(image) != rank + 2:
        return None
    steps, pads = arguments.integers(stride), arguments.integers(padding)
    holes = arguments.integers(dilation) if dilation >= 0 else (1,)
    if not (steps and pads and holes and min(steps) > 0):
        return None
    # One size may be said for all dimensions.
    each = (sizes * rank if len(sizes) == 1 else sizes for sizes in (steps, pads, holes))
    windows = zip(image[2:], weight[2:], *each, strict=False)
    spatial = tuple((size + 2 * pad - hole * (window - 1) - 1) // step + 1 for size, window, step, pad, hole in windows)
    fits = len(spatial) == rank and all(size > 0 for size in spatial)
    return (image[0], weight[0], *spatial) if fits else None


def _of_gradient(name: str, arguments: Arguments) -> Convolution | None:
    """Return the convolution that a call of the backward pass describes."""
    if name not in BACKWARD:
        return None
    image, output, weight = (arguments.shape(position) for position in BACKWARD[name])
    same_rank = len(image) == len(output) == len(weight) >= 3
    transposed = arguments.flags(BACKWARD_TRANSPOSED_FLAG) == (True,)
    return Convolution(image, output, weight, transposed) if same_rank else None


def _gradients(name: str, arguments: Arguments) -> Work:
    """Return the work of the backward pass: the gradients of input and weight each cost as much as the forward pass.
    The recorded mask tells which of the two are computed; without a mask, both count.
    """
    convolution = _of_gradient(name, arguments)
    if convolution is None:
        return Work()
    one = _of(convolution, arguments)
    wanted = arguments.flags(BACKWARD_MASK)[:2] if name == "convolution_backward" else ()
    count = sum(wanted) if wanted else 2
    # Each gradient reads and writes another of input and weight, so the bytes grow with them.
    flops, num_bytes = (None if amount is None else count * amount for amount in (one.flops, one.num_bytes))
    return Work(flops, num_bytes, dtype=one.dtype)


def _of(convolution: Convolution, arguments: Arguments) -> Work:
    """Return the work of a convolution: 2 · elements of the output (transposed: of the input) · elements of one filter
    (channels of a group times its window).
    """
    moved = convolution.input if convolution.transposed else convolution.output
    if len(moved) < 3 or len(moved) != len(convolution.weight):
        return Work()
    flops = 2 * math.prod(moved) * math.prod(convolution.weight[1:])
    size = item_bytes_of(arguments.tensors)
    shapes = (convolution.input, convolution.output, convolution.weight)
    elements = sum(math.prod(shape) for shape in shapes if shape)
    num_bytes = elements * size if size and convolution.input and convolution.output else None
    return Work(flops, num_bytes, dtype=dtype_of(arguments, 1))
