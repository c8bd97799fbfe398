"""Formulations of the window attention between its projections, and their times.

Backward is timed by itself, again and again over one graph that is kept. Compiled formulations therefore run with
`torch._functorch.config.donated_buffer = False`: by default a compiled backward reuses the memory of what forward
saved, and refuses a graph that is kept. Neither our kernel nor eager PyTorch reuses it. That setting holds for a thread
alone, so that all backward passes are timed in the thread of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch._functorch.config
from kernel_timing import DEVICE, Clock, Times, captured, error, timed
from torch import Tensor
from torch.nn import functional

from steptune.kernels.window_attention import Geometry, window_attention
from steptune.kernels.window_attention.reference import relative_index, shift_mask

torch._functorch.config.donated_buffer = False
STAGES = {  # map, channels, heads
    "swin_t 224 stage 1": (56, 96, 3),
    "swin_t 224 stage 2": (28, 192, 6),
    "swin_t 224 stage 3": (14, 384, 12),
    "swin_b 224 stage 1": (56, 128, 4),
}
Plans = tuple[tuple[str, int, tuple[str, ...]], ...]
PLANS: Plans = (
    ("swin_t 224 stage 1", 128, ("ours", "graph", "eager", "compiled", "sdpa", "flex")),
    ("swin_t 224 stage 1", 8, ("ours", "graph", "eager", "compiled", "sdpa", "flex")),
    ("swin_t 224 stage 1", 4, ("ours", "graph", "eager")),
    ("swin_t 224 stage 1", 1, ("ours", "graph", "eager", "compiled")),
    ("swin_b 224 stage 1", 128, ("ours", "graph", "eager", "compiled", "sdpa", "flex")),
    ("swin_t 224 stage 3", 128, ("ours", "graph", "eager", "compiled", "sdpa", "flex")),
    ("swin_t 224 stage 2", 128, ("ours", "graph", "eager", "compiled", "sdpa")),
)
"""Layer, batch, formulations."""
OTHER_FLEX: Plans = (
    ("swin_t 224 stage 1", 8, ("flex strided", "flex decoding")),
    ("swin_t 224 stage 1", 128, ("flex decoding",)),
)
"""Forms of FlexAttention that may be wrong: run last, since what reads beyond its memory ends all that follows."""
LAYERS = 12
"""Layers of a model, whose forward passes follow each other, and whose backward passes are one call: as many as Swin-T
has.
"""
TOLERANCE = 0.02
"""Relative error that a formulation's values in 16 bits may have."""
FLEX = {
    "FORCE_USE_FLEX_ATTENTION": True,
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "BLOCK_M1": 32,
    "BLOCK_N1": 64,
    "BLOCK_M2": 64,
    "BLOCK_N2": 32,
}
"""Without the first, queries of fewer than 128 tokens run FlexAttention's kernel for decoding."""


