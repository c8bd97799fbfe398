"""Triton kernels of shifted-window attention: packed qkv in natural (B, H, W, 3C) layout in, (B, H, W, C) out.

A program handles one head and a run of windows. It computes where the tokens of a window lie, so that nothing is
rolled, partitioned, padded or masked in memory; it reads q, k and v once and writes the values once. Backward
recomputes the scores, so that only qkv is kept. Gradients that many windows add to (the bias table, the projection's
bias at padding, the scale) are summed in FP32 by each program and then over programs in a fixed order: no atomics, the
same bits in every run.

Shape suffixes: i and j number the tokens of a window (queries and keys), d the channels of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1e-24)
"""Added to squared lengths: the square of the smallest length by which `torch.nn.functional.normalize` divides."""


@triton.jit
def _places(
    window,
    n,
    height,
    width,
    windows_y,
    windows_x,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHIFT_ROWS: tl.constexpr,
    SHIFT_COLUMNS: tl.constexpr,
    ROLLS_FIRST: tl.constexpr,
):
    """Give the pixel of each token of a window within its image, whether it lies on the map, and its region."""
    within = window % (windows_y * windows_x)
    token = tl.minimum(n, ROWS * COLUMNS - 1)  # beyond the window a row of scores must not be masked as a whole
    y = within // windows_x * ROWS + token // COLUMNS
    x = within % windows_x * COLUMNS + token % COLUMNS
    padded_height = windows_y * ROWS
    padded_width = windows_x * COLUMNS
    if ROLLS_FIRST:
        on_map = (y < height) & (x < width)
        rolled_height = height
        rolled_width = width
    else:
        on_map = n >= 0
        rolled_height = padded_height
        rolled_width = padded_width
    source_y = y + SHIFT_ROWS
    source_x = x + SHIFT_COLUMNS
    source_y = tl.where(source_y >= rolled_height, source_y - rolled_height, source_y)
    source_x = tl.where(source_x >= rolled_width, source_x - rolled_width, source_x)
    on_map = on_map & (source_y < height) & (source_x < width) & (n < ROWS * COLUMNS)
    region = token * 0
    if SHIFT_ROWS > 0:
        region += 3 * ((y >= padded_height - ROWS).to(tl.int32) + (y >= padded_height - SHIFT_ROWS).to(tl.int32))
    if SHIFT_COLUMNS > 0:
        region += (x >= padded_width - COLUMNS).to(tl.int32) + (x >= padded_width - SHIFT_COLUMNS).to(tl.int32)
    return source_y * width + source_x, on_map, region


@triton.jit
def _load_tile(
    pointer, pixel_n, on_map_n, n, d, stride, bias_pointer, NUM_TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Load (n, d); a token of the padding has the projection's bias, or zero."""
    tile = tl.load(pointer + pixel_n[:, None] * stride + d[None, :], mask=on_map_n[:, None], other=0.0)
    if HAS_BIAS:
        padding = tl.load(bias_pointer + d).to(tile.dtype)
        is_padding = (n < NUM_TOKENS) & (on_map_n == 0)
        tile = tl.where(is_padding[:, None], padding[None, :], tile)
    return tile


