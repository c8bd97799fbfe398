"""Minimum FLOP and bytes of an operator, from the shapes of its arguments.

FLOP are those of matmuls, convolutions and attention, counted as `torch.utils.flop_counter` does. A figure that
shapes alone do not determine is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import reduce

from steptune.tuner.profiling.argument_shapes import Arguments, Shape
from steptune.tuner.profiling.attention_work import BACKENDS, attention_work
from steptune.tuner.profiling.convolution_work import CONVOLUTIONS, ConvolutionWork
from steptune.tuner.profiling.memory_work import memory_bytes, optimizer_bytes
from steptune.tuner.profiling.work import Work, dtype_of, traffic

MATRIX_PRODUCTS = {
    # Positions of both factors.
    "mm": (0, 1),
    "addmm": (1, 2),
    "_addmm_activation": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "_scaled_mm": (0, 1),
    "_int_mm": (0, 1),
}
GROUPED = ("_grouped_mm", "_scaled_grouped_mm")
TEMPLATE = "triton_tem_"
GRADIENT = "torch::autograd::AccumulateGrad"
"""Function that is called once per parameter in each backward pass, with the parameter's gradient."""


class WorkModel:
    """Model of the work (FLOP and bytes) of the operators of one trace."""

    def __init__(
        self, calls: Iterable[tuple[str, Arguments]], parameters: Mapping[Arguments, int] | None = None
    ) -> None:
        """Initialise from pairs of an operator's name ("aten::mm") and its arguments, each distinct pair once.

        Args:
            parameters: Arguments of the calls that accumulate a gradient, with the number of calls.
        """
        known = [(_base(name), arguments) for name, arguments in calls]
        self._convolutions = ConvolutionWork(known)
        sizes = {tensor.item_bytes for arguments in parameters or {} for tensor in arguments.tensors if tensor}
        self._item_bytes = sizes.pop() if len(sizes) == 1 else 0
        self._num_parameters = _num_parameters(parameters or {})

    def work(self, name: str, arguments: Arguments, calls_per_step: float = 1.0) -> Work:
        """Return the work of one call of an operator.

        Args:
            calls_per_step: Calls of this operator per step: an optimizer makes one for each parameter group.
        """
        base = _base(name)
        if base in MATRIX_PRODUCTS:
            return _product(arguments, *MATRIX_PRODUCTS[base])
        if base == "linear":
            return _linear(arguments)
        if base in GROUPED:
            return _grouped(arguments)
        if base.startswith(TEMPLATE):
            return _template(arguments)
        if base in CONVOLUTIONS:
            return self._convolutions.work(base, arguments)
        if base in BACKENDS:
            return attention_work(base, arguments)
        elements = round(self._num_parameters / max(1.0, calls_per_step))
        return Work(
            num_bytes=memory_bytes(base, arguments) or optimizer_bytes(base, arguments, self._item_bytes, elements)
        )


def _base(name: str) -> str:
    return name.removeprefix("aten::")


def _num_parameters(gradients: Mapping[Arguments, int]) -> int:
    """Return the total number of elements of all parameters, or a lower bound on it.

    They are counted from the gradients, assuming the largest number of backward passes that agrees with all call
    counts.
    """
    passes = reduce(math.gcd, gradients.values(), 0)
    sizes = {arguments: sum(tensor.size for tensor in arguments.tensors if tensor) for arguments in gradients}
    return sum(sizes[arguments] * (count // passes) for arguments, count in gradients.items())


def _product(arguments: Arguments, left: int, right: int) -> Work:
    a, b = arguments.shape(left), arguments.shape(right)
    if len(a) != len(b) or len(a) not in (2, 3) or a[:-2] != b[:-2] or a[-1] != b[-2]:
        return Work()
    output = (*a[:-1], b[-1])
    return Work(2 * math.prod(output) * a[-1], traffic(arguments.tensors, output), dtype=dtype_of(arguments, left))


def _linear(arguments: Arguments) -> Work:
    rows, weight = arguments.shape(0), arguments.shape(1)
    if len(weight) != 2 or not rows or rows[-1] != weight[1]:
        return Work()
    output = (*rows[:-1], weight[0])
    return Work(2 * math.prod(output) * rows[-1], traffic(arguments.tensors, output), dtype=dtype_of(arguments, 0))


def _grouped(arguments: Arguments) -> Work:
    """Return the work of a grouped matmul (one matmul per expert). Each token belongs to one expert, so the total
    equals that of one matmul of all tokens; two stacks of matrices are multiplied pair by pair.
    """
    a, b = arguments.shape(0), arguments.shape(1)
    if not (len(a) in (2, 3) and len(b) in (2, 3)) or a[-1] != b[-2]:
        return Work()
    experts = a[0] if len(a) == len(b) == 3 else 1
    flops = 2 * experts * a[-2] * a[-1] * b[-1]
    offsets = arguments.shape(2) or arguments.shape(4)
    num_experts = next((shape[0] for shape in (a, b) if len(shape) == 3), offsets[0] if offsets else 0)
    output = (a[-2], b[-1]) if len(a) != len(b) else (num_experts, a[-2], b[-1])
    return Work(flops, traffic(arguments.tensors[:2], output), dtype=dtype_of(arguments, 0))


def _template(arguments: Arguments) -> Work:
    """Return the work of a TorchInductor matmul, with two factors as arguments and their product as the last one."""
    shapes = [tensor.shape for tensor in arguments.tensors if tensor]
    if len(shapes) < 3:
        return Work()
    *factors, output = shapes
    inner = {a[-1] for a in factors for b in factors if a is not b and _multiplies(a, b, output)}
    if len(inner) != 1:
        return Work()
    return Work(2 * math.prod(output) * inner.pop(), traffic(arguments.tensors), dtype=dtype_of(arguments, 0))


def _multiplies(a: Shape, b: Shape, output: Shape) -> bool:
    same_rank = len(a) == len(b) == len(output) and len(a) in (2, 3)
    return same_rank and a[:-2] == b[:-2] and a[-1] == b[-2] and output == (*a[:-1], b[-1])
