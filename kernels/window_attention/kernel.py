"""Triton kernels of shifted-window attention, from packed qkv in natural (B, H, W, 3C) layout to (B, H, W, C).

A program handles one head and a run of windows of one kind: inner windows, or those of an edge, where the map wraps or
is padded. Windows of a kind differ by an offset only, so where their tokens lie, which pairs are masked and the bias of
each pair are computed once a program. Nothing is rolled, partitioned, padded or masked in memory; q, k and v are read
once and the values written once. Backward recomputes the scores; forward leaves it the logarithm of each row's sum.
Gradients that many windows add to (the bias table, the projection's bias at padding, the scale) are summed in FP32 by
each program and then over programs in a fixed order: no atomics, the same bits in every run.

Heads are the faster axis of the grid: programs that run at one time read neighbouring channels of the same tokens.

Shape suffixes: i and j number the tokens of a window (queries and keys), d the channels of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
"""Factor applied to the scores, so that their exponential is a power of two."""
TINY = tl.constexpr(1e-24)
"""Term added to squared lengths: the square of the smallest length by which `torch.nn.functional.normalize` divides."""
LEAST = tl.constexpr(-1e30)
"""Substitute for a row's largest score if that is -inf: the row attends to no token, and its masked scores stay
-inf.
"""


@triton.jit
def _run_of_windows(
    program, batch, windows_y, windows_x, EDGES_Y: tl.constexpr, EDGES_X: tl.constexpr, PER_PROGRAM: tl.constexpr
):
    """Return the windows that a program handles. All are of one kind: they need the same masks and the same padding.

    They are: row and column of the kind's first window, the number of the kind's windows per row and per image, and the
    index within the kind of the program's first window.

    The last `EDGES` rows and columns of windows are kinds of their own, all before them one.
    """
    rest = program
    found_y = program * 0
    found_x = program * 0
    found_columns = program * 0
    found_windows = program * 0
    found_first = program * 0
    for row in tl.static_range(EDGES_Y + 1):
        for column in tl.static_range(EDGES_X + 1):
            rows = windows_y - EDGES_Y if row == 0 else 1
            columns = windows_x - EDGES_X if column == 0 else 1
            num_programs = (rows * columns * batch + PER_PROGRAM - 1) // PER_PROGRAM
            is_here = (rest >= 0) & (rest < num_programs)
            found_y = tl.where(is_here, 0 if row == 0 else windows_y - EDGES_Y + row - 1, found_y)
            found_x = tl.where(is_here, 0 if column == 0 else windows_x - EDGES_X + column - 1, found_x)
            found_columns = tl.where(is_here, columns, found_columns)
            found_windows = tl.where(is_here, rows * columns, found_windows)
            found_first = tl.where(is_here, rest * PER_PROGRAM, found_first)
            rest -= num_programs
    return found_y, found_x, found_columns, found_windows, found_first


@triton.jit
def _places(
    window_y,
    window_x,
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
    """Return each token's pixel within the image, whether the token lies on the map, and its region; tokens attend only
    to tokens of their own region.
    """
    token = tl.minimum(n, ROWS * COLUMNS - 1)  # beyond the window a row of scores must not be masked as a whole
    y = window_y * ROWS + token // COLUMNS
    x = window_x * COLUMNS + token % COLUMNS
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
def _load_tile(pointer, offset_nd, on_map_n, n, d, bias_pointer, NUM_TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Load a tile (n, d) of queries, keys or values. A padding token gets the bias of the projection, or zero if there
    is none.
    """
    tile = tl.load(pointer + offset_nd, mask=on_map_n[:, None], other=0.0)
    if HAS_BIAS:
        padding = tl.load(bias_pointer + d).to(tile.dtype)
        is_padding = (n < NUM_TOKENS) & (on_map_n == 0)
        tile = tl.where(is_padding[:, None], padding[None, :], tile)
    return tile


@triton.jit
def _position_bias(
    table, head, i, j, region_i, region_j, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr
):
    """Return the bias added to the scores of (i, j), times log2 e: -inf where j is not a token or is masked."""
    y = (i // COLUMNS)[:, None] - (j // COLUMNS)[None, :] + (ROWS - 1)
    x = (i % COLUMNS)[:, None] - (j % COLUMNS)[None, :] + (COLUMNS - 1)
    is_pair = (i < ROWS * COLUMNS)[:, None] & (j < ROWS * COLUMNS)[None, :]
    bias = tl.load(table + (y * (2 * COLUMNS - 1) + x) * HEADS + head, mask=is_pair, other=0.0).to(tl.float32)
    is_seen = (j < ROWS * COLUMNS)[None, :] & (region_i[:, None] == region_j[None, :])
    return tl.where(is_seen, bias * LOG2_E, float("-inf"))


@triton.jit
def _inverse_length(tile):
    """Return 1 / length of each row in FP32."""
    wide = tile.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) + TINY)


