"""Triton kernels of deep gradient compression over all tensors: compensation, choice of thresholds, and selection.

Compensation writes a histogram of each chunk, from which each tensor's thresholds are chosen.

Magnitudes are compared by their bits, which have the same order; the bits of NaN are beyond infinity's.
Bin 0 of a histogram counts the elements beyond no threshold, bin k those beyond exactly the k lowest.

Settings of a tensor: 0 momentum, 1 Nesterov.
"""

from __future__ import annotations

import triton
import triton.language as tl

from steptune.kernels.deep_gradient.reference import CENTRE as _CENTRE
from steptune.kernels.deep_gradient.reference import INFINITE as _INFINITE
from steptune.kernels.deep_gradient.reference import LEAST as _LEAST
from steptune.kernels.deep_gradient.reference import LEVELS as _LEVELS
from steptune.kernels.deep_gradient.reference import SHIFT as _SHIFT
from steptune.kernels.multi_tensor.kernel import load, pointer_to, store

LEVELS, CENTRE, SHIFT = tl.constexpr(_LEVELS), tl.constexpr(_CENTRE), tl.constexpr(_SHIFT)
BINS, HIGHEST = tl.constexpr(_LEVELS + 1), tl.constexpr((_INFINITE >> _SHIFT) - _LEVELS + 1)
INFINITE, LEAST = tl.constexpr(_INFINITE), tl.constexpr(_LEAST)


@triton.jit
def _bits(numbers):
    """Return the bit patterns of the absolute values."""
    return numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _lowest(thresholds, tensor):
    """Return the bit pattern of the lowest candidate threshold, shifted right by `SHIFT`; `levels_around` in
    `reference.py` defines it.
    """
    last = tl.load(thresholds + tensor)
    usable = tl.where(last < float("inf"), tl.maximum(last, LEAST), LEAST)
    return tl.minimum((_bits(usable) >> SHIFT) - CENTRE, HIGHEST)