@triton.jit
def _relative_rows(i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Give the row of the bias table for each pair of tokens."""
    y = (i // COLUMNS)[:, None] - (j // COLUMNS)[None, :] + (ROWS - 1)
    x = (i % COLUMNS)[:, None] - (j % COLUMNS)[None, :] + (COLUMNS - 1)
    return y * (2 * COLUMNS - 1) + x


@triton.jit
def _load_position_bias(table, head, i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr):
    """Load the bias of (i, j) in FP32; minus infinity where j is no token."""
    valid = (i < ROWS * COLUMNS)[:, None] & (j < ROWS * COLUMNS)[None, :]
    bias = tl.load(table + _relative_rows(i, j, ROWS, COLUMNS) * HEADS + head, mask=valid, other=0.0).to(tl.float32)
    return tl.where((j < ROWS * COLUMNS)[None, :], bias, float("-inf"))


@triton.jit
def _inverse_length(tile):
    """Give 1 / length of each row in FP32."""
    wide = tile.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) + TINY)


@triton.jit
def _exponentials(
    q,
    k,
    bias,
    region_i,
    region_j,
    scale,
    SHIFTED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Give the numerators of the softmax over j of scale q k^T + bias, their sums, and the products, all in FP32."""
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores = products * scale + bias
    if SHIFTED:
        scores = tl.where(region_i[:, None] == region_j[None, :], scores, float("-inf"))
    exponentials = tl.exp2((scores - tl.max(scores, axis=1)[:, None]) * LOG2_E)
    return exponentials, tl.sum(exponentials, axis=1), products


@triton.jit
def _kept(seed, window, head, i, j, probability, HEADS: tl.constexpr, NUM_TOKENS: tl.constexpr):
    """Give 1 / (1 - probability) where dropout keeps a pair, else 0; each pair has a number of Philox of its own."""
    base = (window.to(tl.int64) * HEADS + head) * (NUM_TOKENS * NUM_TOKENS)
    offset = base + (i[:, None] * NUM_TOKENS + j[None, :]).to(tl.int64)
    return tl.where(tl.rand(seed, offset) >= probability, 1.0 / (1.0 - probability), 0.0)


@triton.jit
def forward_kernel(
    qkv,
    qkv_bias,
    table,
    scales,
    out,
    seed_pointer,
    dropout,
    height,
    width,
    windows_y,
    windows_x,
    num_windows,
    qkv_stride,
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHIFT_ROWS: tl.constexpr,
    SHIFT_COLUMNS: tl.constexpr,
    ROLLS_FIRST: tl.constexpr,
    PADDED: tl.constexpr,
    COSINE: tl.constexpr,
    DROPS: tl.constexpr,
    WINDOWS_PER_PROGRAM: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NUM_TOKENS: tl.constexpr = ROWS * COLUMNS
    CHANNELS: tl.constexpr = HEADS * HEAD_DIM
    SHIFTED: tl.constexpr = (SHIFT_ROWS > 0) or (SHIFT_COLUMNS > 0)
    ONE_BLOCK: tl.constexpr = BLOCK_I == BLOCK_J
    head = tl.program_id(1)
    first = tl.program_id(0) * WINDOWS_PER_PROGRAM
    j = tl.arange(0, BLOCK_J)
    channel = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
    scale = tl.load(scales + head).to(tl.float32)
    seed = tl.load(seed_pointer) if DROPS else 0
    for begin in tl.range(0, NUM_TOKENS, BLOCK_I):
        i = begin + tl.arange(0, BLOCK_I)
        bias = _load_position_bias(table, head, i, j, ROWS, COLUMNS, HEADS)
        for step in tl.range(WINDOWS_PER_PROGRAM):
            window = first + step
            inside = window < num_windows
            image = (window // (windows_y * windows_x)).to(tl.int64) * height * width
            from_qkv = qkv + image * qkv_stride
            pixel_j, on_map_j, region_j = _places(
                window,
                j,
                height,
                width,
                windows_y,
                windows_x,
                ROWS,
                COLUMNS,
                SHIFT_ROWS,
                SHIFT_COLUMNS,
                ROLLS_FIRST,
            )
            on_map_j = on_map_j & inside
            if ONE_BLOCK:
                pixel_i, on_map_i, region_i = pixel_j, on_map_j, region_j
            else:
                pixel_i, on_map_i, region_i = _places(
                    window,
                    i,
                    height,
                    width,
                    windows_y,
                    windows_x,
                    ROWS,
                    COLUMNS,
                    SHIFT_ROWS,
                    SHIFT_COLUMNS,
                    ROLLS_FIRST,
                )
                on_map_i = on_map_i & inside
            q = _load_tile(from_qkv, pixel_i, on_map_i, i, channel, qkv_stride, qkv_bias, NUM_TOKENS, PADDED)
            from_k = from_qkv + CHANNELS
            k = _load_tile(from_k, pixel_j, on_map_j, j, channel, qkv_stride, qkv_bias + CHANNELS, NUM_TOKENS, PADDED)
            from_v = from_k + CHANNELS
            v_bias = qkv_bias + 2 * CHANNELS
            v = _load_tile(from_v, pixel_j, on_map_j, j, channel, qkv_stride, v_bias, NUM_TOKENS, PADDED)
            if COSINE:
                q = (q.to(tl.float32) * _inverse_length(q)[:, None]).to(q.dtype)
                k = (k.to(tl.float32) * _inverse_length(k)[:, None]).to(k.dtype)
            p, total, _ = _exponentials(q, k, bias, region_i, region_j, scale, SHIFTED, PRECISION)
            if DROPS:
                p *= _kept(seed, window, head, i, j, dropout, HEADS, NUM_TOKENS)
            values = tl.dot(p.to(v.dtype), v, input_precision=PRECISION) / total[:, None]
            to = out + image * out_stride + pixel_i[:, None] * out_stride + channel[None, :]
            tl.store(to, values.to(out.dtype.element_ty), mask=on_map_i[:, None])


@triton.jit
def _through_normalisation(gradient, tile, inverse_length):
    """Turn a gradient with respect to a normalised row into that with respect to the row."""
    unit = tile.to(tl.float32) * inverse_length[:, None]
    along = tl.sum(gradient * unit, axis=1)
    return (gradient - unit * along[:, None]) * inverse_length[:, None]


@triton.jit
def backward_kernel(
    qkv,
    qkv_bias,
    table,
    scales,
    grad_out,
    grad_qkv,
    bias_parts,
    padding_parts,
    scale_parts,
    seed_pointer,
    dropout,
    height,
    width,
    windows_y,
    windows_x,
    num_windows,
    qkv_stride,
    out_stride,
    grad_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHIFT_ROWS: tl.constexpr,
    SHIFT_COLUMNS: tl.constexpr,
    ROLLS_FIRST: tl.constexpr,
    PADDED: tl.constexpr,
    COSINE: tl.constexpr,
    DROPS: tl.constexpr,
    WINDOWS_PER_PROGRAM: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NUM_TOKENS: tl.constexpr = ROWS * COLUMNS
    CHANNELS: tl.constexpr = HEADS * HEAD_DIM
    SHIFTED: tl.constexpr = (SHIFT_ROWS > 0) or (SHIFT_COLUMNS > 0)
    ONE_BLOCK: tl.constexpr = BLOCK_I == BLOCK_J
    head = tl.program_id(1)
    program = tl.program_id(0)
    first = program * WINDOWS_PER_PROGRAM
    j = tl.arange(0, BLOCK_J)
    channel = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
    scale = tl.load(scales + head).to(tl.float32)
    seed = tl.load(seed_pointer) if DROPS else 0
    own_bias_part = bias_parts + (program * HEADS + head).to(tl.int64) * (NUM_TOKENS * NUM_TOKENS)
    first_i = tl.arange(0, BLOCK_I)
    if ONE_BLOCK:
        bias_of_block = _load_position_bias(table, head, first_i, j, ROWS, COLUMNS, HEADS)
    bias_sum = tl.zeros((BLOCK_I, BLOCK_J), dtype=tl.float32)
    padding_k = tl.zeros((HEAD_DIM,), dtype=tl.float32)
    padding_v = tl.zeros((HEAD_DIM,), dtype=tl.float32)
    scale_sum = tl.zeros((BLOCK_I,), dtype=tl.float32)
    for step in tl.range(WINDOWS_PER_PROGRAM):
        window = first + step
        inside = window < num_windows
        image = (window // (windows_y * windows_x)).to(tl.int64) * height * width
        from_qkv = qkv + image * qkv_stride
        to_qkv = grad_qkv + image * grad_stride
        pixel_j, on_map_j, region_j = _places(
            window,
            j,
            height,
            width,
            windows_y,
            windows_x,
            ROWS,
            COLUMNS,
            SHIFT_ROWS,
            SHIFT_COLUMNS,
            ROLLS_FIRST,
        )
        is_padding_j = (j < NUM_TOKENS) & (on_map_j == 0) & inside
        on_map_j = on_map_j & inside
        from_k = from_qkv + CHANNELS
        k_raw = _load_tile(from_k, pixel_j, on_map_j, j, channel, qkv_stride, qkv_bias + CHANNELS, NUM_TOKENS, PADDED)
        from_v = from_k + CHANNELS
        v_bias = qkv_bias + 2 * CHANNELS
        v = _load_tile(from_v, pixel_j, on_map_j, j, channel, qkv_stride, v_bias, NUM_TOKENS, PADDED)
        k = k_raw
        if COSINE:
            inverse_k = _inverse_length(k_raw)
            k = (k_raw.to(tl.float32) * inverse_k[:, None]).to(k_raw.dtype)
        grad_k = tl.zeros((BLOCK_J, HEAD_DIM), dtype=tl.float32)
        grad_v = tl.zeros((BLOCK_J, HEAD_DIM), dtype=tl.float32)
        for begin in tl.range(0, NUM_TOKENS, BLOCK_I):
            i = begin + first_i
            if ONE_BLOCK:
                pixel_i, on_map_i, region_i = pixel_j, on_map_j, region_j
                bias = bias_of_block
            else:
                pixel_i, on_map_i, region_i = _places(
                    window,
                    i,
                    height,
                    width,
                    windows_y,
                    windows_x,
                    ROWS,
                    COLUMNS,
                    SHIFT_ROWS,
                    SHIFT_COLUMNS,
                    ROLLS_FIRST,
                )
                on_map_i = on_map_i & inside
                bias = _load_position_bias(table, head, i, j, ROWS, COLUMNS, HEADS)
            q_raw = _load_tile(from_qkv, pixel_i, on_map_i, i, channel, qkv_stride, qkv_bias, NUM_TOKENS, PADDED)
            q = q_raw
            if COSINE:
                inverse_q = _inverse_length(q_raw)
                q = (q_raw.to(tl.float32) * inverse_q[:, None]).to(q_raw.dtype)
            from_out = grad_out + image * out_stride + pixel_i[:, None] * out_stride + channel[None, :]
            grad_values = tl.load(from_out, mask=on_map_i[:, None], other=0.0).to(v.dtype)
            numerators, total, products = _exponentials(q, k, bias, region_i, region_j, scale, SHIFTED, PRECISION)
            p = numerators / total[:, None]
            grad_p = tl.dot(grad_values, tl.trans(v), input_precision=PRECISION)
            kept_p = p
            if DROPS:
                kept = _kept(seed, window, head, i, j, dropout, HEADS, NUM_TOKENS)
                kept_p = p * kept
                grad_p *= kept
            grad_v += tl.dot(tl.trans(kept_p.to(v.dtype)), grad_values, input_precision=PRECISION)
            grad_scores = p * (grad_p - tl.sum(p * grad_p, axis=1)[:, None])
            valid = (i < NUM_TOKENS)[:, None] & (j < NUM_TOKENS)[None, :] & inside
            grad_scores = tl.where(valid, grad_scores, 0.0)
            if ONE_BLOCK:
                bias_sum += grad_scores
            else:
                place = own_bias_part + i[:, None] * NUM_TOKENS + j[None, :]
                sum_so_far = tl.load(place, mask=valid & (step > 0), other=0.0)
                tl.store(place, sum_so_far + grad_scores, mask=valid)
            if COSINE:
                scale_sum += tl.sum(grad_scores * products, axis=1)
            narrow = (grad_scores * scale).to(q.dtype)
            grad_q = tl.dot(narrow, k, input_precision=PRECISION)
            grad_k += tl.dot(tl.trans(narrow), q, input_precision=PRECISION)
            if COSINE:
                grad_q = _through_normalisation(grad_q, q_raw, inverse_q)
            to = to_qkv + pixel_i[:, None] * grad_stride + channel[None, :]
            tl.store(to, grad_q.to(grad_qkv.dtype.element_ty), mask=on_map_i[:, None])
        if COSINE:
            grad_k = _through_normalisation(grad_k, k_raw, inverse_k)
        to_k = to_qkv + CHANNELS + pixel_j[:, None] * grad_stride + channel[None, :]
        tl.store(to_k, grad_k.to(grad_qkv.dtype.element_ty), mask=on_map_j[:, None])
        tl.store(to_k + CHANNELS, grad_v.to(grad_qkv.dtype.element_ty), mask=on_map_j[:, None])
        if PADDED:
            padding_k += tl.sum(tl.where(is_padding_j[:, None], grad_k, 0.0), axis=0)
            padding_v += tl.sum(tl.where(is_padding_j[:, None], grad_v, 0.0), axis=0)
    if ONE_BLOCK:
        place = own_bias_part + first_i[:, None] * NUM_TOKENS + j[None, :]
        tl.store(place, bias_sum, mask=(first_i < NUM_TOKENS)[:, None] & (j < NUM_TOKENS)[None, :])
    if PADDED:
        own_padding = padding_parts + program * (2 * CHANNELS) + channel
        tl.store(own_padding, padding_k)
        tl.store(own_padding + CHANNELS, padding_v)
    if COSINE:
        tl.store(scale_parts + program * HEADS + head, tl.sum(scale_sum, axis=0))


@triton.jit
def table_gradient_kernel(
    bias_gradient,
    table_gradient,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Sum the gradient of all pairs (i, j) with one relative position: a row of the table and a head a program."""
    NUM_TOKENS: tl.constexpr = ROWS * COLUMNS
    row = tl.program_id(0)
    head = tl.program_id(1)
    dy = row // (2 * COLUMNS - 1) - (ROWS - 1)
    dx = row % (2 * COLUMNS - 1) - (COLUMNS - 1)
    i = tl.arange(0, BLOCK_I)
    y = i // COLUMNS - dy
    x = i % COLUMNS - dx
    valid = (i < NUM_TOKENS) & (y >= 0) & (y < ROWS) & (x >= 0) & (x < COLUMNS)
    pair = (head * NUM_TOKENS + i) * NUM_TOKENS + y * COLUMNS + x
    total = tl.sum(tl.load(bias_gradient + pair, mask=valid, other=0.0), axis=0)
    tl.store(table_gradient + row * HEADS + head, total.to(table_gradient.dtype.element_ty))
