"""Conversion of attention blocks to sequence-first layout, in which `nn.MultiheadAttention` computes.

The module works on (tokens, batch, width). Given (batch, tokens, width) with `batch_first=True` it transposes its input
and its output, and its matmuls then copy non-contiguous tensors, in every block. Here the first block of a stack gets
transposed input, the last one's output is transposed back, and all between stay in the module's order.

That is the same computation where all other parts of a block treat every position alike. This is known only of torch's
modules that are listed here, and is wrong for parts that act per sample (stochastic depth, pooling).

Source: pycls, vit.py (sequence-first layout), https://github.com/facebookresearch/pycls
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MARK = "_steptune_batch_second"
_ATTENTION = "MultiheadAttention"
_PER_POSITION = frozenset(
    {
        "CELU",
        "Dropout",
        "ELU",
        "GELU",
        "Identity",
        "LayerNorm",
        "LeakyReLU",
        "Linear",
        "Mish",
        "NonDynamicallyQuantizableLinear",
        "RMSNorm",
        "ReLU",
        "ReLU6",
        "SiLU",
        "Tanh",
    }
)
_LEAST_BLOCKS = 2
"""Minimum number of blocks: with a single block, no transposition would be saved."""


def can_be_batch_second(blocks: Sequence[torch.nn.Module]) -> bool:
    """Say whether there are several blocks, and each uses torch's batch-first attention and otherwise only modules of
    torch that process each position independently.
    """
    return len(blocks) >= _LEAST_BLOCKS and all(map(_is_known, blocks))


def to_batch_second(blocks: Sequence[torch.nn.Module]) -> None:
    """Change a stack of blocks in place to compute as (tokens, batch, width); its input and output stay batch-first.

    A block takes the tensor as its first argument and returns it, alone or first in a tuple.
    """
    for block in blocks:
        for module in _attention_of(block):
            module.batch_first = False
    blocks[0].register_forward_pre_hook(_transposed_input)
    blocks[-1].register_forward_hook(_transposed_output)
    setattr(blocks[0], MARK, True)


def is_batch_second(model: torch.nn.Module) -> bool:
    return any(getattr(module, MARK, False) for module in model.modules())


def _is_known(block: torch.nn.Module) -> bool:
    attention = _attention_of(block)
    if not attention or not all(module.batch_first for module in attention):
        return False
    own = {id(part) for module in attention for part in module.modules()}
    leaves = (m for m in block.modules() if id(m) not in own and not any(True for _ in m.children()))
    return all(_is_torchs(leaf) and type(leaf).__name__ in _PER_POSITION for leaf in leaves)


def _attention_of(block: torch.nn.Module) -> list[Any]:
    return [m for m in block.modules() if _is_torchs(m) and type(m).__name__ == _ATTENTION]


def _is_torchs(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _transposed_input(block: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].transpose(0, 1).contiguous(), *args[1:])


def _transposed_output(block: torch.nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (output[0].transpose(0, 1), *output[1:])
    return output.transpose(0, 1)