@triton.jit
def _compensate(
    row,
    momentum,
    nesterov,
    lowest,
    counts,
    largest,
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
    bits = _bits(unsent)
    if MASKED:
        bits = tl.where(places < numel, bits, 0)
    which = tl.minimum(tl.maximum((bits >> SHIFT) - lowest + 1, 0), LEVELS)
    tl.store(counts + tl.arange(0, BINS), tl.histogram(which, BINS))
    tl.store(largest, tl.max(bits, 0))


@triton.jit
def deep_gradient_compensate(
    addresses,
    numbers,
    tensor_of_chunk,
    thresholds,
    counts,
    largest,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Update the momenta u and the unsent values v; write each chunk's histogram of v (C, BINS) and the bits of its
    largest magnitude (C).
    """
    chunk = tl.program_id(0)
    tensor = tl.load(tensor_of_chunk + chunk)
    row = addresses + tensor * COLUMNS
    own = numbers + tl.load(row + 3) * NUMBERS
    place = (chunk - tl.load(row + 1)) * CHUNK
    momentum, nesterov = tl.load(own), tl.load(own + 1)
    lowest, mine, most = _lowest(thresholds, tensor), counts + chunk * BINS, largest + chunk
    if place + CHUNK <= tl.load(row):
        _compensate(row, momentum, nesterov, lowest, mine, most, place, DTYPE, ALIGNED, CHUNK, False)
    else:
        _compensate(row, momentum, nesterov, lowest, mine, most, place, DTYPE, ALIGNED, CHUNK, True)


@triton.jit
def deep_gradient_choose(
    addresses,
    thresholds,
    wanted,
    counts,
    largest,
    bounds,
    before,
    filled,
    next_thresholds,
    COLUMNS: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose each tensor's thresholds from the histograms of its chunks, and the places to which each chunk's elements
    are written.

    Args:
        wanted: (T), number of elements to send.
        bounds: (T, 2), receives the bits of the lower and of the higher threshold; elements between the two fill the
            slots that those beyond the higher one leave free.
        before: (C), receives the number of elements beyond the higher threshold in the tensor's earlier chunks;
            `wanted` if the chunk has none.
        filled: (C), receives the number of elements beyond the higher threshold in the whole tensor plus those between
            the two thresholds in its earlier chunks; `wanted` if the chunk has none between them.
        next_thresholds: (T), receives the thresholds of the next step.
    """
    tensor = tl.program_id(0)
    row = addresses + tensor * COLUMNS
    first, num_chunks = tl.load(row + 1), tl.load(row + 2)
    count = tl.load(wanted + tensor).to(tl.int32)
    which = tl.arange(0, BINS)
    sums, top = tl.zeros([BINS], tl.int32), tl.zeros([BLOCK], tl.int32)
    for begin in tl.range(0, LONGEST, BLOCK):
        if begin < num_chunks:
            chunk = begin + tl.arange(0, BLOCK)
            is_own = chunk < num_chunks
            at = counts + (first + chunk)[:, None] * BINS + which[None, :]
            sums += tl.sum(tl.load(at, mask=is_own[:, None], other=0), 0)
            top = tl.maximum(top, tl.load(largest + first + chunk, mask=is_own, other=0))
    beyond = tl.sum(sums, 0) - tl.cumsum(sums, 0) + sums
    fits = tl.min(tl.where((beyond <= count) & (which > 0), which, BINS), 0)
    high = tl.minimum(fits, LEVELS)
    low = tl.where(fits < BINS, tl.maximum(high - 1, 1), high)
    lowest = _lowest(thresholds, tensor)
    high_bits = (lowest + high - 1) << SHIFT
    tl.store(bounds + 2 * tensor, (lowest + low - 1) << SHIFT)
    tl.store(bounds + 2 * tensor + 1, high_bits)
    level = high_bits.to(tl.float32, bitcast=True)
    longest = tl.minimum(tl.max(top, 0), INFINITE).to(tl.float32, bitcast=True)
    tl.store(next_thresholds + tensor, tl.where(fits < BINS, level, tl.sqrt_rn(level) * tl.sqrt_rn(longest)))
    above_before = count * 0
    between_before = tl.sum(tl.where(which == high, beyond, 0), 0)
    for begin in tl.range(0, LONGEST, BLOCK):
        if begin < num_chunks:
            chunk = begin + tl.arange(0, BLOCK)
            is_own = chunk < num_chunks
            at = counts + (first + chunk)[:, None] * BINS + which[None, :]
            own = tl.load(at, mask=is_own[:, None], other=0)
            above = tl.sum(tl.where((which >= high)[None, :], own, 0), 1)
            between = tl.sum(tl.where(((which >= low) & (which < high))[None, :], own, 0), 1)
            earlier = above_before + tl.cumsum(above, 0) - above
            tl.store(before + first + chunk, tl.where(above > 0, earlier, count), mask=is_own)
            earlier = between_before + tl.cumsum(between, 0) - between
            tl.store(filled + first + chunk, tl.where(between > 0, earlier, count), mask=is_own)
            above_before += tl.sum(above, 0)
            between_before += tl.sum(between, 0)


@triton.jit
def _part(unsent_at, places, numel, MASKED: tl.constexpr):
    return tl.load(unsent_at + places, mask=places < numel, other=0.0) if MASKED else tl.load(unsent_at + places)


@triton.jit
def _select(
    row,
    bounds,
    place,
    earlier,
    between,
    count,
    values,
    found,
    first_element,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    MASKED: tl.constexpr,
):
    numel = tl.load(row)
    momentum_at, unsent_at = pointer_to(row, 1, DTYPE, ALIGNED), pointer_to(row, 2, DTYPE, ALIGNED)
    low, high = tl.load(bounds), tl.load(bounds + 1)
    following = _part(unsent_at, place + tl.arange(0, PART), numel, MASKED)
    for begin in tl.range(0, CHUNK, PART):
        unsent, places = following, place + begin + tl.arange(0, PART)
        if begin + PART < CHUNK:  # loaded before this part is looked at
            following = _part(unsent_at, places + PART, numel, MASKED)
        bits = _bits(unsent)
        if tl.max(bits, 0) >= low:
            is_high, is_low = bits >= high, (bits >= low) & (bits < high)
            # Both counts in one sum: each is at most PART.
            both = is_high.to(tl.int32) + (is_low.to(tl.int32) << 16)
            running = tl.cumsum(both, 0)
            slot = tl.where(is_high, earlier + (running & 0xFFFF), between + (running >> 16)) - 1
            taken = (is_high | is_low) & (slot < count)
            tl.store(values + slot, unsent, mask=taken)
            tl.store(found + slot, (first_element + places).to(tl.int32), mask=taken)
            nothing = tl.zeros([PART], DTYPE)
            tl.store(unsent_at + places, nothing, mask=taken)
            tl.store(momentum_at + places, nothing, mask=taken)
            total = tl.sum(both, 0)
            earlier += total & 0xFFFF
            between += total >> 16


@triton.jit
def deep_gradient_select(
    addresses,
    tensor_of_chunk,
    bounds,
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
    PART: tl.constexpr,
):
    """Write the elements beyond a threshold to `values`, and their indices to `found`. Set these elements to zero in
    the momenta and the unsent values.

    A program scans its chunk part by part: from most parts nothing is sent.

    Args:
        bounds: (T, 2), as `before`, `filled` and `wanted` of `deep_gradient_choose`.
        slots: (T), index of each tensor's first slot in the sent buffer.
        elements: (T), index of each tensor's first element in the concatenated tensors.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(tensor_of_chunk + chunk)
    count = tl.load(wanted + tensor).to(tl.int32)
    earlier = tl.load(before + chunk)
    between = tl.load(filled + chunk)
    if (earlier >= count) & (between >= count):
        return
    row, mine = addresses + tensor * COLUMNS, bounds + 2 * tensor
    place = (chunk - tl.load(row + 1)) * CHUNK
    slot, first = tl.load(slots + tensor), tl.load(elements + tensor)
    to, at = values + slot, found + slot
    if place + CHUNK <= tl.load(row):
        _select(row, mine, place, earlier, between, count, to, at, first, DTYPE, ALIGNED, CHUNK, PART, False)
    else:
        _select(row, mine, place, earlier, between, count, to, at, first, DTYPE, ALIGNED, CHUNK, PART, True)