def partition(image: Tensor, size: int) -> Tensor:
    batch, height, width, channels = image.shape
    tiles = image.view(batch, height // size, size, width // size, size, channels)
    return tiles.transpose(2, 3).reshape(-1, size * size, channels)


def merge(windows: Tensor, size: int, batch: int, height: int, width: int) -> Tensor:
    tiles = windows.view(batch, height // size, width // size, size, size, -1)
    return tiles.transpose(2, 3).reshape(batch, height, width, -1)


class Layer:
    """One attention layer between its projections, in each formulation."""

    def __init__(self, batch: int, side: int, channels: int, heads: int, shift: int, dtype: torch.dtype) -> None:
        self.geometry = Geometry(rows=7, columns=7, shift_rows=shift, shift_columns=shift)
        self.batch, self.side, self.channels, self.heads, self.shift = batch, side, channels, heads, shift
        self.qkv = torch.randn(batch, side, side, 3 * channels, device=DEVICE).to(dtype).requires_grad_()
        self.table = (0.02 * torch.randn(self.geometry.table_length, heads, device=DEVICE)).requires_grad_()
        self.scale = (channels // heads) ** -0.5
        self.scale_h = torch.full((heads,), self.scale, device=DEVICE)
        self.index = relative_index(self.geometry).to(DEVICE)
        self.mask = shift_mask(self.geometry, side, side).to(DEVICE) if shift else None

    def ours(self, qkv: Tensor, table: Tensor) -> Tensor:
        return window_attention(qkv, table, self.geometry, scale_h=self.scale_h)

    def by_steps(self, qkv: Tensor, table: Tensor) -> Tensor:
        """Compute as published: roll, partition, products, bias, mask, softmax, merge, roll."""
        q, k, v = self._windows(qkv)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        scores = scores + self._bias(table).to(scores.dtype)
        if self.mask is not None:
            mask = self.mask.to(scores.dtype) * -100.0
            scores = scores.view(self.batch, -1, self.heads, 49, 49) + mask[None, :, None]
            scores = scores.view(-1, self.heads, 49, 49)
        return self._map(scores.softmax(-1) @ v)

    def by_sdpa(self, qkv: Tensor, table: Tensor) -> Tensor:
        """The windows of an image as heads of one attention, so that bias and mask are one tensor for all images."""
        q, k, v = self._windows(qkv)
        num_windows = (self.side // 7) ** 2
        q, k, v = (t.reshape(self.batch, num_windows * self.heads, 49, -1) for t in (q, k, v))
        bias = self._bias(table).to(q.dtype).expand(num_windows, -1, -1, -1)
        if self.mask is not None:
            bias = bias.masked_fill(self.mask[:, None], float("-inf"))
        bias = functional.pad(bias.reshape(1, -1, 49, 49), (0, 7))[..., :49].expand(self.batch, -1, -1, -1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)
        return self._map(out.reshape(-1, self.heads, 49, self.channels // self.heads))

    def by_flex(self, *, decoding: bool = False, dense: bool = True) -> Callable[[Tensor, Tensor], Tensor]:
        """FlexAttention over windows, with the learned bias and the mask in the modification of scores.

        Args:
            decoding: Leave the choice of the kernel to the compiler, which takes that for decoding.
            dense: Copy queries, keys and values first.
        """
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        num_windows = (self.side // 7) ** 2
        block = 128 if decoding else 64
        every_pair = create_block_mask(lambda w, h, i, j: i >= 0, None, None, 49, 49, device=DEVICE, BLOCK_SIZE=block)

        def formulation(qkv: Tensor, table: Tensor) -> Tensor:
            q, k, v = self._windows(qkv)
            if dense:
                q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            bias = self._bias(table).to(q.dtype)

            def modified(score: Tensor, window: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
                score = score + bias[head, i, j]
                if self.mask is None:
                    return score
                return torch.where(self.mask[window % num_windows, i, j], float("-inf"), score)

            options = {} if decoding else FLEX
            out = flex_attention(
                q, k, v, score_mod=modified, block_mask=every_pair, scale=self.scale, kernel_options=options
            )
            return self._map(out)

        return formulation

    def _windows(self, qkv: Tensor) -> Tensor:
        if self.shift:
            qkv = torch.roll(qkv, (-self.shift, -self.shift), (1, 2))
        windows = partition(qkv, 7)
        return windows.view(len(windows), 49, 3, self.heads, -1).permute(2, 0, 3, 1, 4)

    def _map(self, values: Tensor) -> Tensor:
        image = merge(values.transpose(1, 2).reshape(-1, 49, self.channels), 7, self.batch, self.side, self.side)
        return torch.roll(image, (self.shift, self.shift), (1, 2)) if self.shift else image

    def _bias(self, table: Tensor) -> Tensor:
        return table[self.index].permute(2, 0, 1)


def time_of(function: Callable[[Tensor, Tensor], Tensor], layer: Layer) -> Times:
    """Time both directions, each by itself and as a training has them: with the graph built anew."""
    with torch.no_grad():
        forward = timed(lambda: function(layer.qkv, layer.table))
    out = function(layer.qkv, layer.table)
    weights = torch.randn_like(out)
    with torch.autograd.set_multithreading_enabled(False):
        backward = timed(lambda: torch.autograd.grad(out, (layer.qkv, layer.table), weights, retain_graph=True))

        def both_ways() -> tuple[Tensor, ...]:
            return torch.autograd.grad(function(layer.qkv, layer.table), (layer.qkv, layer.table), weights)

        maps = [layer.qkv.detach().clone().requires_grad_() for _ in range(LAYERS)]

        def layers() -> tuple[Tensor, ...]:
            return torch.autograd.grad(
                [function(qkv, layer.table) for qkv in maps], [*maps, layer.table], [weights] * LAYERS
            )

        both, in_a_row = timed(both_ways), timed(layers)
    per_layer = {name: value / LAYERS for name, value in in_a_row.items()}
    return {"forward": forward, "backward": backward, "both": both, "layer of twelve": per_layer}


def checked_times(function: Callable[[Tensor, Tensor], Tensor], layer: Layer, *, in_graph: bool = False) -> Times:
    """Time a formulation that computes what the published steps do, values and gradients.

    Raises:
        ValueError: It does not.
    """

    def results(of: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        out = of(layer.qkv, layer.table)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        return [out.detach(), *torch.autograd.grad(out, (layer.qkv, layer.table), weights)]

    if layer.batch <= 16:  # where the random weights are made on the host
        for name, found, wanted in zip(
            ("values", "gradient of qkv", "gradient of the table"),
            results(function),
            results(layer.by_steps),
            strict=True,
        ):
            if not error(found, wanted) < TOLERANCE:
                raise ValueError(f"{name} wrong by {error(found, wanted):.3g}")
    else:
        with torch.no_grad():
            wrong = error(function(layer.qkv, layer.table), layer.by_steps(layer.qkv, layer.table))
        if not wrong < TOLERANCE:
            raise ValueError(f"values wrong by {wrong:.3g}")
    if not in_graph:
        return time_of(function, layer)
    return graph_times(layer)


def graph_times(layer: Layer) -> Times:
    """Time both directions of the kernel as replays of a graph."""
    geometry = layer.geometry
    window = [geometry.rows, geometry.columns, geometry.shift_rows, geometry.shift_columns]
    rest = (layer.scale_h, None, None, window, False, False, 0.0)
    qkv, table = layer.qkv.detach(), layer.table.detach()
    weights = torch.randn_like(torch.ops.steptune.window_attention(qkv, table, *rest))
    backward = torch.ops.steptune.window_attention_backward
    return {
        "forward": timed(captured(lambda: torch.ops.steptune.window_attention(qkv, table, *rest))),
        "backward": timed(captured(lambda: backward(weights, qkv, table, *rest))),
    }


def make_layer(name: str, batch: int, dtype: torch.dtype) -> Layer:
    torch.manual_seed(0)
    return Layer(batch, *STAGES[name], 3, dtype)


def formulation(layer: Layer, label: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Give a formulation in plain PyTorch by its label."""
    if label == "eager":
        return layer.by_steps
    ways = {
        "compiled": lambda: layer.by_steps,
        "sdpa": lambda: layer.by_sdpa,
        "flex": layer.by_flex,
        "flex strided": lambda: layer.by_flex(dense=False),
        "flex decoding": lambda: layer.by_flex(decoding=True),
    }
    found = ways[label]()
    torch._dynamo.reset()
    return torch.compile(found, dynamic=False) if DEVICE.type == "cuda" else found


def fill_cache(label: str) -> None:
    """Compile a formulation for all layers, as a process beside others may."""
    for name, batch, labels in (*PLANS, *OTHER_FLEX):
        if label not in labels:
            continue
        layer = make_layer(name, batch, torch.bfloat16)
        try:
            out = formulation(layer, label)(layer.qkv, layer.table)
            torch.autograd.grad(out, (layer.qkv, layer.table), torch.randn_like(out))
        except Exception as reason:
            print(f"{label}: {type(reason).__name__}", flush=True)  # its row will say it


def times_of(layer: Layer, label: str) -> Times:
    if label in ("ours", "graph"):
        return checked_times(layer.ours, layer, in_graph=label == "graph")
    return checked_times(formulation(layer, label), layer)


def rows(
    rate: float, clock: Clock, *, plans: Plans = PLANS, small: bool = False, compiled: bool = True
) -> Iterator[dict]:
    """One row a layer and batch.

    Args:
        small: Tries the script on a CPU.
        compiled: Time formulations that are compiled, too.
    """
    plans = (("swin_t 224 stage 3", 1, ("ours", "graph", "eager", "sdpa")),) if small else plans
    for name, batch, labels in plans:
        layer = make_layer(name, batch, torch.float32 if small else torch.bfloat16)
        element = layer.qkv.nbytes // 3
        yield {
            "kernel": "window_attention",
            "case": f"{name}, batch {batch}, shift 3, {str(layer.qkv.dtype).removeprefix('torch.')}",
            "floor_us": {
                part: elements * element / rate * 1e6
                for part, elements in (("forward", 4), ("backward", 7), ("both", 11), ("layer of twelve", 11))
            },
            "times": {
                label: clock.attempt(partial(times_of, layer, label))
                for label in labels
                if compiled or label in ("ours", "graph", "eager")
            },
        }
