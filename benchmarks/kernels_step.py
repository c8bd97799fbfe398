"""A training step of Swin with the window-attention kernel and without: eager, and compiled as a whole.

    python benchmarks/kernels_step.py --seconds 285 --out FOLDER        # needs a CUDA device and timm

timm's Swin-T (batch 128) and Swin-B (batch 64) at 224 x 224, autocast to bfloat16, fused AdamW; the kernel is applied
as `fused_kernels` does it. Processes of their own compile all models side by side first, so that the timed ones find
the code in the compiler's cache. Loss and gradients of a step with the kernel are compared with those without before
anything is timed. Each line is the median, with 20th and 80th percentile, over steps timed one by one with the device's
events, in rounds in which all ways of a model take turns. Nothing new begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from kernel_timing import DEVICE, ROOT, Clock
from stamp import device_stamp

from steptune.kernels.applying import use_kernel

NUM_WARMUP, NUM_STEPS, NUM_ROUNDS = 5, 10, 3
TOLERANCE = 0.05
"""Largest difference of gradients under bfloat16: the norm of all differences over the norm of all."""
MODELS = {"swin_tiny_patch4_window7_224": 128, "swin_base_patch4_window7_224": 64}
WAYS = {  # kernel, compiled
    "eager": (False, False),
    "eager, kernel": (True, False),
    "compiled": (False, True),
    "compiled, kernel": (True, True),
}
COMPILE_S = 150
"""Seconds that the processes that fill the compiler's cache may take."""
FEW_THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}


class TrainingStep:
    """A step that can be called: `backward`, and an update by `optimizer`."""

    optimizer: torch.optim.Optimizer

    def backward(self) -> torch.Tensor:
        """The loss, whose gradients are left in the parameters."""
        raise NotImplementedError

    def __call__(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Step(TrainingStep):
    def __init__(self, model: torch.nn.Module, batch: int, compiled: bool) -> None:
        self.model = torch.compile(model, dynamic=False) if compiled else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.images = torch.randn(batch, 3, 224, 224, device=DEVICE, generator=generator)
        self.labels = torch.randint(1000, (batch,), device=DEVICE, generator=generator)

    def backward(self) -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        return loss.detach()


def make_step(model: torch.nn.Module, batch: int, way: str) -> Step:
    kernel, compiled = WAYS[way]
    own = copy.deepcopy(model)
    return Step(use_kernel(own, "window_attention") if kernel else own, batch, compiled)


def step_times_ms(step: TrainingStep) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_STEPS + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def quantiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    parts = (("median", 0.5), ("p20", 0.2), ("p80", 0.8))
    return {name: ordered[int(part * (len(ordered) - 1))] for name, part in parts}


def check(model: torch.nn.Module, batch: int) -> dict[str, float]:
    """Compare a step's loss and gradients with the kernel and without.

    Raises:
        ValueError: They differ by more than 16-bit numbers do.
    """
    plain, changed = make_step(model, batch, "eager"), make_step(model, batch, "eager, kernel")
    losses = [float(step.backward()) for step in (plain, changed)]
    pairs = [(p.grad, q.grad) for p, q in zip(plain.model.parameters(), changed.model.parameters(), strict=True)]
    norms = [(float((p - q).norm()), float(p.norm())) for p, q in pairs if p is not None and q is not None]
    difference, whole = (sum(n[i] ** 2 for n in norms) ** 0.5 for i in (0, 1))
    found = {"losses differ by": abs(losses[0] - losses[1]), "gradients differ by": difference / whole}
    if found["losses differ by"] > 0.01 or found["gradients differ by"] > TOLERANCE:
        raise ValueError(f"another training: {found}")
    return found


def make_model(name: str) -> torch.nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model(name, drop_path_rate=0.0).to(DEVICE)


def fill_cache(models: dict[str, int], clock: Clock) -> None:
    """Compile all models in processes of their own, side by side."""
    ways = [way for way, (_, compiled) in WAYS.items() if compiled]
    command = [sys.executable, __file__, "--only-compile"]
    processes = [
        subprocess.Popen([*command, f"{name}:{batch}:{way}"], env={**os.environ, **FEW_THREADS})
        for (name, batch), way in itertools.product(models.items(), ways)
    ]
    for process in processes:
        try:
            process.wait(max(1, COMPILE_S - clock.passed))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    print(f"{clock.passed:5.0f} s  compiled; exit codes {[process.returncode for process in processes]}", flush=True)


def time_model(name: str, batch: int, clock: Clock) -> list[dict]:
    model = make_model(name)
    about = {"model": name, "batch": batch, **check(model, batch), **device_stamp()}
    steps: dict[str, Step] = {}
    rows = []
    for way in WAYS:
        if clock.left < 5:
            rows.append({**about, "label": way, "failed": "not begun: the time was over"})
            continue
        torch._dynamo.reset()
        try:
            steps[way] = make_step(model, batch, way)
            for _ in range(NUM_WARMUP):
                steps[way]()
            torch.cuda.synchronize()
        except Exception as reason:
            rows.append({**about, "label": way, "failed": f"{type(reason).__name__}: {reason}"[:400]})
            steps.pop(way, None)
        print(f"{clock.passed:5.0f} s  {name}, {way}: ready", flush=True)
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(NUM_ROUNDS):
        for way, step in steps.items():
            times[way] += step_times_ms(step)
    rows += [{**about, "label": way, "step_ms": quantiles(own)} for way, own in times.items()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=285)
    parser.add_argument("--only-compile", help="model:batch:way, of a process that fills the compiler's cache")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    arguments = parser.parse_args()
    if arguments.only_compile:
        name, batch, way = arguments.only_compile.split(":")
        make_step(make_model(name), int(batch), way).backward()
        return
    clock = Clock(arguments.seconds)
    models = {name: MODELS[name] for name in arguments.models}
    arguments.out.mkdir(parents=True, exist_ok=True)
    fill_cache(models, clock)
    with (arguments.out / "kernels_step.jsonl").open("a", encoding="utf-8") as file:
        for name, batch in models.items():
            for row in time_model(name, batch, clock):
                file.write(json.dumps(row) + "\n")
                file.flush()
                found = row.get("step_ms")
                text = row.get("failed") or "{median:.2f} ms ({p20:.2f} to {p80:.2f})".format(**found)
                print(f"{clock.passed:5.0f} s  {name}, batch {batch}, {row['label']}: {text}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
