"""Settings of the window-attention kernel, one line each, beside the strongest formulations in plain PyTorch.

    python benchmarks/kernels_sweep.py --seconds 140 --out sweep.jsonl      # needs a CUDA device

The layer is Swin-T's first stage at batch 128 in bfloat16, shifted, unless `--layer` and `--shift` say otherwise. The
kernel's tests run first; each setting's values and gradients are compared with the published steps before it is timed.
Directions of the kernel are timed as replays of a CUDA graph, so that no host is in the figure; whole formulations as
they are called (`kernel_windows.py`). `x floor` is the time over that of a copy of the same bytes in the same run.
Nothing new begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from kernel_timing import ROOT, captured, copy_rate, error, timed
from kernel_windows import STAGES, Layer, time_of
from stamp import device_stamp
from torch import Tensor

from steptune.kernels.window_attention import launch

TOLERANCE = 0.02
TESTS = ["tests/contracts/test_kernels.py", "tests/unit/test_window_attention.py"]
Settings = launch.Settings


class Directions:
    """Both directions of the kernel as operators, with what they must give."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.qkv, self.table = layer.qkv.detach(), layer.table.detach()
        geometry = layer.geometry
        window = [geometry.rows, geometry.columns, geometry.shift_rows, geometry.shift_columns]
        self.rest = (layer.scale_h, None, None, window, False, False, 0.0)
        out = layer.by_steps(layer.qkv, layer.table)
        self.weights = torch.randn_like(out)
        self.wanted = [out.detach(), *torch.autograd.grad(out, (layer.qkv, layer.table), self.weights)]

    def forward(self) -> Tensor:
        return torch.ops.steptune.window_attention(self.qkv, self.table, *self.rest)

    def backward(self) -> tuple[Tensor, ...]:
        return torch.ops.steptune.window_attention_backward(self.weights, self.qkv, self.table, *self.rest)

    def check(self, backward: bool) -> None:
        pairs = zip(self.backward(), self.wanted[1:], strict=False) if backward else [(self.forward(), self.wanted[0])]
        for found, wanted in pairs:
            assert error(found, wanted) < TOLERANCE, f"wrong by {error(found, wanted)}"


def variants(backward: bool) -> Iterator[Settings]:
    """The settings to try, those of most promise first."""
    registers = (168, 128, None) if backward else (96, None, 80)
    stages = (1, 2, 3) if backward else (2, 3, 1)
    for programs, max_registers, num_stages in itertools.product((1056, 528, 2112), registers, stages):
        yield Settings(programs=programs, num_stages=num_stages, max_registers=max_registers)
    for num_warps in (8, 2):
        yield Settings(num_warps=num_warps, num_stages=stages[0])


class Sweep:
    def __init__(self, arguments: argparse.Namespace, begun: float) -> None:
        self.arguments, self.begun = arguments, begun
        side, channels, heads = STAGES[arguments.layer]
        self.layer = Layer(arguments.batch, side, channels, heads, arguments.shift, torch.bfloat16)
        self.rate = copy_rate()
        self.element = arguments.batch * side * side * channels * 2
        self.about = {
            "layer": arguments.layer,
            "batch": arguments.batch,
            "shift": arguments.shift,
            "copy_bytes_per_s": self.rate,
            **device_stamp(),
        }
        print(f"copy {self.rate / 1e12:.2f} TB/s", flush=True)

    def is_over(self) -> bool:
        return time.monotonic() - self.begun > self.arguments.seconds

    def floor_us(self, direction: str) -> float:
        return {"forward": 4, "backward": 7}[direction] * self.element / self.rate * 1e6

    def tell(self, label: str, times: dict[str, dict[str, float]], **more: object) -> None:
        with self.arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"label": label, "times": times, **more, **self.about}) + "\n")
        text = ", ".join(
            f"{direction} {t['median_us']:.1f} us ({t['p20_us']:.1f} to {t['p80_us']:.1f})"
            f" = {t['median_us'] / self.floor_us(direction):.2f} x floor"
            for direction, t in times.items()
        )
        print(f"{time.monotonic() - self.begun:5.0f} s  {label}: {text}", flush=True)

    def failed(self, label: str, reason: Exception) -> None:
        print(f"{time.monotonic() - self.begun:5.0f} s  {label}: {type(reason).__name__}: {reason}"[:300], flush=True)

    def run_variants(self, direction: str, until: float) -> None:
        backward = direction == "backward"
        name = direction.upper()
        before = getattr(launch, name)
        directions = Directions(self.layer)
        for settings in variants(backward):
            if self.is_over() or time.monotonic() - self.begun > until:
                break
            setattr(launch, name, settings)
            label = f"{direction} {settings}"
            try:
                directions.check(backward)
                times = {direction: timed(captured(directions.backward if backward else directions.forward))}
            except Exception as reason:
                self.failed(label, reason)
            else:
                self.tell(label, times, settings=asdict(settings))
        setattr(launch, name, before)

    def run_formulations(self) -> None:
        layer = self.layer
        formulations = {
            "ours as set": layer.ours,
            "eager": layer.by_steps,
            "sdpa": layer.by_sdpa,
            "compiled": torch.compile(layer.by_steps, dynamic=False),
            "sdpa compiled": torch.compile(layer.by_sdpa, dynamic=False),
            "flex compiled": torch.compile(layer.by_flex(), dynamic=False),
        }
        with torch.no_grad():
            wanted = layer.by_steps(layer.qkv, layer.table)
        for label, function in formulations.items():
            if self.is_over():
                print(f"{label}: not begun", flush=True)
                continue
            torch._dynamo.reset()
            try:
                with torch.no_grad():
                    found = error(function(layer.qkv, layer.table), wanted)
                assert found < TOLERANCE, f"wrong by {found}"
                self.tell(label, time_of(function, layer))
            except Exception as reason:
                self.failed(label, reason)


def main() -> None:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=STAGES, default="swin_t 224 stage 1")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--shift", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "kernels_sweep.jsonl")
    arguments = parser.parse_args()
    if not arguments.no_tests:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "14", "-p", "no:benchmark", "-k", "window", *TESTS]
        subprocess.run([*command, "--durations=3"], check=True, cwd=ROOT)
    sweep = Sweep(arguments, begun)
    passed = time.monotonic() - begun
    left = arguments.seconds - passed
    sweep.run_variants("backward", passed + 0.35 * left)
    sweep.run_variants("forward", passed + 0.55 * left)
    sweep.run_formulations()


if __name__ == "__main__":
    main()
