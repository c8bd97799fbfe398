"""A training step of Swin with the window-attention kernel and without: eager, and compiled as a whole.

    python benchmarks/kernels_step.py --seconds 115 --out step.jsonl        # needs a CUDA device and timm

timm's Swin-T at 224 x 224, batch 128, autocast to bfloat16, fused AdamW; the kernel is applied as `fused_kernels` does
it. Loss and gradients of a step with the kernel are compared with those without before anything is timed. Each line is
the median, with 20th and 80th percentile, over steps timed one by one with the device's events. What compiles last may
not begin: nothing new begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from pathlib import Path

import torch
from stamp import device_stamp

from kernels import ROOT
from steptune.kernels.applying import use_kernel

NUM_WARMUP, NUM_STEPS = 5, 30
TOLERANCE = 0.05
"""Largest difference of gradients under bfloat16: the norm of all differences over the norm of all."""


class Step:
    def __init__(self, model: torch.nn.Module, batch: int, compiled: bool) -> None:
        self.model = torch.compile(model, dynamic=False) if compiled else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator("cuda").manual_seed(0)
        self.images = torch.randn(batch, 3, 224, 224, device="cuda", generator=generator)
        self.labels = torch.randint(1000, (batch,), device="cuda", generator=generator)

    def backward(self) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        return loss.detach()

    def __call__(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def timed_steps(step: Step) -> dict[str, float]:
    for _ in range(NUM_WARMUP):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_STEPS + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return {name: times[int(part * (NUM_STEPS - 1))] for name, part in (("median", 0.5), ("p20", 0.2), ("p80", 0.8))}


def check(model: torch.nn.Module, batch: int) -> None:
    """Compare a step's loss and gradients with the kernel and without."""
    plain, changed = (
        Step(copy.deepcopy(m), batch, False) for m in (model, use_kernel(copy.deepcopy(model), "window_attention"))
    )
    losses = [float(step.backward()) for step in (plain, changed)]
    pairs = [(p.grad, q.grad) for p, q in zip(plain.model.parameters(), changed.model.parameters(), strict=True)]
    difference = float(torch.stack([(p - q).norm() for p, q in pairs if p is not None]).norm())
    whole = float(torch.stack([p.norm() for p, _ in pairs if p is not None]).norm())
    print(f"losses {losses[0]:.5f} and {losses[1]:.5f}; gradients differ by {difference / whole:.4f}", flush=True)
    assert abs(losses[0] - losses[1]) < 0.01, "another loss"
    assert difference < TOLERANCE * whole, "other gradients"


def main() -> None:
    import timm

    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="swin_tiny_patch4_window7_224")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=115)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "kernels_step.jsonl")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = timm.create_model(arguments.model, drop_path_rate=0.0).cuda()
    check(model, arguments.batch)
    for label, kernel, compiled in (
        ("eager", False, False),
        ("eager, kernel", True, False),
        ("compiled, kernel", True, True),
        ("compiled", False, True),
    ):
        if time.monotonic() - begun > arguments.seconds:
            print(f"{label}: not begun", flush=True)
            continue
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        step = Step(use_kernel(own, "window_attention") if kernel else own, arguments.batch, compiled)
        try:
            found = timed_steps(step)
        except Exception as error:
            print(f"{label}: {type(error).__name__}: {error}"[:500], flush=True)
            continue
        about = device_stamp()
        with arguments.out.open("a", encoding="utf-8") as file:
            row = {"model": arguments.model, "batch": arguments.batch, "label": label, "step_ms": found, **about}
            file.write(json.dumps(row) + "\n")
        text = f"{found['median']:.2f} ms ({found['p20']:.2f} to {found['p80']:.2f})"
        print(f"{time.monotonic() - begun:5.0f} s  {label}: {text}", flush=True)


if __name__ == "__main__":
    main()
