"""Triton helper functions for kernels that update all parameters of an optimizer at once, and kernels for the sums that
such updates need.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIRST_ADDRESS = tl.constexpr(4)
"""Index of the first tensor address in a row of the address table. Before it are the number of elements, the first
chunk, the number of chunks and the settings row.
"""


@triton.jit
def pointer_to(row, which: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to one of the tensors in a row of the address table."""
    pointer = tl.load(row + FIRST_ADDRESS + which).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load(pointer, places, numel, MASKED: tl.constexpr):
    """Load elements as FP32, with zeros past the end. Whole chunks need no mask, which would split the memory
    accesses.
    """
    if MASKED:
        values = tl.load(pointer + places, mask=places < numel, other=0.0)
    else:
        values = tl.load(pointer + places)
    return values.to(tl.float32)


@triton.jit
def store(pointer, places, values, numel, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """Store FP32 elements in the tensor's dtype."""
    if MASKED:
        tl.store(pointer + places, values.to(DTYPE), mask=places < numel)
    else:
        tl.store(pointer + places, values.to(DTYPE))


@triton.jit
def sum_of_parts(parts, row, LONGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of a tensor's partial sums, added chunk by chunk in a fixed order."""
    first = tl.load(row + 1)
    count = tl.load(row + 2)
    sums = tl.zeros([BLOCK], tl.float32)
    for begin in tl.static_range(0, LONGEST, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        sums += tl.load(parts + first + places, mask=places < count, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def _squares(row, place, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr):
    places = place + tl.arange(0, CHUNK)
    values = load(pointer_to(row, 1, DTYPE, ALIGNED), places, tl.load(row), MASKED)
    return tl.sum(values * values, 0)


@triton.jit
def squares_of_gradients(
    addresses,
    tensor_of_chunk,
    parts,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Write the sum of squares of each chunk of the gradients (C,)."""
    chunk = tl.program_id(0)
    row = addresses + tl.load(tensor_of_chunk + chunk) * COLUMNS
    place = (chunk - tl.load(row + 1)) * CHUNK
    if place + CHUNK <= tl.load(row):
        found = _squares(row, place, DTYPE, ALIGNED, CHUNK, False)
    else:
        found = _squares(row, place, DTYPE, ALIGNED, CHUNK, True)
    tl.store(parts + chunk, found)
