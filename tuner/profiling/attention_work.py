"""FLOP and bytes of fused attention, forward and backward, for every PyTorch backend and FlashAttention.

The forward pass has two matmuls (Q·K, P·V), the backward pass five (Q·K again, and four gradients), as
`torch.utils.flop_counter` counts. Packed sequences have no count, because shapes do not tell their lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

from steptune.tuner.profiling.argument_shapes import Arguments
from steptune.tuner.profiling.work import Work, dtype_of, traffic


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Argument positions and layout of one attention operator.

    Attributes:
        causal: Position of the causal flag, or of the kind of mask.
        heads_last: Whether shapes are [batch, sequence, heads, channels]; else heads come before the sequence.
        backward: Whether the gradient of the output comes first, then query, key and value.
        packed: Positions of the lengths of packed sequences.
        window: Position of the size of a sliding window, if the operator supports one.
    """

    causal: int
    heads_last: bool = False
    backward: bool = False
    packed: tuple[int, ...] = ()
    window: int = -1


BACKENDS: dict[str, Backend] = {
    "_scaled_dot_product_flash_attention": Backend(causal=4),
    "_scaled_dot_product_efficient_attention": Backend(causal=6),
    "_scaled_dot_product_cudnn_attention": Backend(causal=6),
    "_scaled_dot_product_flash_attention_for_cpu": Backend(causal=4),
    "_scaled_dot_product_fused_attention_overrideable": Backend(causal=5),
    "_cudnn_attention_forward": Backend(causal=10, packed=(4, 5)),
    "_flash_attention_forward": Backend(causal=8, heads_last=True, packed=(3, 4), window=11),
    "_efficient_attention_forward": Backend(causal=9, heads_last=True, packed=(4, 5)),
    "flash_attn::_flash_attn_forward": Backend(causal=5, heads_last=True, window=6),
    "_scaled_dot_product_flash_attention_backward": Backend(causal=11, backward=True, packed=(6, 7)),
    "_scaled_dot_product_efficient_attention_backward": Backend(causal=11, backward=True),
    "_scaled_dot_product_cudnn_attention_backward": Backend(causal=14, backward=True, packed=(9, 10)),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Backend(causal=7, backward=True),
    "_scaled_dot_product_fused_attention_overrideable_backward": Backend(causal=13, backward=True, packed=(8, 9)),
    "_cudnn_attention_backward": Backend(causal=14, backward=True, packed=(9, 10)),
    "_flash_attention_backward": Backend(causal=11, heads_last=True, backward=True, packed=(6, 7), window=15),
    "_efficient_attention_backward": Backend(causal=14, heads_last=True, backward=True, packed=(6, 7)),
    "flash_attn::_flash_attn_backward": Backend(causal=11, heads_last=True, backward=True, window=12),
}


def attention_work(name: str, arguments: Arguments) -> Work:
    """Return the work of one call of an operator in `BACKENDS`."""
    backend = BACKENDS[name]
    first = 1 if backend.backward else 0
    query, key, value = (arguments.shape(position) for position in range(first, first + 3))
    if not len(query) == len(key) == len(value) == 4 or any(map(arguments.shape, backend.packed)):
        return Work()
    heads, rows = (2, 1) if backend.heads_last else (1, 2)
    pairs = query[0] * query[heads] * query[rows] * key[rows]
    if backend.backward:
        flops = 2 * pairs * (3 * query[3] + 2 * value[3])
    else:
        flops = 2 * pairs * (query[3] + value[3])
    output = (*query[:3], value[3])
    passed = arguments.tensors[first : first + 3]
    # The gradient of the output, and the output itself, are as large as each other.
    moved = (output, output, query, key, value) if backend.backward else (output,)
    return Work(
        flops, traffic(passed, *moved), least_flops=_least(backend, arguments, flops), dtype=dtype_of(arguments, first)
    )


def _least(backend: Backend, arguments: Arguments, flops: int) -> int:
    """Return the minimum FLOP if masked pairs are skipped: half of all FLOP if the mask may be causal, 0 if attention
    has a window.
    """
    if backend.window >= 0 and any(size >= 0 for size in arguments.integers(backend.window)):
        return 0
    whole = arguments.flags(backend.causal) == (False,) or arguments.integers(backend.causal) == (0,)
    return flops if whole else flops // 2
