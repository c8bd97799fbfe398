"""Triton kernels of LARS over all tensors of one dtype: partial norms, ratios, update.

Settings of a tensor, in the order of `reference.Settings`: 0 rate, 1 kept, 2 share, 3 weight decay, 4 trust, 5 eps,
6 adapts, 7 divisor, 8 largest ratio, 9 momentum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from steptune.kernels.multi_tensor.kernel import load, pointer_to, store, sum_of_parts


@triton.jit
def _norms(row, place, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr):
    numel = tl.load(row)
    places = place + tl.arange(0, CHUNK)
    weights = load(pointer_to(row, 0, DTYPE, ALIGNED), places, numel, MASKED)
    gradient = load(pointer_to(row, 1, DTYPE, ALIGNED), places, numel, MASKED)
    return tl.sum(weights * weights, 0), tl.sum(gradient * gradient, 0)


@triton.jit
def lars_norms(
    addresses,
    tensor_of_chunk,
    parts,
    num_chunks,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Write each chunk's sums of squares of weights and gradient (2, C)."""
    chunk = tl.program_id(0)
    row = addresses + tl.load(tensor_of_chunk + chunk) * COLUMNS
    place = (chunk - tl.load(row + 1)) * CHUNK
    if place + CHUNK <= tl.load(row):
        of_weights, of_gradient = _norms(row, place, DTYPE, ALIGNED, CHUNK, False)
    else:
        of_weights, of_gradient = _norms(row, place, DTYPE, ALIGNED, CHUNK, True)
    tl.store(parts + chunk, of_weights)
    tl.store(parts + num_chunks + chunk, of_gradient)


@triton.jit
def lars_ratios(
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
    """Write the norm of the weights, the norm of the gradient and their ratio for each tensor (T, 3)."""
    tensor = tl.program_id(0)
    row = addresses + tensor * COLUMNS
    own = numbers + tl.load(row + 3) * NUMBERS
    weight_norm = tl.sqrt(sum_of_parts(parts, row, LONGEST, BLOCK))
    gradient_norm = tl.sqrt(sum_of_parts(parts + num_chunks, row, LONGEST, BLOCK))
    is_usable = (weight_norm > 0) & (gradient_norm > 0)
    whole = gradient_norm + tl.load(own + 3) * weight_norm + tl.load(own + 5)
    ratio = tl.where(is_usable, tl.load(own + 4) * weight_norm / tl.where(is_usable, whole, 1.0), 1.0)
    ratio = tl.minimum(ratio / tl.load(own + 7), tl.load(own + 8))
    tl.store(norms + tensor * 3, weight_norm)
    tl.store(norms + tensor * 3 + 1, gradient_norm)
    tl.store(norms + tensor * 3 + 2, ratio)


@triton.jit
def _update(
    row,
    own,
    factor,
    place,
    HAS_MOMENTUM: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    MASKED: tl.constexpr,
):
    numel = tl.load(row)
    places = place + tl.arange(0, CHUNK)
    weights_at = pointer_to(row, 0, DTYPE, ALIGNED)
    weights = load(weights_at, places, numel, MASKED)
    gradient = load(pointer_to(row, 1, DTYPE, ALIGNED), places, numel, MASKED)
    step = (gradient + tl.load(own + 3) * weights) * factor
    if HAS_MOMENTUM:
        momentum_at = pointer_to(row, 2, DTYPE, ALIGNED)
        kept = load(momentum_at, places, numel, MASKED) * tl.load(own + 1)
        momentum = (kept + step * tl.load(own + 2)).to(DTYPE).to(tl.float32)
        store(momentum_at, places, momentum, numel, DTYPE, MASKED)
        ahead = tl.load(own + 9)
        step = tl.where(ahead > 0, step + ahead * momentum, momentum)
    store(weights_at, places, weights - tl.load(own) * step, numel, DTYPE, MASKED)


@triton.jit
def lars_update(
    addresses,
    numbers,
    tensor_of_chunk,
    norms,
    HAS_MOMENTUM: tl.constexpr,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Update momenta and weights. Chunks run from the last to the first, because the last ones read are still in the
    cache.
    """
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    tensor = tl.load(tensor_of_chunk + chunk)
    row = addresses + tensor * COLUMNS
    own = numbers + tl.load(row + 3) * NUMBERS
    place = (chunk - tl.load(row + 1)) * CHUNK
    factor = tl.where(tl.load(own + 6) > 0, tl.load(norms + tensor * 3 + 2), 1.0)
    if place + CHUNK <= tl.load(row):
        _update(row, own, factor, place, HAS_MOMENTUM, DTYPE, ALIGNED, CHUNK, False)
    else:
        _update(row, own, factor, place, HAS_MOMENTUM, DTYPE, ALIGNED, CHUNK, True)
