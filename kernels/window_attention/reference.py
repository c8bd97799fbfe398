"""Reference shifted-window attention, step by step (Liu et al., Swin Transformer, 2021; Swin V2, 2022).

B images, H and W rows and columns of the feature map, C channels of h heads, N = window rows x window columns tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from steptune.kernels.window_attention.geometry import Geometry

MASKED = float("-inf")
"""Score of masked pairs. Published code adds -100, whose exponential is below the smallest FP32 number: the results
agree.
"""


def window_attention(
    qkv_bhwc: Tensor,
    table_rh: Tensor,
    geometry: Geometry,
    *,
    scale_h: Tensor,
    qkv_bias_c: Tensor | None = None,
    cosine: bool = False,
    keep_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention within each window of a feature map, from packed qkv to the heads' concatenated values.

    Args:
        qkv_bhwc: Packed queries, keys and values of shape (B, H, W, 3C), in the order (3, heads, head_dim).
        table_rh: Bias by relative position, of shape ((2 rows - 1) (2 columns - 1), heads).
        geometry: Windows, shift and padding.
        scale_h: Factor of the scores, one per head.
        qkv_bias_c: q, k and v of a padding token, of shape (3C,); zeros where it is None.
        cosine: Whether queries and keys are normalised to length 1 (Swin V2).
        keep_mask: Which probabilities dropout keeps, of shape (windows, heads, N, N).
        dropout: Probability of dropping; kept probabilities are divided by 1 - dropout.

    Returns:
        The values of shape (B, H, W, C), in the dtype of `qkv_bhwc`.
    """
    batch, height, width, channels = qkv_bhwc.shape
    heads = table_rh.shape[1]
    shifts = (-geometry.shift_rows, -geometry.shift_columns)
    bias_c = torch.zeros(channels, dtype=qkv_bhwc.dtype) if qkv_bias_c is None else qkv_bias_c
    if geometry.rolls_before_padding:
        padded = _pad(torch.roll(qkv_bhwc, shifts, (1, 2)), geometry, bias_c)
    else:
        padded = torch.roll(_pad(qkv_bhwc, geometry, bias_c), shifts, (1, 2))
    windows = _partition(padded, geometry)
    num_tokens = windows.shape[1]
    q, k, v = windows.view(len(windows), num_tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
    if cosine:
        q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
    scores = q @ k.transpose(-2, -1) * scale_h.view(1, heads, 1, 1)
    index = relative_index(geometry).to(table_rh.device)
    scores = scores + table_rh[index].permute(2, 0, 1).to(scores.dtype)
    masked = shift_mask(geometry, height, width).to(scores.device).repeat(batch, 1, 1)
    scores = scores.masked_fill(masked[:, None], MASKED)
    probabilities = scores.softmax(-1)
    if keep_mask is not None:
        probabilities = probabilities * keep_mask / (1 - dropout)
    values = (probabilities @ v).transpose(1, 2).reshape(len(windows), num_tokens, -1)
    merged = _merge(values, geometry, batch, height, width)
    if geometry.rolls_before_padding:
        merged = merged[:, :height, :width]
    merged = torch.roll(merged, (geometry.shift_rows, geometry.shift_columns), (1, 2))
    return merged[:, :height, :width]


def relative_index(geometry: Geometry) -> Tensor:
    """Return the bias table's row for each pair of tokens of a window, of shape (N, N)."""
    rows, columns = geometry.rows, geometry.columns
    y = torch.arange(rows).repeat_interleave(columns)
    x = torch.arange(columns).repeat(rows)
    return (y[:, None] - y + rows - 1) * (2 * columns - 1) + (x[:, None] - x + columns - 1)


def shift_mask(geometry: Geometry, height: int, width: int) -> Tensor:
    """Return which pairs of tokens come from different sides of the map, of shape (windows of an image, N, N)."""
    padded_height, padded_width = geometry.padded(height, width)
    region = torch.zeros(1, padded_height, padded_width, 1)
    row_slices = _regions(geometry.rows, geometry.shift_rows)
    column_slices = _regions(geometry.columns, geometry.shift_columns)
    for i, rows in enumerate(row_slices):
        for j, columns in enumerate(column_slices):
            region[:, rows, columns] = 3 * i + j
    region_of_token = _partition(region, geometry).squeeze(-1)
    return region_of_token[:, :, None] != region_of_token[:, None]


def _regions(window: int, shift: int) -> list[slice]:
    return [slice(None)] if not shift else [slice(0, -window), slice(-window, -shift), slice(-shift, None)]


def _pad(image: Tensor, geometry: Geometry, value_c: Tensor) -> Tensor:
    batch, height, width, _ = image.shape
    padded_height, padded_width = geometry.padded(height, width)
    canvas = value_c.to(image.dtype).expand(batch, padded_height, padded_width, -1).clone()
    canvas[:, :height, :width] = image
    return canvas


def _partition(image: Tensor, geometry: Geometry) -> Tensor:
    batch, height, width, channels = image.shape
    rows, columns = geometry.rows, geometry.columns
    tiles = image.view(batch, height // rows, rows, width // columns, columns, channels)
    return tiles.transpose(2, 3).reshape(-1, rows * columns, channels)


def _merge(windows: Tensor, geometry: Geometry, batch: int, height: int, width: int) -> Tensor:
    padded_height, padded_width = geometry.padded(height, width)
    rows, columns = geometry.rows, geometry.columns
    tiles = windows.view(batch, padded_height // rows, padded_width // columns, rows, columns, -1)
    return tiles.transpose(2, 3).reshape(batch, padded_height, padded_width, -1)
