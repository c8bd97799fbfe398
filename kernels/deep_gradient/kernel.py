"""Triton kernels of deep gradient compression over all tensors: compensation with counts, and selection.

Numbers of a tensor: 0 momentum, 1 Nesterov.
"""

from __future__ import annotations

import triton
import triton.language as tl

from steptune.kernels.deep_gradient.reference import CENTRE as _CENTRE
from steptune.kernels.deep_gradient.reference import LEVELS as _LEVELS
from steptune.kernels.multi_tensor.kernel import load, pointer_to, store

LEVELS, CENTRE = tl.constexpr(_LEVELS), tl.constexpr(_CENTRE)


@triton.jit
def _size(numbers):
    """Magnitudes; of what is not a number infinity, as it would lie beyond no threshold."""
    return tl.where(numbers == numbers, tl.abs(numbers), float("inf"))


@triton.jit
def _compensate(
    row,
    momentum,
    nesterov,
    levels,
    counts,
    place,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    MASKED: tl.constexpr,
):
    numel = tl.load(row)
    places = place + tl.arange(0, CHUNK)
    gradient = load(pointer_to(row, 0, DTYPE, ALIGNED), places, numel, MASKED)
    momentum_at = pointer_to(row, 1, DTYPE, ALIGNED)
    unsent_at = pointer_to(row, 2, DTYPE, ALIGNED)
    kept = load(momentum_at, places, numel, MASKED)
    unsent = load(unsent_at, places, numel, MASKED)
    ahead = nesterov > 0
    own = tl.where(ahead, (kept + gradient) * momentum, kept * momentum + gradient)
    unsent = unsent + own + tl.where(ahead, gradient, 0.0)
    store(momentum_at, places, own, numel, DTYPE, MASKED)
    store(unsent_at, places, unsent, numel, DTYPE, MASKED)
    size = _size(unsent)
    if MASKED:
        size = tl.where(places < numel, size, -1.0)
    # Four counts in one 64-bit sum: each is at most CHUNK, and a sum over the programs' threads is what costs.
    for word in tl.static_range(0, LEVELS, 4):
        beyond = tl.zeros([CHUNK], tl.int64)
        for part in tl.static_range(4):
            beyond += (size >= tl.load(levels + word + part)).to(tl.int64) << (16 * part)
        total = tl.sum(beyond, 0)
        for part in tl.static_range(4):
            tl.store(counts + word + part, ((total >> (16 * part)) & 0xFFFF).to(tl.int32))


@triton.jit
def deep_gradient_compensate(
    addresses,
    numbers,
    tensor_of_chunk,
    levels,
    counts,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Update u and v, and write of each chunk how many elements lie beyond each threshold (C, LEVELS)."""
    chunk = tl.program_id(0)
    tensor = tl.load(tensor_of_chunk + chunk)
    row = addresses + tensor * COLUMNS
    own = numbers + tl.load(row + 3) * NUMBERS
    place = (chunk - tl.load(row + 1)) * CHUNK
    momentum, nesterov = tl.load(own), tl.load(own + 1)
    mine, found = levels + tensor * LEVELS, counts + chunk * LEVELS
    if place + CHUNK <= tl.load(row):
        _compensate(row, momentum, nesterov, mine, found, place, DTYPE, ALIGNED, CHUNK, False)
    else:
        _compensate(row, momentum, nesterov, mine, found, place, DTYPE, ALIGNED, CHUNK, True)


@triton.jit
def deep_gradient_select(
    addresses,
    tensor_of_chunk,
    thresholds,
    before,
    filled,
    wanted,
    slots,
    elements,
    values,
    found,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Move what lies beyond a threshold to `values` and `found`, and leave zeros in u and v.

    Args:
        thresholds: (T, 2), the lower one, which fills what the higher one leaves free, and the higher one.
        before: (C), how many elements of the tensor's earlier chunks lie beyond the higher one; `filled`, how many of
            the whole tensor do, and of earlier chunks between both.
        wanted: (T), how many are sent; `slots`, the first of its places among what is sent; `elements`, the first of
            its elements among all.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(tensor_of_chunk + chunk)
    count = tl.load(wanted + tensor)
    earlier = tl.load(before + chunk)
    between = tl.load(filled + chunk)
    if (earlier >= count) & (between >= count):
        return
    row = addresses + tensor * COLUMNS
    numel = tl.load(row)
    places = (chunk - tl.load(row + 1)) * CHUNK + tl.arange(0, CHUNK)
    unsent_at = pointer_to(row, 2, DTYPE, ALIGNED)
    unsent = tl.load(unsent_at + places, mask=places < numel, other=0.0).to(tl.float32)
    size = tl.where(places < numel, _size(unsent), -1.0)
    is_high = size >= tl.load(thresholds + 2 * tensor + 1)
    is_low = (size >= tl.load(thresholds + 2 * tensor)) & (size < tl.load(thresholds + 2 * tensor + 1))
    # Both counts in one sum: each is at most CHUNK.
    running = tl.cumsum(is_high.to(tl.int32) + (is_low.to(tl.int32) << 16), 0)
    slot = tl.where(is_high, earlier + (running & 0xFFFF), between + (running >> 16)) - 1
    taken = (is_high | is_low) & (slot < count)
    out = tl.load(slots + tensor) + slot
    tl.store(values + out, unsent, mask=taken)
    tl.store(found + out, (tl.load(elements + tensor) + places).to(tl.int32), mask=taken)
    nothing = tl.zeros([CHUNK], DTYPE)
    tl.store(unsent_at + places, nothing, mask=taken)
    tl.store(pointer_to(row, 1, DTYPE, ALIGNED) + places, nothing, mask=taken)
