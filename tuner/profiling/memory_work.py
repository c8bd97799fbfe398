"""Bytes of operators that compute little: element-wise, norms, softmax, reductions, embeddings, optimizers, fusions.

The figures are compulsory traffic, the least that any kernel needs; for lookups by index, only the written rows count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from steptune.tuner.profiling.argument_shapes import Arguments, Shape, Tensor
from steptune.tuner.profiling.work import item_bytes_of, names, traffic

ELEMENTWISE = names(
    "add sub rsub mul div pow neg abs exp log sqrt rsqrt reciprocal sigmoid tanh relu gelu silu leaky_relu elu "
    "hardtanh hardswish softplus mish clamp clamp_min clamp_max threshold where sin cos erf sign floor ceil round "
    "square addcmul addcdiv lerp masked_fill eq ne lt gt le ge logical_and logical_or logical_not bitwise_and "
    "bitwise_or bitwise_not maximum minimum threshold_backward gelu_backward silu_backward sigmoid_backward "
    "tanh_backward leaky_relu_backward elu_backward hardtanh_backward hardswish_backward native_dropout "
    "native_dropout_backward"
)
FILLS = names("fill_ zero_ normal_ uniform_ bernoulli_ random_")
LIKE_FIRST = names(
    # Read their arguments and write a tensor of the first one's shape.
    "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward native_group_norm "
    "native_group_norm_backward native_batch_norm native_batch_norm_backward _native_batch_norm_legit "
    "_batch_norm_with_update batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm "
    "miopen_batch_norm_backward _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
    "_masked_softmax cumsum flip roll"
)
READERS = names(
    # Write less than shapes tell: the arguments are what they move at least. A pooling's gradient is as large as the
    # input, which is among its arguments.
    "sum mean amax amin max min norm linalg_vector_norm var std var_mean argmax argmin prod any all logsumexp "
    "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d "
    "_adaptive_avg_pool2d_backward"
)
UPDATES = {
    # Lists of a fused optimizer that are read and written, and that are only read.
    "_fused_adam_": ((0, 2, 3), (1,)),
    "_fused_adamw_": ((0, 2, 3), (1,)),
    "_fused_sgd_": ((0, 2), (1,)),
    "_fused_adagrad_": ((0, 2), (1,)),
}
LOOKUPS = re.compile(r"embedding|index|gather|scatter|slice|select|roll|sort|cat")
"""Pattern for operator names within a fused kernel's name: such an operator may read or write only a part of a tensor.
"""
FUSION = re.compile(r"^triton_(poi|red|per|for)_")


def elementwise_bytes(base: str, arguments: Arguments) -> int | None:
    """Return the bytes of inputs and output; an in-place operator writes its first argument."""
    tensors = [tensor for tensor in arguments.tensors if tensor]
    if base.removesuffix("_") not in ELEMENTWISE or not _known(tensors):
        return None
    if base.endswith("_"):
        return sum(tensor.num_bytes for tensor in tensors) + tensors[0].num_bytes
    output = _broadcast([tensor.shape for tensor in tensors])
    return None if output is None else traffic(tensors, output)


def memory_bytes(base: str, arguments: Arguments) -> int | None:
    """Return the compulsory bytes of one call; None if the shapes do not determine them."""
    tensors = [tensor for tensor in arguments.tensors if tensor]
    if not _known(tensors):
        return None
    if base in FILLS:
        return tensors[0].num_bytes
    if base == "copy_":
        return tensors[0].num_bytes + tensors[1].num_bytes if len(tensors) > 1 else None
    if base in LIKE_FIRST:
        return traffic(tensors, tensors[0].shape)
    if base in READERS:
        return traffic(tensors)
    if FUSION.search(base):
        # Each argument once, as TorchInductor counts for its own benchmarks (`get_num_bytes`).
        return None if LOOKUPS.search(base) else traffic(tensors)
    if base in ("embedding", "index_select", "embedding_dense_backward"):
        return _looked_up(base, arguments)
    return elementwise_bytes(base, arguments)


def optimizer_bytes(base: str, arguments: Arguments, item_bytes: int, elements: int) -> int | None:
    """Return the compulsory bytes of a call of an optimizer operator; None if unknown.

    Args:
        item_bytes: Size of an element of the parameters, which lists of tensors do not tell; 0 where it is not known.
        elements: Number of elements of all parameters in one call, for lists too long to be recorded; 0 if unknown.
    """
    if not item_bytes:
        return None
    if base in UPDATES:
        changed, read = UPDATES[base]
        elements = arguments.elements(0) or elements
        # A long list counts as one that is there, unless it is momentum, which SGD may be without.
        state = [place for place in changed if arguments.elements(place) or (place != 2 or base != "_fused_sgd_")]
        return (2 * len(state) + len(read)) * elements * item_bytes if elements else None
    if base == "_amp_foreach_non_finite_check_and_unscale_":
        return 2 * arguments.elements(0) * item_bytes or None
    if not base.startswith("_foreach_"):
        return None
    lists = sum(arguments.elements(place) for place in range(len(arguments.lists)))
    if base in ("_foreach_zero_", "_foreach_copy_", "_foreach_norm", "_foreach_max"):
        return lists * item_bytes or None
    return (lists + arguments.elements(0)) * item_bytes or None


def _known(tensors: Sequence[Tensor]) -> bool:
    return bool(tensors) and all(tensor.item_bytes for tensor in tensors)


def _looked_up(base: str, arguments: Arguments) -> int | None:
    """Return the compulsory bytes of a table lookup or its backward pass: indices and written rows; the backward pass
    also reads the output's gradient.
    """
    first = arguments.shape(0)
    size = item_bytes_of(arguments.tensors)
    if base == "embedding_dense_backward":
        rows = arguments.integers(2)
        index, gradient = arguments.tensors[1], math.prod(first) * size
        return gradient + index.num_bytes + rows[0] * first[-1] * size if rows and index and first else None
    index = arguments.tensors[1 if base == "embedding" else 2] if len(arguments.tensors) > 2 else None
    whole_rows = len(first) == 2 and (base == "embedding" or arguments.integers(1) == (0,))
    return index.num_bytes + index.size * first[1] * size if whole_rows and index else None


def _broadcast(shapes: Sequence[Shape]) -> Shape | None:
    """Return the shape to which all shapes broadcast; None if they do not."""
    width = max(map(len, shapes))
    padded = [(1,) * (width - len(shape)) + shape for shape in shapes]
    output = tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))
    fits = all(size in (1, wanted) for shape in padded for size, wanted in zip(shape, output, strict=True))
    return output if fits else None
