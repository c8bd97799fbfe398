"""Shifted-window attention, with one kernel for the forward pass and one for the backward pass; README.md derives it,
`reference.py` defines it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from steptune.kernels.triton_device import is_traced
from steptune.kernels.window_attention import launch
from steptune.kernels.window_attention.geometry import Geometry
from steptune.kernels.window_attention.reference import window_attention as reference

__all__ = ["Geometry", "reference", "unsupported", "window_attention"]

MAX_TOKENS = 256
HEAD_DIMS = (16, 32, 64, 128)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def unsupported(geometry: Geometry, channels: int, heads: int, dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run an attention layer; None where it can."""
    head_dim, rest = divmod(channels, heads)
    if rest or head_dim not in HEAD_DIMS:
        return (
            f"requires heads of {', '.join(map(str, HEAD_DIMS))} channels; this layer has {channels} channels in "
            f"{heads} heads"
        )
    if geometry.num_tokens > MAX_TOKENS:
        return f"requires windows of at most {MAX_TOKENS} tokens; this layer's windows have {geometry.num_tokens}"
    if dtype not in DTYPES:
        return f"needs float32, float16 or bfloat16, not {dtype}"
    return None


def window_attention(
    qkv_bhwc: Tensor,
    table_rh: Tensor,
    geometry: Geometry,
    *,
    scale_h: Tensor,
    qkv_bias_c: Tensor | None = None,
    cosine: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention within each window of a feature map from packed queries, keys and values; return the
    concatenated outputs of all heads.

    Args:
        qkv_bhwc: Packed queries, keys and values of shape (B, H, W, 3C), in the order (3, heads, head_dim).
        table_rh: Bias by relative position, of shape ((2 rows - 1) (2 columns - 1), heads).
        geometry: Windows, shift and padding.
        scale_h: Factor of the scores, one per head, FP32. It gets a gradient only with `cosine`.
        qkv_bias_c: q, k and v of a padding token, of shape (3C,); zeros where it is None. It gets a
            gradient only where there is padding.
        cosine: Whether queries and keys are normalised to length 1 (Swin V2).
        dropout: Probability of dropping a pair of tokens, by the generator of the device.

    Returns:
        The values of shape (B, H, W, C), in the dtype of `qkv_bhwc`.

    Raises:
        ValueError: The kernel does not support the layer (see `unsupported`).
    """
    heads = table_rh.shape[1]
    reason = unsupported(geometry, qkv_bhwc.shape[-1] // 3, heads, qkv_bhwc.dtype)
    if reason is not None:
        raise ValueError(f"window_attention {reason}")
    seed = torch.randint(0, 2**31 - 1, (1,), device=qkv_bhwc.device) if dropout else None
    function: Callable[..., Any] = _forward if is_traced(qkv_bhwc) else FusedWindowAttention.apply
    values: Tensor = function(
        qkv_bhwc,
        table_rh,
        scale_h,
        qkv_bias_c if launch.is_padded(qkv_bhwc.shape, (geometry.rows, geometry.columns)) else None,
        seed,
        [geometry.rows, geometry.columns, geometry.shift_rows, geometry.shift_columns],
        geometry.rolls_before_padding,
        cosine,
        dropout,
    )
    return values


def _run_forward(
    qkv: Tensor,
    table: Tensor,
    scale: Tensor,
    qkv_bias: Tensor | None,
    seed: Tensor | None,
    window: list[int],
    rolls_first: bool,
    cosine: bool,
    dropout: float,
) -> Tensor:
    qkv = launch.dense_map(qkv)
    batch, height, width, channels = qkv.shape
    out = torch.empty((batch, height, width, channels // 3), dtype=qkv.dtype, device=qkv.device)
    plan = _plan(qkv, table, window, rolls_first, cosine, qkv_bias, seed, backward=False)
    plan.run(
        _kernels().window_attention_forward,
        (
            qkv,
            qkv if qkv_bias is None else qkv_bias.contiguous(),
            table.contiguous(),
            scale.contiguous(),
            out,
            qkv if seed is None else seed,
        ),
        (dropout, *plan.sizes, qkv.stride(2), out.stride(2)),
    )
    return out


_forward = torch.library.custom_op("steptune::window_attention", _run_forward, mutates_args=())


@cache
def _kernels() -> ModuleType:
    """Load the kernels' module, and Triton with it."""
    from steptune.kernels.window_attention import kernel

    return kernel


def _plan(
    qkv: Tensor,
    table: Tensor,
    window: list[int],
    rolls_first: bool,
    cosine: bool,
    qkv_bias: Tensor | None,
    seed: Tensor | None,
    *,
    backward: bool,
) -> launch.Plan:
    return launch.plan(
        qkv.shape,
        qkv.dtype,
        table.shape[1],
        tuple(window),
        backward,
        rolls_first,
        cosine,
        qkv_bias is not None,
        seed is not None,
        launch.precision(qkv.dtype),
    )


@_forward.register_fake
def _(
    qkv: Tensor,
    table: Tensor,
    scale: Tensor,
    qkv_bias: Tensor | None,
    seed: Tensor | None,
    window: list[int],
    rolls_first: bool,
    cosine: bool,
    dropout: float,
) -> Tensor:
    batch, height, width, channels = qkv.shape
    return qkv.new_empty((batch, height, width, channels // 3))


def _run_backward(
    grad_out: Tensor,
    qkv: Tensor,
    table: Tensor,
    scale: Tensor,
    qkv_bias: Tensor | None,
    seed: Tensor | None,
    window: list[int],
    rolls_first: bool,
    cosine: bool,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    qkv = launch.dense_map(qkv)
    grad_out = launch.dense_map(grad_out)
    plan = _plan(qkv, table, window, rolls_first, cosine, qkv_bias, seed, backward=True)
    heads, num_tokens = table.shape[1], window[0] * window[1]
    grad_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    parts: dict[str, Any] = {"dtype": torch.float32, "device": qkv.device}
    programs = plan.grid[1]
    bias_parts = torch.empty((programs, heads, num_tokens, num_tokens), **parts)
    padding_parts = torch.empty((programs, 2, qkv.shape[-1] // 3), **parts) if plan.constants["PADDED"] else None
    scale_parts = torch.empty((programs, heads), **parts) if cosine else None
    plan.run(
        _kernels().window_attention_backward,
        (
            qkv,
            qkv if qkv_bias is None else qkv_bias.contiguous(),
            table.contiguous(),
            scale.contiguous(),
            grad_out,
            grad_qkv,
            bias_parts,
            bias_parts if padding_parts is None else padding_parts,
            bias_parts if scale_parts is None else scale_parts,
            qkv if seed is None else seed,
        ),
        (dropout, *plan.sizes, qkv.stride(2), grad_out.stride(2), grad_qkv.stride(2)),
    )
    grad_table = torch.empty_like(table, memory_format=torch.contiguous_format)
    launch.plan_of_table_gradient(heads, window[0], window[1], programs).run(
        _kernels().window_attention_table_gradient, (bias_parts, grad_table)
    )
    grad_scale = None if scale_parts is None else scale_parts.sum(0).to(scale.dtype)
    grad_bias = None
    if qkv_bias is not None:
        grad_bias = torch.zeros_like(qkv_bias)
        if padding_parts is not None:
            grad_bias[qkv_bias.shape[0] // 3 :] = padding_parts.sum(0).flatten()
    return grad_qkv, grad_table, grad_scale, grad_bias


def _backward_operator(*inputs: Any) -> tuple[Tensor, ...]:
    """Run the backward pass with an empty tensor for each missing gradient, because an operator must return tensors."""
    return tuple(inputs[0].new_empty(0) if gradient is None else gradient for gradient in _run_backward(*inputs))


_backward = torch.library.custom_op(
    "steptune::window_attention_backward",
    _backward_operator,
    mutates_args=(),
    schema="(Tensor grad_out, Tensor qkv, Tensor table, Tensor scale, Tensor? qkv_bias, Tensor? seed, "
    "SymInt[] window, bool rolls_first, bool cosine, float dropout) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_backward.register_fake
def _(
    grad_out: Tensor,
    qkv: Tensor,
    table: Tensor,
    scale: Tensor,
    qkv_bias: Tensor | None,
    seed: Tensor | None,
    window: list[int],
    rolls_first: bool,
    cosine: bool,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_bias = grad_out.new_empty(0) if qkv_bias is None else torch.empty_like(qkv_bias)
    grad_table = torch.empty_like(table, memory_format=torch.contiguous_format)
    grad_scale = torch.empty_like(scale) if cosine else grad_out.new_empty(0)
    return qkv.new_empty(qkv.shape), grad_table, grad_scale, grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, table, scale, qkv_bias, seed, *ctx.settings = inputs
    ctx.save_for_backward(qkv, table, scale, qkv_bias, seed)


def _differentiate(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    run = _backward if is_traced(grad_out) else _run_backward
    saved = ctx.saved_tensors  # asked for once: activation checkpointing gives each tensor once
    grad_qkv, grad_table, grad_scale, grad_bias = run(grad_out, *saved, *ctx.settings)
    has_bias, cosine = saved[3] is not None, ctx.settings[2]
    return (
        grad_qkv,
        grad_table,
        grad_scale if cosine else None,
        grad_bias if has_bias else None,
        *[None] * (1 + len(ctx.settings)),
    )


_forward.register_autograd(_differentiate, setup_context=_save)


class FusedWindowAttention(torch.autograd.Function):
    """Window attention as an autograd function, called without the dispatcher; profiles show this class's name."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        values = _run_forward(*inputs)
        _save(ctx, inputs, values)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, grad_out)
