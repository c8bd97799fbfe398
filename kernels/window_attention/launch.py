"""How a layer is cut into programs, and the sizes of their blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PROGRAMS_WANTED = 1056
"""Programs of all heads together: eight for each of the 132 multiprocessors of a Hopper card."""
MAX_WINDOWS_PER_PROGRAM = 64
ONE_BLOCK = 64
"""Windows of up to this many tokens keep the bias, and the sum of its gradient, in registers."""


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def dense_map(tensor: Tensor) -> Tensor:
    """Give a map (B, H, W, channels) whose pixels follow each other at one distance, copied where it must be.

    The channels of a pixel lie side by side; pixels may lie apart, as those of a slice of channels do.
    """
    _, height, width, _ = tensor.shape
    pixel = tensor.stride(2)
    dense = tensor.stride() == (height * width * pixel, width * pixel, pixel, 1)
    return tensor if dense else tensor.contiguous()


def plan(
    qkv: Tensor,
    table: Tensor,
    window: list[int],
    rolls_first: bool,
    cosine: bool,
    has_bias: bool,
    seed: Tensor | None,
    *,
    backward: bool = False,
) -> tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]:
    """Choose the grid (programs, heads), the sizes that vary and the constants of the kernels."""
    rows, columns, shift_rows, shift_columns = window
    batch, height, width, channels = qkv.shape
    heads, num_tokens = table.shape[1], rows * columns
    windows_y, windows_x = -(-height // rows), -(-width // columns)
    num_windows = batch * windows_y * windows_x
    per_program = 1
    while per_program < MAX_WINDOWS_PER_PROGRAM and num_windows * heads > PROGRAMS_WANTED * per_program * 2:
        per_program *= 2
    block_j = max(16, next_power_of_two(num_tokens))
    is_padded = (windows_y * rows, windows_x * columns) != (height, width)
    constants = {
        "HEADS": heads,
        "HEAD_DIM": channels // 3 // heads,
        "ROWS": rows,
        "COLUMNS": columns,
        "SHIFT_ROWS": shift_rows,
        "SHIFT_COLUMNS": shift_columns,
        "ROLLS_FIRST": rolls_first,
        "PADDED": is_padded and has_bias,
        "COSINE": cosine,
        "DROPS": seed is not None,
        "WINDOWS_PER_PROGRAM": per_program,
        "BLOCK_I": block_j if num_tokens <= ONE_BLOCK else 32,
        "BLOCK_J": block_j,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "num_warps": 8 if backward or num_tokens > ONE_BLOCK else 4,  # backward holds eight tiles of N x N in registers
    }
    grid = (-(-num_windows // per_program), heads)
    return grid, (height, width, windows_y, windows_x, num_windows), constants