@triton.jit
def _kept(seed, window, head, i, j, probability, HEADS: tl.constexpr, NUM_TOKENS: tl.constexpr):
    """Return 1 / (1 - probability) where dropout keeps a pair, else 0; each pair draws its own Philox number."""
    base = (window.to(tl.int64) * HEADS + head) * (NUM_TOKENS * NUM_TOKENS)
    offset = base + (i[:, None] * NUM_TOKENS + j[None, :]).to(tl.int64)
    return tl.where(tl.rand(seed, offset) >= probability, 1.0 / (1.0 - probability), 0.0)


@triton.jit
def _window_at(
    number,
    first_y,
    first_x,
    columns,
    windows,
    batch,
    height,
    width,
    windows_y,
    windows_x,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the position of one of the windows that a program handles.

    It is: the window's index among all windows, the offset of its first pixel from that of the run's first window, and
    whether it belongs to the batch.
    """
    image = number // windows
    window_y = number % windows // columns
    window_x = number % windows % columns
    window = (image * windows_y + first_y + window_y) * windows_x + first_x + window_x
    pixel = image.to(tl.int64) * height * width + window_y * (ROWS * width) + window_x * COLUMNS
    return window, pixel, image < batch


@triton.jit
def window_attention_forward(
    qkv,
    qkv_bias,
    table,
    scales,
    out,
    seed_pointer,
    dropout,
    batch,
    height,
    width,
    windows_y,
    windows_x,
    qkv_stride,
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHIFT_ROWS: tl.constexpr,
    SHIFT_COLUMNS: tl.constexpr,
    ROLLS_FIRST: tl.constexpr,
    EDGES_Y: tl.constexpr,
    EDGES_X: tl.constexpr,
    PADDED: tl.constexpr,
    COSINE: tl.constexpr,
    DROPS: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NUM_TOKENS: tl.constexpr = ROWS * COLUMNS
    CHANNELS: tl.constexpr = HEADS * HEAD_DIM
    head = tl.program_id(0)
    first_y, first_x, columns, windows, first = _run_of_windows(
        tl.program_id(1), batch, windows_y, windows_x, EDGES_Y, EDGES_X, PER_PROGRAM
    )
    j = tl.arange(0, BLOCK_J)
    channel = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
    scale = tl.load(scales + head).to(tl.float32) * LOG2_E
    seed = tl.load(seed_pointer) if DROPS else 0
    pixel_j, on_map_j, region_j = _places(
        first_y,
        first_x,
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
    offset_j = pixel_j[:, None] * qkv_stride + channel[None, :]
    for begin in tl.range(0, NUM_TOKENS, BLOCK_I):
        i = begin + tl.arange(0, BLOCK_I)
        pixel_i, on_map_i, region_i = _places(
            first_y,
            first_x,
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
        offset_i = pixel_i[:, None] * qkv_stride + channel[None, :]
        out_offset_i = pixel_i[:, None] * out_stride + channel[None, :]
        bias = _position_bias(table, head, i, j, region_i, region_j, ROWS, COLUMNS, HEADS)
        for step in tl.range(PER_PROGRAM):
            window, pixel, inside = _window_at(
                first + step,
                first_y,
                first_x,
                columns,
                windows,
                batch,
                height,
                width,
                windows_y,
                windows_x,
                ROWS,
                COLUMNS,
            )
            from_q = qkv + pixel * qkv_stride
            from_k = from_q + CHANNELS
            from_v = from_k + CHANNELS
            k_bias = qkv_bias + CHANNELS
            v_bias = k_bias + CHANNELS
            q = _load_tile(from_q, offset_i, on_map_i & inside, i, channel, qkv_bias, NUM_TOKENS, PADDED)
            k = _load_tile(from_k, offset_j, on_map_j & inside, j, channel, k_bias, NUM_TOKENS, PADDED)
            v = _load_tile(from_v, offset_j, on_map_j & inside, j, channel, v_bias, NUM_TOKENS, PADDED)
            if COSINE:
                q = (q.to(tl.float32) * _inverse_length(q)[:, None]).to(q.dtype)
                k = (k.to(tl.float32) * _inverse_length(k)[:, None]).to(k.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + bias
            largest = tl.max(scores, axis=1)
            p = tl.exp2(scores - largest[:, None])
            total = tl.sum(p, axis=1)
            if DROPS:
                p *= _kept(seed, window, head, i, j, dropout, HEADS, NUM_TOKENS)
            values = tl.dot(p.to(v.dtype), v, input_precision=PRECISION) * (1.0 / total)[:, None]
            to = out + pixel * out_stride + out_offset_i
            tl.store(to, values.to(out.dtype.element_ty), mask=(on_map_i & inside)[:, None])


@triton.jit
def _through_normalisation(gradient, tile, inverse_length):
    """Convert the gradient of a normalised row to the gradient of the row."""
    unit = tile.to(tl.float32) * inverse_length[:, None]
    along = tl.sum(gradient * unit, axis=1)
    return (gradient - unit * along[:, None]) * inverse_length[:, None]


@triton.jit
def window_attention_backward(
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
    batch,
    height,
    width,
    windows_y,
    windows_x,
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
    EDGES_Y: tl.constexpr,
    EDGES_X: tl.constexpr,
    PADDED: tl.constexpr,
    COSINE: tl.constexpr,
    DROPS: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NUM_TOKENS: tl.constexpr = ROWS * COLUMNS
    CHANNELS: tl.constexpr = HEADS * HEAD_DIM
    ONE_BLOCK: tl.constexpr = BLOCK_I == BLOCK_J
    head = tl.program_id(0)
    program = tl.program_id(1)
    first_y, first_x, columns, windows, first = _run_of_windows(
        program, batch, windows_y, windows_x, EDGES_Y, EDGES_X, PER_PROGRAM
    )
    j = tl.arange(0, BLOCK_J)
    channel = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
    plain_scale = tl.load(scales + head).to(tl.float32)
    seed = tl.load(seed_pointer) if DROPS else 0
    own_bias_part = bias_parts + (program * HEADS + head).to(tl.int64) * (NUM_TOKENS * NUM_TOKENS)
    pixel_j, on_map_j, region_j = _places(
        first_y,
        first_x,
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
    offset_j = pixel_j[:, None] * qkv_stride + channel[None, :]
    grad_offset_j = pixel_j[:, None] * grad_stride + channel[None, :]
    out_offset_j = pixel_j[:, None] * out_stride + channel[None, :]
    first_i = tl.arange(0, BLOCK_I)
    if ONE_BLOCK:
        bias_of_block = _position_bias(table, head, j, j, region_j, region_j, ROWS, COLUMNS, HEADS)
    bias_sum = tl.zeros((BLOCK_I, BLOCK_J), dtype=tl.float32)
    padding_k = tl.zeros((HEAD_DIM,), dtype=tl.float32)
    padding_v = tl.zeros((HEAD_DIM,), dtype=tl.float32)
    scale_sum = tl.zeros((BLOCK_I,), dtype=tl.float32)
    for step in tl.range(PER_PROGRAM):
        window, pixel, inside = _window_at(
            first + step, first_y, first_x, columns, windows, batch, height, width, windows_y, windows_x, ROWS, COLUMNS
        )
        from_q = qkv + pixel * qkv_stride
        from_k = from_q + CHANNELS
        from_v = from_k + CHANNELS
        k_bias = qkv_bias + CHANNELS
        v_bias = k_bias + CHANNELS
        to_q = grad_qkv + pixel * grad_stride
        to_k = to_q + CHANNELS
        k_raw = _load_tile(from_k, offset_j, on_map_j & inside, j, channel, k_bias, NUM_TOKENS, PADDED)
        v = _load_tile(from_v, offset_j, on_map_j & inside, j, channel, v_bias, NUM_TOKENS, PADDED)
        k = k_raw
        if COSINE:
            inverse_k = _inverse_length(k_raw)
            k = (k_raw.to(tl.float32) * inverse_k[:, None]).to(k_raw.dtype)
        grad_k = tl.zeros((BLOCK_J, HEAD_DIM), dtype=tl.float32)
        grad_v = tl.zeros((BLOCK_J, HEAD_DIM), dtype=tl.float32)
        for begin in tl.range(0, NUM_TOKENS, BLOCK_I):
            i = begin + first_i
            if ONE_BLOCK:
                on_map_i = on_map_j
                offset_i = offset_j
                out_offset_i = out_offset_j
                grad_offset_i = grad_offset_j
                bias = bias_of_block
            else:
                pixel_i, on_map_i, region_i = _places(
                    first_y,
                    first_x,
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
                offset_i = pixel_i[:, None] * qkv_stride + channel[None, :]
                out_offset_i = pixel_i[:, None] * out_stride + channel[None, :]
                grad_offset_i = pixel_i[:, None] * grad_stride + channel[None, :]
                bias = _position_bias(table, head, i, j, region_i, region_j, ROWS, COLUMNS, HEADS)
            q_raw = _load_tile(from_q, offset_i, on_map_i & inside, i, channel, qkv_bias, NUM_TOKENS, PADDED)
            from_out = grad_out + pixel * out_stride + out_offset_i
            grad_values = tl.load(from_out, mask=(on_map_i & inside)[:, None], other=0.0).to(v.dtype)
            q = q_raw
            if COSINE:
                inverse_q = _inverse_length(q_raw)
                q = (q_raw.to(tl.float32) * inverse_q[:, None]).to(q_raw.dtype)
            products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            # Computed again, sums too: that costs less than to keep them. A row of no token may see none.
            scores = products * (plain_scale * LOG2_E) + bias
            p = tl.exp2(scores - tl.maximum(tl.max(scores, axis=1), LEAST)[:, None])
            p *= (1.0 / tl.maximum(tl.sum(p, axis=1), TINY))[:, None]
            grad_p = tl.dot(grad_values, tl.trans(v), input_precision=PRECISION)
            kept_p = p
            if DROPS:
                kept = _kept(seed, window, head, i, j, dropout, HEADS, NUM_TOKENS)
                kept_p = p * kept
                grad_p *= kept
            grad_v += tl.dot(tl.trans(kept_p.to(v.dtype)), grad_values, input_precision=PRECISION)
            # Where i or j is no token, or the window is none, grad_p or p is zero.
            grad_scores = p * (grad_p - tl.sum(p * grad_p, axis=1)[:, None])
            if ONE_BLOCK:
                bias_sum += grad_scores
            else:
                place = own_bias_part + i[:, None] * NUM_TOKENS + j[None, :]
                is_pair = (i < NUM_TOKENS)[:, None] & (j < NUM_TOKENS)[None, :]
                sum_so_far = tl.load(place, mask=is_pair & (step > 0), other=0.0)
                tl.store(place, sum_so_far + grad_scores, mask=is_pair)
            if COSINE:
                scale_sum += tl.sum(grad_scores * products, axis=1)
            narrow = grad_scores.to(q.dtype)
            grad_q = tl.dot(narrow, k, input_precision=PRECISION) * plain_scale
            grad_k += tl.dot(tl.trans(narrow), q, input_precision=PRECISION)
            if COSINE:
                grad_q = _through_normalisation(grad_q, q_raw, inverse_q)
            to = to_q + grad_offset_i
            tl.store(to, grad_q.to(grad_qkv.dtype.element_ty), mask=(on_map_i & inside)[:, None])
        grad_k *= plain_scale
        if COSINE:
            grad_k = _through_normalisation(grad_k, k_raw, inverse_k)
        tl.store(to_k + grad_offset_j, grad_k.to(grad_qkv.dtype.element_ty), mask=(on_map_j & inside)[:, None])
        tl.store(
            to_k + CHANNELS + grad_offset_j,
            grad_v.to(grad_qkv.dtype.element_ty),
            mask=(on_map_j & inside)[:, None],
        )
        if PADDED:
            is_padding_j = (j < NUM_TOKENS) & (on_map_j == 0) & inside
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
def window_attention_table_gradient(
    bias_parts,
    table_gradient,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Sum the bias gradient of each relative position: over all pairs (i, j) of tokens at that position, and over the
    partial results of all programs.

    One program computes one row of the table for one head.
    """
    NUM_TOKENS: tl.constexpr = ROWS * COLUMNS
    head = tl.program_id(0)
    row = tl.program_id(1)
    dy = row // (2 * COLUMNS - 1) - (ROWS - 1)
    dx = row % (2 * COLUMNS - 1) - (COLUMNS - 1)
    i = tl.arange(0, BLOCK_I)
    y = i // COLUMNS - dy
    x = i % COLUMNS - dx
    is_pair = (i < NUM_TOKENS) & (y >= 0) & (y < ROWS) & (x >= 0) & (x < COLUMNS)
    pair = i * NUM_TOKENS + y * COLUMNS + x
    sums = tl.zeros((BLOCK_PARTS, BLOCK_I), dtype=tl.float32)
    for begin in tl.range(0, NUM_PARTS, BLOCK_PARTS):
        part = begin + tl.arange(0, BLOCK_PARTS)
        place = (part * HEADS + head).to(tl.int64) * (NUM_TOKENS * NUM_TOKENS)
        here = (part < NUM_PARTS)[:, None] & is_pair[None, :]
        sums += tl.load(bias_parts + place[:, None] + pair[None, :], mask=here, other=0.0)
    total = tl.sum(tl.sum(sums, axis=0), axis=0)
    tl.store(table_gradient + row * HEADS + head, total.to(table_gradient.dtype.element_ty))
