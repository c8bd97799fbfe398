"""Triton kernels of LAMB over all tensors of one dtype: the first updates the moments and computes partial norms, the
second computes the ratios, and the third updates the weights.

Settings of a tensor, in the order of `reference.Settings`: 0 rate, 1 decay1, 2 share1, 3 decay2, 4 share2, 5 and 6
corrections of mean and root, 7 eps, 8 weight decay, 9 shrink, 10 adapts, 11 largest ratio, 12 largest weight norm.
"""

from __future__ import annotations

import triton
import triton.language as tl

from steptune.kernels.multi_tensor.kernel import load, pointer_to, store, sum_of_parts


@triton.jit
def _direction(weights, mean, square, own):
    """Return the update before it is scaled by the ratio of norms."""
    root = tl.sqrt(square) * tl.load(own + 6) + tl.load(own + 7)
    return mean * tl.load(own + 5) / root + tl.load(own + 8) * weights


@triton.jit
def _moments(
    row, own, clip, place, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr
):
    """Update a chunk's running means of gradients and squared gradients; return the sums of squares of its weights and
    of its update.
    """
    numel = tl.load(row)
    places = place + tl.arange(0, CHUNK)
    mean_at = pointer_to(row, 2, DTYPE, ALIGNED)
    square_at = pointer_to(row, 3, DTYPE, ALIGNED)
    weights = load(pointer_to(row, 0, DTYPE, ALIGNED), places, numel, MASKED) * tl.load(own + 9)
    gradient = load(pointer_to(row, 1, DTYPE, ALIGNED), places, numel, MASKED) * clip
    mean = load(mean_at, places, numel, MASKED)
    square = load(square_at, places, numel, MASKED)
    # Rounded as they are stored: the update reads them back.
    mean = (mean * tl.load(own + 1) + gradient * tl.load(own + 2)).to(DTYPE).to(tl.float32)
    square = (square * tl.load(own + 3) + gradient * gradient * tl.load(own + 4)).to(DTYPE).to(tl.float32)
    store(mean_at, places, mean, numel, DTYPE, MASKED)
    store(square_at, places, square, numel, DTYPE, MASKED)
    update = _direction(weights, mean, square, own)
    if MASKED:  # with eps 0 what lies behind the end is no number
        update = tl.where(places < numel, update, 0.0)
    return tl.sum(weights * weights, 0), tl.sum(update * update, 0)


@triton.jit
def lamb_moments(
    addresses,
    numbers,
    tensor_of_chunk,
    clip,
    parts,
    num_chunks,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Update the running means of gradients and squared gradients. Write the sums of squares of each chunk's weights
    and update, in shape (2, C). `clip`, of shape (1,), scales all gradients.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(tensor_of_chunk + chunk)
    row = addresses + tensor * COLUMNS
    own = numbers + tl.load(row + 3) * NUMBERS
    place = (chunk - tl.load(row + 1)) * CHUNK
    factor = tl.load(clip)
    if place + CHUNK <= tl.load(row):
        of_weights, of_update = _moments(row, own, factor, place, DTYPE, ALIGNED, CHUNK, False)
    else:
        of_weights, of_update = _moments(row, own, factor, place, DTYPE, ALIGNED, CHUNK, True)
    tl.store(parts + chunk, of_weights)
    tl.store(parts + num_chunks + chunk, of_update)


@triton.jit
def lamb_ratios(
    addresses,
    numbers,
    parts,
    norms,
    num_chunks,
    COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write three values for each of T tensors, in shape (T, 3): the norm of the weights, the norm of the update, and
    their ratio.
    """
    tensor = tl.program_id(0)
    row = addresses + tensor * COLUMNS
    own = numbers + tl.load(row + 3) * NUMBERS
    weight_norm = tl.minimum(tl.sqrt(sum_of_parts(parts, row, LONGEST, BLOCK)), tl.load(own + 12))
    update_norm = tl.sqrt(sum_of_parts(parts + num_chunks, row, LONGEST, BLOCK))
    is_usable = (weight_norm > 0) & (update_norm > 0)
    ratio = tl.where(is_usable, weight_norm / tl.where(update_norm > 0, update_norm, 1.0), 1.0)
    tl.store(norms + tensor * 3, weight_norm)
    tl.store(norms + tensor * 3 + 1, update_norm)
    tl.store(norms + tensor * 3 + 2, tl.minimum(ratio, tl.load(own + 11)))


@triton.jit
def _update(
    row, own, factor, place, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr
):
    numel = tl.load(row)
    places = place + tl.arange(0, CHUNK)
    weights_at = pointer_to(row, 0, DTYPE, ALIGNED)
    weights = load(weights_at, places, numel, MASKED) * tl.load(own + 9)
    mean = load(pointer_to(row, 2, DTYPE, ALIGNED), places, numel, MASKED)
    square = load(pointer_to(row, 3, DTYPE, ALIGNED), places, numel, MASKED)
    store(weights_at, places, weights - factor * _direction(weights, mean, square, own), numel, DTYPE, MASKED)


@triton.jit
def lamb_update(
    addresses,
    numbers,
    tensor_of_chunk,
    norms,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Update the weights. Chunks run from the last to the first, because the last ones written are still in the
    cache.
    """
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    tensor = tl.load(tensor_of_chunk + chunk)
    row = addresses + tensor * COLUMNS
    own = numbers + tl.load(row + 3) * NUMBERS
    place = (chunk - tl.load(row + 1)) * CHUNK
    ratio = tl.where(tl.load(own + 10) > 0, tl.load(norms + tensor * 3 + 2), 1.0)
    factor = tl.load(own) * ratio
    if place + CHUNK <= tl.load(row):
        _update(row, own, factor, place, DTYPE, ALIGNED, CHUNK, False)
    else:
        _update(row, own, factor, place, DTYPE, ALIGNED, CHUNK, True)
