"""Division of an attention layer into programs, and the sizes of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

MAX_WINDOWS_PER_PROGRAM = 64
ONE_BLOCK = 64
"""Maximum number of tokens per window for which the bias and the sum of its gradient are kept in registers."""
BLOCK_PARTS = 16


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Launch settings of the forward or the backward pass.

    Attributes:
        programs: Target number of programs, over all heads.
        num_warps: Warps of a program.
        num_stages: Windows whose loads are in flight at a time.
        max_registers: Registers of a thread; None lets the compiler choose. Fewer let more programs run at a time.
    """

    programs: int = 1056
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None


FORWARD = Settings(programs=2112)
BACKWARD = Settings(programs=528)
"""Launch settings that were fastest on an H100 (benchmarks/kernels_sweep.py); limiting registers never helped."""
SEVERAL_BLOCKS = Settings(num_warps=8)
"""Launch settings, for the forward and the backward pass, of windows that do not fit into one block."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """Launch of a kernel for one shape of its tensors.

    Attributes:
        grid: Programs along each axis.
        sizes: Arguments of the kernel that are sizes.
        constants: Compile-time arguments, in the order in which the kernel declares them.
        options: Triton's compile options.
        compiled: Compiled code, by the properties on which Triton specialises it.
    """

    grid: tuple[int, int, int]
    sizes: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def run(self, kernel: Any, tensors: Sequence[Tensor], numbers: Sequence[float] = ()) -> None:
        """Launch the plan's kernel, which must be the same one in every call.

        In each launch Triton looks the code up by all arguments and constants, which takes the host longer than a small
        map takes the device. Here the code is looked up by the arguments that can still differ, and launched as Triton
        does, but with addresses, which Triton would otherwise query for each tensor, and then check with the driver.

        Args:
            tensors: First arguments; `numbers`, the others.
        """
        devices = [tensor.get_device() for tensor in tensors]  # -1 of a CPU
        device = devices[0]
        if device >= 0 and device != torch.cuda.current_device():  # for which Triton compiles and launches
            with torch.cuda.device(device):
                self.run(kernel, tensors, numbers)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        # Devices of all: with a tensor of the CPU's among them Triton refuses, where code would read its address.
        key = (*devices, *numbers, *[tensor.dtype for tensor in tensors], *[address & 15 for address in addresses])
        code = self.compiled.get(key)
        if code is None:
            code = kernel[self.grid](*tensors, *numbers, **self.constants, **self.options)
            if code is not None:  # the interpreter has none
                self.compiled[key] = code
            return
        code.run(
            *self.grid,
            torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0,
            code.function,
            code.packed_metadata,
            None,
            None,
            None,
            *addresses,
            *numbers,
            *self.constants.values(),
        )


def settings_of(num_tokens: int, dtype: torch.dtype, *, backward: bool) -> Settings:
    """Return the launch settings of the forward or the backward pass, by the number of tokens per window and the
    dtype.
    """
    if num_tokens > ONE_BLOCK:
        return SEVERAL_BLOCKS
    if dtype == torch.float32:  # whose exact products need all registers
        return Settings(num_warps=8 if backward else 4)
    return BACKWARD if backward else FORWARD


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def dense_map(tensor: Tensor) -> Tensor:
    """Return a map (B, H, W, channels) with a constant distance between neighbouring pixels, copied only if necessary.

    The channels of a pixel lie side by side; pixels may lie apart, as those of a slice of channels do.
    """
    _, height, width, channels = tensor.shape
    pixel = tensor.stride(2)
    if tensor.is_contiguous():  # whatever the distance is along an axis of one pixel
        return tensor if pixel == channels else tensor.view(-1).view(tensor.shape)
    dense = tensor.stride() == (height * width * pixel, width * pixel, pixel, 1)
    return tensor if dense else tensor.contiguous()


def num_windows(height: int, width: int, window: Sequence[int]) -> tuple[int, int]:
    """Return the number of windows of a map along its height and its width."""
    return -(-height // window[0]), -(-width // window[1])


def is_padded(shape: torch.Size, window: Sequence[int]) -> bool:
    """Say whether windows extend beyond a map (B, H, W, channels)."""
    return bool(shape[1] % window[0] or shape[2] % window[1])


def edges(windows: int, size: int, shift: int, extent: int) -> int:
    """Return how many of the last rows (or columns) of windows need a mask or padding, unlike the earlier ones.

    They differ where the map wraps, and where it ends within a window. A shift moves the latter up by one.
    """
    return min(windows, int(shift > 0) + int(windows * size != extent))


@lru_cache(maxsize=1024)
def plan(
    shape: torch.Size,
    dtype: torch.dtype,
    heads: int,
    window: tuple[int, ...],
    backward: bool,
    rolls_first: bool,
    cosine: bool,
    has_bias: bool,
    drops: bool,
    precision: str,
) -> Plan:
    """Choose the grid (heads, programs, 1), the sizes and the constants of the forward or the backward pass, by the
    shape of qkv.
    """
    rows, columns, shift_rows, shift_columns = window
    batch, height, width, channels = shape
    num_tokens = rows * columns
    settings = settings_of(num_tokens, dtype, backward=backward)
    windows_y, windows_x = num_windows(height, width, window)
    edges_y = edges(windows_y, rows, shift_rows, height)
    edges_x = edges(windows_x, columns, shift_columns, width)
    per_program = 1
    while (
        per_program < MAX_WINDOWS_PER_PROGRAM
        and batch * windows_y * windows_x * heads > settings.programs * per_program * 2
    ):
        per_program *= 2
    block_j = max(16, next_power_of_two(num_tokens))
    constants = {
        "HEADS": heads,
        "HEAD_DIM": channels // 3 // heads,
        "ROWS": rows,
        "COLUMNS": columns,
        "SHIFT_ROWS": shift_rows,
        "SHIFT_COLUMNS": shift_columns,
        "ROLLS_FIRST": rolls_first,
        "EDGES_Y": edges_y,
        "EDGES_X": edges_x,
        "PADDED": is_padded(shape, window) and has_bias,
        "COSINE": cosine,
        "DROPS": drops,
        "PER_PROGRAM": per_program,
        "BLOCK_I": block_j if num_tokens <= ONE_BLOCK else 32,
        "BLOCK_J": block_j,
        "PRECISION": precision,
    }
    kinds_y = [windows_y - edges_y, *[1] * edges_y]
    kinds_x = [windows_x - edges_x, *[1] * edges_x]
    programs = sum(-(-batch * y * x // per_program) for y in kinds_y for x in kinds_x)
    return Plan(
        grid=(heads, programs, 1),
        sizes=(batch, height, width, windows_y, windows_x),
        constants=constants,
        options={
            "num_warps": settings.num_warps,
            "num_stages": settings.num_stages,
            "maxnreg": settings.max_registers,
        },
    )


@lru_cache(maxsize=1024)
def plan_of_table_gradient(heads: int, rows: int, columns: int, num_parts: int) -> Plan:
    """Plan the launch that sums the table's gradient over the partial results of all programs."""
    return Plan(
        grid=(heads, (2 * rows - 1) * (2 * columns - 1), 1),
        sizes=(),
        constants={
            "HEADS": heads,
            "ROWS": rows,
            "COLUMNS": columns,
            "NUM_PARTS": num_parts,
            "BLOCK_PARTS": BLOCK_PARTS,
            "BLOCK_I": next_power_of_two(rows * columns),
        },
    )


def precision(dtype: torch.dtype) -> str:
    """Return the precision of matmuls; for FP32 it follows `torch.backends.cuda.matmul.allow_tf32`."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"
