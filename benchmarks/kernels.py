"""Fused kernels beside the strongest formulations in plain PyTorch.

    python benchmarks/kernels.py --out kernels.jsonl           # all rows; needs a CUDA device and timm
    python benchmarks/kernels.py --only window_attention --batch 1 8

The kernel's tests run first: no time is taken of what is wrong. Every row is one layer in one dtype: forward, and
backward by itself, as median and 20th and 80th percentile over the repeats of `triton.testing.do_bench`, which clears
the L2 cache in between. `floor` is the time in which the device copies the bytes that must be moved, at the rate that a
copy of 1 GiB reached in the same run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from stamp import device_stamp
from torch import Tensor
from torch.nn import functional

from steptune.kernels.window_attention import Geometry, window_attention
from steptune.kernels.window_attention.reference import relative_index, shift_mask

ROOT = Path(__file__).resolve().parents[1]
QUANTILES = (0.5, 0.2, 0.8)
STAGES = {  # map, channels, heads
    "swin_t 224 stage 1": (56, 96, 3),
    "swin_t 224 stage 2": (28, 192, 6),
    "swin_t 224 stage 3": (14, 384, 12),
    "swin_b 224 stage 1": (56, 128, 4),
}


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
        self.qkv = torch.randn(batch, side, side, 3 * channels, device="cuda").to(dtype).requires_grad_()
        self.table = (0.02 * torch.randn(self.geometry.table_length, heads, device="cuda")).requires_grad_()
        self.scale = (channels // heads) ** -0.5
        self.scale_h = torch.full((heads,), self.scale, device="cuda")
        self.index = relative_index(self.geometry).cuda()
        self.mask = shift_mask(self.geometry, side, side).cuda() if shift else None

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


def timed(function: Callable[[], object]) -> dict[str, float]:
    from triton.testing import do_bench

    median, low, high = do_bench(function, warmup=25, rep=100, quantiles=QUANTILES)
    return {"median_us": median * 1e3, "p20_us": low * 1e3, "p80_us": high * 1e3}


def time_of(function: Callable[[Tensor, Tensor], Tensor], layer: Layer) -> dict[str, dict[str, float]]:
    with torch.no_grad():
        forward = timed(lambda: function(layer.qkv, layer.table))
    out = function(layer.qkv, layer.table)
    weights = torch.randn_like(out)
    backward = timed(lambda: torch.autograd.grad(out, (layer.qkv, layer.table), weights, retain_graph=True))
    return {"forward": forward, "backward": backward}


def copy_rate() -> float:
    """Bytes moved (read and written) by a copy of 1 GiB, in bytes per second."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (timed(lambda: target.copy_(source))["median_us"] * 1e-6)


def row(name: str, batch: int, shift: int, dtype: torch.dtype, rate: float) -> dict:
    side, channels, heads = STAGES[name]
    layer = Layer(batch, side, channels, heads, shift, dtype)
    element = batch * side * side * channels * layer.qkv.element_size()
    with torch.no_grad():
        wanted = layer.by_steps(layer.qkv, layer.table)
        for function in (layer.ours, layer.by_sdpa):
            error = (function(layer.qkv, layer.table) - wanted).float().norm() / wanted.float().norm()
            assert error < 0.02, f"{function.__name__} is wrong by {error}"
    formulations = {
        "ours": layer.ours,
        "eager": layer.by_steps,
        "compiled": torch.compile(layer.by_steps, dynamic=False),
        "sdpa": layer.by_sdpa,
        "sdpa compiled": torch.compile(layer.by_sdpa, dynamic=False),
    }
    times: dict[str, dict] = {}
    for label, function in formulations.items():
        torch._dynamo.reset()
        try:
            times[label] = time_of(function, layer)
        except Exception as error:
            times[label] = {"failed": f"{type(error).__name__}: {error}"[:300]}
    return {
        "kernel": "window_attention",
        "layer": name,
        "batch": batch,
        "shift": shift,
        "dtype": str(dtype).removeprefix("torch."),
        "floor_us": {"forward": 4 * element / rate * 1e6, "backward": 7 * element / rate * 1e6},
        "times": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 8, 1])
    parser.add_argument("--layers", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "kernels.jsonl")
    arguments = parser.parse_args()
    files = ["tests/contracts/test_kernels.py", "tests/unit/test_window_attention.py"]
    tests = [sys.executable, "-m", "pytest", "-q", "-n", "8", "-p", "no:benchmark", *files]
    subprocess.run(tests, check=True, cwd=ROOT)
    rate = copy_rate()
    with arguments.out.open("a", encoding="utf-8") as file:
        for batch in arguments.batch:
            for name in arguments.layers:
                for shift in (0, 3):
                    found = row(name, batch, shift, getattr(torch, arguments.dtype), rate)
                    found = {**found, "copy_bytes_per_s": rate, **device_stamp()}
                    file.write(json.dumps(found) + "\n")
                    file.flush()
                    ours, floor = found["times"]["ours"], found["floor_us"]
                    text = ", ".join(
                        f"{direction} {ours[direction]['median_us']:.1f} us = "
                        f"{ours[direction]['median_us'] / floor[direction]:.2f} x floor"
                        for direction in ("forward", "backward")
                    )
                    print(f"batch {batch} {name} shift {shift}: {text}", flush=True)
                    for label, times in found["times"].items():
                        print(
                            f"    {label}: "
                            + (
                                times.get("failed")
                                or ", ".join(
                                    f"{direction} {value['median_us']:.1f}" for direction, value in times.items()
                                )
                            ),
                            flush=True,
                        )


if __name__ == "__main__":
    main()
